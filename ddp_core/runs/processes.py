"""Which processes belong to a run, and ending them.

torchrun gives every worker a session of its own, so neither process groups nor parents lead from
the agent to all of its descendants once the agent is gone. What does lead there is the run's mark,
an environment variable every descendant inherits; ``/proc/<pid>/environ`` shows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from ddp_core.runs.state import ProcessId

MARK_VARIABLE = "DDP_RUN_MARK"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def boot_id() -> str:
    """The identity of this boot of the machine; a pid of another boot means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """Describe a living process so that it can be recognised later; None if it is gone."""
    try:
        return ProcessId(pid=pid, create_time=psutil.Process(pid).create_time(), boot_id=boot_id())
    except psutil.Error:
        return None


def alive(process: ProcessId | None) -> bool:
    """Tell whether exactly this process is still running; a zombie is not."""
    if process is None or process.boot_id != boot_id():
        return False
    try:
        found = psutil.Process(process.pid)
        # The kernel gives the start in clock ticks of 10 ms.
        return abs(found.create_time() - process.create_time) < 0.05 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def become_subreaper() -> None:
    """Make orphaned descendants children of this process rather than of init (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(mark: str) -> list[int]:
    """All living processes that carry the run's mark, whatever their parent or session."""
    needle = f"{MARK_VARIABLE}={mark}\0".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        # Gone meanwhile, or another user's: neither is ours. A zombie's environ is empty.
        with contextlib.suppress(OSError), Path(entry.path, "environ").open("rb") as environ:
            if needle in environ.read() + b"\0":
                found.append(int(entry.name))
    return found


def owned(mark: str) -> list[int]:
    """What belongs to the run: everything marked, and whatever else descends from this supervisor."""
    found = set(marked(mark))
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
    return sorted(found)


def send(pids: Iterable[int], signum: signal.Signals) -> int:
    """Send a signal to each; returns how many were there to get it."""
    sent = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            sent += 1
    return sent
