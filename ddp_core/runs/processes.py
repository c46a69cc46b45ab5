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
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from ddp_core.runs.state import ProcessId

MARK_VARIABLE = "DDP_RUN_MARK"
RUN_DIR_VARIABLE = "DDP_RUN_DIR"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def boot_id() -> str:
    """The identity of this boot of the machine; a pid of another boot means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """Describe a living process so that it can be recognised later; None if it is gone."""
    try:
        return ProcessId(pid=pid, create_time=_stat(pid)[1], boot_id=boot_id())
    except OSError:
        return None


def alive(process: ProcessId | None) -> bool:
    """Tell whether exactly this process is still running; a zombie is not."""
    if process is None or process.boot_id != boot_id():
        return False
    try:
        status, create_time = _stat(process.pid)
    except OSError:
        return False
    return status not in ("Z", "X") and abs(create_time - process.create_time) < 0.005


def _stat(pid: int) -> tuple[str, float]:
    """A process's status and when it started, in seconds after the boot; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # its name may hold anything
    return fields[0].decode(), int(fields[19]) / os.sysconf("SC_CLK_TCK")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process rather than of init (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked(mark: str) -> list[int]:
    """All living processes that carry the run's mark, whatever their parent or session."""
    needle = f"{MARK_VARIABLE}={mark}\0".encode()
    return [pid for pid, environ in _environments() if needle in environ]


def run_dirs() -> set[str]:
    """The run directories of all living supervisors, torchruns and ranks, even of those that somebody has removed."""
    name = f"{RUN_DIR_VARIABLE}=".encode()
    return {
        os.fsdecode(variable.removeprefix(name))
        for _, environ in _environments()
        for variable in environ.split(b"\0")
        if variable.startswith(name)
    }


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            # Gone meanwhile, or another user's: neither is ours. A zombie's environ is empty.
            with contextlib.suppress(OSError), Path(entry.path, "environ").open("rb") as environ:
                yield int(entry.name), environ.read() + b"\0"


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
