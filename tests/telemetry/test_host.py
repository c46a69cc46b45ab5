from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddp_core.telemetry import host
from ddp_core.telemetry.host import HostReport, HostSampler

_BUSY = "while True: pass"
_BUSY_WITH_CHILD = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nwhile True: pass"
_PARENT = (
    "import subprocess, sys, threading\n"
    "children = []\n"
    "def start(): children.append(subprocess.Popen([sys.executable, '-c', sys.argv[1]]))\n"
    "thread = threading.Thread(target=lambda: [start(), threading.Event().wait()])\n"  # not from the main thread
    "thread.start()\n"
    "start()\n"
    "print('ready', flush=True)\n"
    "thread.join()"
)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code; it and all below it end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", *args]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin and process.stdout
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def parent(start: Callable[..., subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """A process with two busy children, one started by another thread than the main one, and a child of each."""
    process = start(_PARENT, _BUSY_WITH_CHILD)
    assert process.stdout
    process.stdout.readline()
    wait_for(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 4)
    return process


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sample_until(sampler: HostSampler, ranks: dict[int, int], wanted: Callable[[HostReport], object]) -> HostReport:
    deadline = time.monotonic() + 20
    while not wanted(report := sampler.sample(ranks)):
        assert time.monotonic() < deadline, report
        time.sleep(0.1)
    return report


def test_the_machine_is_measured(tmp_path: Path):
    sampler = HostSampler(tmp_path, cgroup_root=tmp_path)
    first = sampler.sample({})["host"]
    assert first["cpu"] is None  # a share needs two looks
    memory = psutil.virtual_memory()
    assert first["memory_total"] == memory.total
    assert first["memory_used"] == pytest.approx(memory.total - memory.available, abs=memory.total * 0.1)
    assert first["load1"] == pytest.approx(os.getloadavg()[0], abs=1)
    assert first["disk_free"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.2)
    report = sample_until(sampler, {}, lambda r: r["host"]["cpu"] is not None)
    assert 0 <= report["host"]["cpu"] <= 100  # type: ignore[operator]
    assert report["ranks"] == {}


def test_the_machines_cpu_follows_what_runs(start: Callable[..., subprocess.Popen[str]]):
    for _ in range(psutil.cpu_count() or 1):
        start(_BUSY)
    sample_until(HostSampler(), {}, lambda r: (r["host"]["cpu"] or 0) > 90)


def test_a_rank_is_its_process_and_all_below(parent: subprocess.Popen[str]):
    sampler = HostSampler()
    rank = sampler.sample({3: parent.pid})["ranks"]["3"]
    assert (rank["pid"], rank["processes"], rank["cpu"]) == (parent.pid, 5, None)
    family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    assert rank["memory"] == pytest.approx(sum(p.memory_info().rss for p in family), rel=0.3)
    before, start = sum(sum(p.cpu_times()[:2]) for p in family), time.monotonic()
    sampler.sample({3: parent.pid})
    wait_for(lambda: time.monotonic() > start + 0.6)
    rank = sampler.sample({3: parent.pid})["ranks"]["3"]
    used = sum(sum(p.cpu_times()[:2]) for p in family) - before
    expected = 100 * used / (time.monotonic() - start)
    assert rank["cpu"] == pytest.approx(expected, abs=25)
    assert rank["cpu"] > 10


def test_each_rank_has_its_own_figures(parent: subprocess.Popen[str], start: Callable[..., subprocess.Popen[str]]):
    idle = start("input()")
    ranks = {0: parent.pid, 1: idle.pid}
    sampler = HostSampler()
    sampler.sample(ranks)
    report = sample_until(sampler, ranks, lambda r: (r["ranks"]["0"]["cpu"] or 0) > 10)
    assert report["ranks"]["1"]["processes"] == 1
    assert (report["ranks"]["1"]["cpu"] or 0) < report["ranks"]["0"]["cpu"]  # type: ignore[operator]


def test_a_process_that_ends_is_no_error(parent: subprocess.Popen[str]):
    sampler = HostSampler()
    sampler.sample({0: parent.pid})
    child = psutil.Process(parent.pid).children()[0]
    child.kill()
    report = sample_until(sampler, {0: parent.pid}, lambda r: r["ranks"]["0"]["processes"] < 5)
    assert report["ranks"]["0"]["cpu"] is None or report["ranks"]["0"]["cpu"] >= 0
    parent.kill()  # nobody waits for it: a zombie
    wait_for(lambda: psutil.Process(parent.pid).status() == psutil.STATUS_ZOMBIE)
    assert sampler.sample({0: parent.pid})["ranks"] == {}
    assert HostSampler().sample({0: 2**22 + 1})["ranks"] == {}


def test_a_new_worker_is_found_and_its_past_is_not_this_seconds(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
):
    # The worker burns CPU first and is idle by the time it is seen.
    worker = "import time\nwhile time.process_time() < 0.5: pass\ntime.sleep(60)"
    rank = start("import subprocess, sys\ninput()\nsubprocess.run([sys.executable, '-c', sys.argv[1]])", worker)
    sampler = HostSampler()
    assert sampler.sample({0: rank.pid})["ranks"]["0"]["processes"] == 1
    assert rank.stdin
    print(file=rank.stdin, flush=True)
    wait_for(lambda: psutil.Process(rank.pid).children())
    child = psutil.Process(rank.pid).children()[0]
    wait_for(lambda: sum(child.cpu_times()[:2]) >= 0.4 and child.status() == psutil.STATUS_SLEEPING)
    sampler.sample({0: rank.pid})
    time.sleep(0.05)  # a share needs some time to be a share of
    monkeypatch.setattr(host, "_FAMILY_S", 0)
    found = sampler.sample({0: rank.pid})["ranks"]["0"]
    assert found["processes"] == 2
    assert found["cpu"] is not None and found["cpu"] < 100


@pytest.mark.parametrize("where", ["", "pod", "pod/container"])
def test_the_limit_of_a_container_is_the_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    own = tmp_path / "pod" / "container"
    own.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "pod", own):
        (folder / "memory.max").write_text("max\n" if folder == tmp_path else f"{2 << 30}\n")
        (folder / "memory.current").write_text(f"{600 << 20}\n")
        (folder / "memory.stat").write_text("inactive_file 0\n")
    (tmp_path / where / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / where / "memory.current").write_text(f"{700 << 20}\n")
    (tmp_path / where / "memory.stat").write_text(f"anon 1\ninactive_file {200 << 20}\nfile 5\n")
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n0::/pod/container\n")
    report = HostSampler(cgroup_root=tmp_path).sample({})["host"]
    assert (report["memory_used"], report["memory_total"]) == (500 << 20, 1 << 30)


@pytest.mark.parametrize("limit", ["max", str(1 << 60)])
def test_a_container_without_a_limit_has_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
):
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("5")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert HostSampler(cgroup_root=tmp_path).sample({})["host"]["memory_total"] == psutil.virtual_memory().total


def test_a_disk_that_is_gone_is_unknown(tmp_path: Path):
    assert HostSampler(tmp_path / "gone").sample({})["host"]["disk_free"] is None
