"""The store, a folder of run directories, and the layout of one of them.

The run directory is the database: everything any part of this project knows about a run is read
from there, so a dashboard, a command line and a script may all look at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_core import config as config_module
from ddp_core.config import NAME_LIMIT, RunConfig
from ddp_core.errors import UserError
from ddp_core.runs import processes
from ddp_core.runs.state import RunState, read_state

_INTENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RESUMED = "resumed_at_"
_RUN_ID = re.compile(r"(?P<name>.+)-(?P<number>[1-9][0-9]*)")


@dataclass(frozen=True)
class RunDir:
    """One run's directory; the methods say where things are, nothing here keeps state.

    Attributes:
        path: Absolute path of the directory.
    """

    path: Path

    @property
    def id(self) -> str:
        """The run's id, which is its directory's name, such as ``digits-1``."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The RunConfig as launched; never changes afterwards."""
        return self.path / "config.yaml"

    @property
    def state_file(self) -> Path:
        """Written by the supervisor only, by write and rename."""
        return self.path / "state.json"

    @property
    def events_file(self) -> Path:
        """What happened, in order, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def hardware_file(self) -> Path:
        """GPU and host samples, one JSON object a line."""
        return self.path / "hardware.jsonl"

    @property
    def stop_file(self) -> Path:
        """The intent to stop, recorded before the first signal."""
        return self.path / "stop.json"

    @property
    def lock_file(self) -> Path:
        """Locked by the run's one supervisor for as long as it lives."""
        return self.path / "supervisor.lock"

    @property
    def agent_log(self) -> Path:
        """Standard output and error of the present torchrun itself."""
        return self.path / "agent.log"

    def torchrun_logs(self, attempt_base: int) -> Path:
        """Log folder of the torchrun that began with that attempt: 0 for the launch, more for a resume."""
        logs = self.path / "logs"
        return logs / f"{_RESUMED}{attempt_base}" if attempt_base else logs

    def config(self) -> RunConfig:
        """Read the snapshot of the config; UserError if it is missing or damaged."""
        return config_module.load(self.config_file)

    def state(self) -> RunState:
        """Read the recorded state; UserError if it is missing or damaged."""
        return read_state(self.state_file)

    def attempts(self) -> list[int]:
        """Attempts that have a metrics folder, in order."""
        return sorted(
            int(entry.name.removeprefix("attempt_"))
            for entry in (self.path / "metrics").glob("attempt_*")
            if entry.name.removeprefix("attempt_").isdigit()
        )

    def rank_log(self, attempt: int, rank: int) -> Path:
        """The metrics file of one rank in one attempt."""
        return self.path / "metrics" / f"attempt_{attempt}" / f"rank_{rank}.jsonl"

    def rank_logs(self, attempt: int) -> dict[int, Path]:
        """The metrics files of an attempt that are there, by rank."""
        folder = self.path / "metrics" / f"attempt_{attempt}"
        found = {int(p.stem.removeprefix("rank_")): p for p in folder.glob("rank_*.jsonl") if p.stem[5:].isdigit()}
        return dict(sorted(found.items()))

    def output_file(self, attempt: int, local_rank: int, name: str) -> Path | None:
        """One file torchrun keeps for a rank: ``stdout.log``, ``stderr.log`` or ``error.json``.

        torchrun puts a random part into the folder's name, so the file is looked up; it counts its
        attempts from 0 on, so those after a resume are found in the folder of that resume.
        """
        resumed = [entry.name.removeprefix(_RESUMED) for entry in self.torchrun_logs(0).glob(f"{_RESUMED}*")]
        bases = [int(base) for base in resumed if base.isdigit() and int(base) <= attempt]
        base = max(bases, default=0)
        return next(self.torchrun_logs(base).glob(f"*/attempt_{attempt - base}/{local_rank}/{name}"), None)


def _is_run(path: Path) -> bool:
    try:
        return (path / "config.yaml").exists() or (path / "state.json").exists()
    except OSError:  # another user's, closed to us
        return False


class Store:
    """A folder of run directories.

    Args:
        root: The folder; default ``$DDP_STORE``, else ``experiments`` under the current folder.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        try:
            self.root = Path(root or os.environ.get("DDP_STORE") or "experiments").expanduser().absolute()
        except FileNotFoundError:
            raise UserError("the current folder is gone; choose a store by an absolute --store or DDP_STORE") from None

    def run(self, run_id: str) -> RunDir:
        """Find a run; UserError if there is none of that id."""
        path = self.root / run_id
        # An id comes from an address bar: it must not lead out of the store, and may be anything else.
        try:
            found = "/" not in run_id and not run_id.startswith(".") and _is_run(path)
        except (OSError, ValueError):  # too long for a name, or with a NUL in it
            found = False
        if not found:
            shown = run_id if len(run_id) <= NAME_LIMIT + 10 else f"{run_id[:NAME_LIMIT]}…"
            raise UserError(f"there is no run {shown!r} in {self.root}")
        return RunDir(path)

    def runs(self) -> list[RunDir]:
        """All run directories, in no order. A folder that holds neither a config nor a state is not a run."""
        try:
            with os.scandir(self.root) as entries:
                found = [Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"the store {self.root} cannot be read: {error.strerror}") from None
        return [RunDir(path) for path in found if _is_run(path)]

    def create(self, name: str) -> RunDir:
        """Make the next directory of that name: ``name-1``, ``name-2``, …; call under :meth:`locked`."""
        run = RunDir(self.root / self.next_id(name))
        run.path.mkdir()
        return run

    def next_id(self, name: str) -> str:
        """The id that a run of this name would get now.

        A run whose directory was removed under it goes on writing there, so its id is not free yet.
        """
        names = [path.name for path in map(Path, processes.run_dirs()) if path.parent == self.root]
        with contextlib.suppress(OSError):
            names += [path.name for path in self.root.iterdir()]
        numbers = [
            int(match["number"]) for entry in names if (match := _RUN_ID.fullmatch(entry)) and match["name"] == name
        ]
        return f"{name}-{max(numbers, default=0) + 1}"

    def launched(self, intent: str) -> RunDir | None:
        """The run that an intent has started already, if it has."""
        try:
            return self.run(self.intent_file(intent).read_text().strip())
        except (OSError, UserError):
            return None

    def intent_file(self, intent: str) -> Path:
        """Where it is kept which run an intent started; UserError if it is no token of ours."""
        if not _INTENT.fullmatch(intent):
            raise UserError("the launch token is not one of ours; open the launch page again")
        return self.root / ".intents" / intent

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock: launches from tabs, reruns and the command line happen one by one.

        Raises:
            UserError: If the store cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"the store {self.root} cannot be written ({error.strerror}); choose another with --store or DDP_STORE"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
