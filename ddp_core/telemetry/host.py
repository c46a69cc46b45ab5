"""What the machine and each rank's processes use: CPU, memory, load, disk. Linux, from /proc and psutil.

A rank is its training process and everything below it, DataLoader workers included. Who is below is
looked up every few seconds, what they use every time; a process that is gone is no error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import psutil

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OWN_CGROUP = Path("/proc/self/cgroup")
_FAMILY_S = 5.0  # how often to look who is below a rank


class HostUse(TypedDict):
    """The machine: ``cpu`` in percent of all cores (None at the first look), memory and disk in bytes."""

    cpu: float | None
    memory_used: int
    memory_total: int
    load1: float
    disk_free: int | None


class RankUse(TypedDict):
    """One rank: ``cpu`` in percent of one core (None at the first look), ``memory`` resident bytes."""

    pid: int
    cpu: float | None
    memory: int
    processes: int


class HostReport(TypedDict):
    """One look at the machine and the ranks that are alive, by rank."""

    host: HostUse
    ranks: dict[str, RankUse]


class HostSampler:
    """Measures the machine and the ranks; CPU shares are those since the sample before.

    Args:
        disk: A folder on the disk whose free space counts.
        cgroup_root: Where cgroup v2 is mounted.
    """

    def __init__(self, disk: Path | str = ".", cgroup_root: Path | str = "/sys/fs/cgroup") -> None:
        self._disk = os.fspath(disk)
        self._cgroup = _limiting_cgroup(Path(cgroup_root))
        self._cpu_before: tuple[float, float] | None = None
        self._families: dict[int, list[int]] = {}
        self._families_at = -_FAMILY_S
        self._ticks: dict[tuple[int, int], int] = {}  # (pid, start time): a pid alone may be someone else by now
        self._ticks_at = 0.0

    def sample(self, rank_pids: dict[int, int]) -> HostReport:
        """Measure now.

        Args:
            rank_pids: The training process of each rank; those that are gone are left out of the result.
        """
        return {"host": self._host(), "ranks": self._ranks(rank_pids)}

    def _host(self) -> HostUse:
        memory = psutil.virtual_memory()
        used, total = memory.total - memory.available, memory.total
        if self._cgroup is not None:
            used, total = _cgroup_memory(self._cgroup) or (used, total)
        try:
            disk = os.statvfs(self._disk)
            disk_free = disk.f_bavail * disk.f_frsize
        except OSError:
            disk_free = None
        return {
            "cpu": self._cpu(),
            "memory_used": used,
            "memory_total": total,
            "load1": os.getloadavg()[0],
            "disk_free": disk_free,
        }

    def _cpu(self) -> float | None:
        times = psutil.cpu_times()
        # Guest time is already in user time; waiting for a disk is idle.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        before, self._cpu_before = self._cpu_before, (total, idle)
        if before is None or total <= before[0]:
            return None
        busy = 1 - (idle - before[1]) / (total - before[0])
        return round(100 * min(max(busy, 0.0), 1.0), 1)

    def _ranks(self, rank_pids: dict[int, int]) -> dict[str, RankUse]:
        now = time.monotonic()
        if now >= self._families_at + _FAMILY_S or self._families.keys() != set(rank_pids.values()):
            self._families = {pid: [pid, *_descendants(pid)] for pid in rank_pids.values()}
            self._families_at = now
        seconds, self._ticks_at = now - self._ticks_at, now
        before, self._ticks = self._ticks, {}
        ranks: dict[str, RankUse] = {}
        for rank, pid in rank_pids.items():
            members = [stat for member in self._families[pid] if (stat := _stat(member)) is not None]
            if not members or members[0][0] != pid:
                continue
            gained: int | None = None
            for member, started, ticks, _ in members:
                self._ticks[member, started] = ticks
                # Who is seen for the first time has no share yet: its whole life is not this second's.
                if (member, started) in before:
                    gained = (gained or 0) + ticks - before[member, started]
            ranks[str(rank)] = {
                "pid": pid,
                "cpu": None if gained is None or seconds <= 0 else round(100 * gained / _TICK / seconds, 1),
                "memory": sum(rss for *_, rss in members),
                "processes": len(members),
            }
        return ranks


def _stat(pid: int) -> tuple[int, int, int, int] | None:
    """Read a process's pid, start time, CPU ticks and resident bytes; None if it is gone or a zombie.

    One file instead of psutil's two or three; fields as in proc_pid_stat(5).
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        # The name, in parentheses, may hold spaces and parentheses itself.
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(fd)
    if fields[0] in (b"Z", b"X"):
        return None
    return pid, int(fields[19]), int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE


def _descendants(pid: int) -> Iterator[int]:
    """Find all processes below one, deepest last. Any of its threads may have started one."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208  a Path per thread would double the cost
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _limiting_cgroup(root: Path) -> Path | None:
    """Find the cgroup v2 folder, this process's own or one above, with the lowest memory limit."""
    try:
        own = _OWN_CGROUP.read_text()
    except OSError:
        return None
    inside = next((line.removeprefix("0::/") for line in own.splitlines() if line.startswith("0::/")), None)
    if inside is None:
        return None
    folder = root / inside
    limits = {f: limit for f in (folder, *folder.parents) if f.is_relative_to(root) and (limit := _limit(f))}
    return min(limits, key=lambda f: limits[f], default=None)


def _limit(folder: Path) -> int | None:
    try:
        text = (folder / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": none


def _cgroup_memory(folder: Path) -> tuple[int, int] | None:
    """Read memory used (without file cache that can be dropped) and the limit, in bytes.

    None if the limit is not below the machine's memory or cannot be read.
    """
    limit = _limit(folder)
    if limit is None or limit >= psutil.virtual_memory().total:
        return None
    try:
        current = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return max(current - cache, 0), limit
