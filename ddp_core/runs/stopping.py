"""Ending a run so that nothing of it is left, and proving it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ddp_core.runs import gpus, processes
from ddp_core.runs.store import RunDir
from ddp_core.telemetry import jsonl

# NVML shows a process for a moment after the kernel has ended it.
_GPU_RELEASE_S = 3.0


class Shutdown:
    """One shutdown of one run: SIGTERM, the grace, SIGKILL of everything owned, then the proof.

    The supervisor calls :meth:`step` at every tick until it returns True.

    Args:
        mark: The run's mark.
        agent_pid: torchrun's pid, which passes SIGTERM on to the ranks; None if it is gone.
        grace_s: Seconds from SIGTERM to SIGKILL.
        say: Called with ``(event, message)`` for every signal.
    """

    def __init__(self, mark: str, agent_pid: int | None, grace_s: float, say: Callable[[str, str], None]) -> None:
        self.started = time.monotonic()
        self.escalated = False
        self.ended_pids: set[int] = set()
        self._mark = mark
        self._say = say
        self._deadline = self.started + grace_s
        # The agent asks its workers itself; asking them twice would look like impatience to a rank
        # that saves on the first SIGTERM and leaves on the second.
        self._asked = {agent_pid} if agent_pid is not None else set()
        if agent_pid is not None:
            processes.send([agent_pid], signal.SIGTERM)
            say("signal", f"SIGTERM to torchrun (pid {agent_pid}), {grace_s:g} s of grace")

    @property
    def remaining_s(self) -> float:
        """Seconds of grace that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def shorten(self, grace_s: float) -> None:
        """Bring the end of the grace forward; a second stop never prolongs it."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)

    def step(self, agent_alive: bool) -> bool:
        """Do what is due now; True once nothing of the run is alive."""
        left = processes.owned(self._mark)
        self.ended_pids.update(left)
        if not left and not agent_alive:
            return True
        if self.remaining_s == 0:
            if not self.escalated:
                self._say("signal", f"SIGKILL to {_count(len(left))} still alive after the grace")
            self.escalated = True
            processes.send(left, signal.SIGKILL)
        elif not agent_alive and (orphans := set(left) - self._asked):
            self._asked |= orphans
            processes.send(orphans, signal.SIGTERM)
            self._say("signal", f"SIGTERM to {_count(len(orphans))} that outlived torchrun")
        return False

    def proof(self, gpu_uuids: Iterable[str]) -> dict[str, Any]:
        """What is known at the end.

        Returns:
            ``{"seconds", "escalated", "left_alive", "gpu_memory_released"}``; the last is None when
            the run held no GPU, or when NVML cannot tell.
        """
        left = len(processes.owned(self._mark))
        released = _gpus_released(set(gpu_uuids), self.ended_pids)
        return {
            "seconds": round(time.monotonic() - self.started, 2),
            "escalated": self.escalated,
            "left_alive": left,
            "gpu_memory_released": released,
        }


def stop_words(proof: dict[str, Any]) -> str:
    """The proof as the sentence the user reads: ``stopped in 1.8 s, no process left, GPU memory released``."""
    left = proof["left_alive"]
    words = [f"stopped in {proof['seconds']:.1f} s", f"{_count(left)} left" if left else "no process left"]
    if proof["gpu_memory_released"] is not None:
        words.append("GPU memory released" if proof["gpu_memory_released"] else "GPU memory not released yet")
    if proof["escalated"]:
        words.append("some had to be killed after the grace")
    return ", ".join(words)


def stop_request(run: RunDir) -> dict[str, Any] | None:
    """The recorded intent to stop: ``{"ts", "grace_s"}``, either left out where it could not be written, or None."""
    try:
        return jsonl.loads(run.stop_file.read_bytes()) or {}
    except OSError:
        return None


def _gpus_released(uuids: set[str], pids: set[int]) -> bool | None:
    if not uuids:
        return None
    answers: list[bool | None] = [None]
    deadline = time.monotonic() + _GPU_RELEASE_S

    def ask() -> None:
        while time.monotonic() < deadline:
            on_gpu = gpus.processes()
            known = bool(uuids & set(on_gpu))
            left = any(process["pid"] in pids for uuid in uuids for process in on_gpu.get(uuid, []))
            answers.append(not left if known else None)
            if not left:
                return
            time.sleep(0.1)

    # A driver that hangs is not waited for: what is not known by then stays unknown.
    asking = threading.Thread(target=ask, name="gpu release", daemon=True)
    asking.start()
    asking.join(_GPU_RELEASE_S)
    return answers[-1]


def _count(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"
