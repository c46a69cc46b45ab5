"""Where this process stands among the others, and whether it has been asked to stop. No torch here.

torch takes over a second to import, and both are needed before: the rank log says ``start`` at
once, and a signal that arrives during the import must not be lost.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_core.errors import UserError


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun and the launcher say about this process.

    Attributes:
        run_dir: The run directory, with ``config.yaml``.
        rank: Number of this process in the whole run.
        local_rank: Number of this process on this machine; it names the GPU, ``rank`` never does.
        world_size: Processes in the run.
        local_world_size: Processes on this machine.
        attempt: 0 for the first start, counting every elastic restart and every resume.
        alone: Whether torchrun did not start this process: it then trains by itself, without a process group.
    """

    run_dir: Path
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    alone: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read torchrun's variables and ``DDP_RUN_DIR``; UserError if one is missing.

        Without any of torchrun's this is a training in a single process, the baseline on one GPU.
        """
        if "DDP_RUN_DIR" not in environ:
            raise UserError("DDP_RUN_DIR is not set; it must be the folder that holds the run's config.yaml")
        run_dir = Path(environ["DDP_RUN_DIR"]).absolute()
        attempt = int(environ.get("DDP_ATTEMPT_BASE", 0)) + int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & set(environ):
            return cls(run_dir, rank=0, local_rank=0, world_size=1, local_world_size=1, attempt=attempt, alone=True)
        try:
            return cls(
                run_dir=run_dir,
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
                attempt=attempt,
            )
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} is not set; start with torchrun --standalone --nproc-per-node N -m ddp_core.training"
            ) from None

    @property
    def log_path(self) -> Path:
        """This rank's log of this attempt."""
        return self.run_dir / "metrics" / f"attempt_{self.attempt}" / f"rank_{self.rank}.jsonl"


class StopFlag:
    """Turns SIGTERM and SIGINT into a flag that the training loop votes on.

    Until :meth:`defer` is called there is nothing worth finishing, so a signal ends the process at
    once. A thread does that: Python's own handlers wait for the main thread, which may sit for
    minutes in C++, waiting for other ranks or a download.

    Args:
        on_early_stop: Called in the thread before the process ends early, to say so in the log.
    """

    def __init__(self, on_early_stop: Callable[[], None]) -> None:
        self.requested = False
        self._deferred = False
        self._lock = threading.Lock()
        self._on_early_stop = on_early_stop
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name="stop-flag", daemon=True).start()

    def defer(self) -> None:
        """From now on a signal sets :attr:`requested` and the loop decides when to stop."""
        with self._lock:
            self._deferred = True

    def _watch(self) -> None:
        while True:
            number = os.read(self._read, 1)[0]
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            with self._lock:
                self.requested = True
                if not self._deferred:
                    self._on_early_stop()
                    os._exit(0)
