from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_core.telemetry.follower import JsonlFollower
from ddp_core.telemetry.rank_log import RankLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics" / "attempt_0" / "rank_0.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[RankLog]:
    log = RankLog(path)
    yield log
    log.close()


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line]


def test_a_metric_is_in_the_file_when_the_call_returns(log: RankLog, path: Path):
    before = time.time()
    log.log(3, epoch=1, loss=0.5)
    (record,) = records(path)
    assert before <= record.pop("ts") <= time.time()
    assert record == {"step": 3, "epoch": 1, "loss": 0.5}


def test_events_carry_their_fields(log: RankLog, path: Path):
    log.event("start", rank=0, host="here", gpu=None)
    (record,) = records(path)
    assert record.pop("ts") == pytest.approx(time.time(), abs=10)
    assert record == {"event": "start", "rank": 0, "host": "here", "gpu": None}


def test_a_diverged_loss_is_said(log: RankLog, path: Path):
    log.log(1, loss=float("nan"), norm=float("inf"), other=float("-inf"))
    (record,) = records(path)
    assert (record["loss"], record["norm"], record["other"]) == ("NaN", "Infinity", "-Infinity")


def test_numbers_of_numpy_and_torch_are_numbers(log: RankLog, path: Path):
    import numpy as np
    import torch

    log.log(
        np.int64(7),
        a=np.float32(0.5),
        b=np.float64("nan"),
        c=torch.tensor(0.25),
        d=torch.tensor([3]),
        e=torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
        f=np.array(2.0),
        g=2**80,
    )
    (record,) = records(path)
    del record["ts"]
    assert record == {"step": 7, "a": 0.5, "b": "NaN", "c": 0.25, "d": 3, "e": 1.5, "f": 2.0, "g": float(2**80)}
    assert [type(record[name]) for name in ("step", "d")] == [int, int]


def test_what_is_no_number_is_left_out_and_said_once(log: RankLog, path: Path, capsys: pytest.CaptureFixture[str]):
    import torch

    for step in (1, 2):
        log.log(step, loss=0.5, note="x", none=None, flag=True, vector=torch.zeros(2), event=1.0, ts=2.0)
    metrics = [r for r in records(path) if "event" not in r]
    assert [{k: v for k, v in r.items() if k != "ts"} for r in metrics] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.5},
    ]
    assert all(r["ts"] > 1e9 for r in metrics)
    warnings = [r["message"] for r in records(path) if r.get("event") == "warning"]
    assert len(warnings) == 6
    assert "'note': a str is not a number" in warnings[0]
    assert capsys.readouterr().err.count("\n") == 6


def test_a_step_that_is_no_number_makes_no_line(log: RankLog, path: Path):
    log.log("first", loss=0.5)
    assert [r["event"] for r in records(path)] == ["warning"]


def test_calls_after_close_do_nothing(log: RankLog, path: Path):
    log.log(1, loss=0.5)
    log.close()
    log.close()
    log.log(2, loss=0.5)
    log.event("end")
    assert len(records(path)) == 1


def test_a_removed_file_is_said_once_and_written_anew(log: RankLog, path: Path, capsys: pytest.CaptureFixture[str]):
    log.log(1, loss=0.5)
    path.unlink()
    log.log(2, loss=0.4)
    log.log(3, loss=0.3)
    warning, third = records(path)
    assert warning["event"] == "warning"
    assert "1 line is missing here" in warning["message"] and "removed" in warning["message"]
    assert third["step"] == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_a_removed_folder_stops_neither_training_nor_the_log_for_good(
    log: RankLog, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log.log(1, loss=0.5)
    shutil.rmtree(tmp_path / "metrics")
    for step in range(2, 7):
        log.log(step, loss=0.5)
    assert not (tmp_path / "metrics").exists()  # who removed the run does not want it back
    assert capsys.readouterr().err.count("\n") == 1
    path.parent.mkdir(parents=True)
    log.log(7, loss=0.1)
    log.log(8, loss=0.1)
    warning, *metrics = records(path)
    assert "5 lines are missing here" in warning["message"]
    assert [r["step"] for r in metrics] == [7, 8]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "metrics").write_text("a file where a folder should be")
    log = RankLog(tmp_path / "metrics" / "attempt_0" / "rank_0.jsonl")
    log.log(1, loss=0.5)
    log.event("end")
    log.close()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "training goes on" in err


def test_a_disk_that_is_always_full_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rank_0.jsonl"
    path.symlink_to("/dev/full")
    log = RankLog(path)
    for step in range(5):
        log.log(step, loss=0.5)
    log.close()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert os.strerror(errno.ENOSPC) in err


# A file size limit fills the "disk" in the middle of a line, as a real one does, and can be lifted again. The time
# stands still, so that all lines of two-digit steps are equally long and the limit hits line 11 at a known place.
_FULL_DISK = """
import os, resource, sys, time
from ddp_core.telemetry.rank_log import RankLog
path, fits = sys.argv[1], int(sys.argv[2])
time.time = lambda: 1234567890.25
log = RankLog(path)
for step in range(1, 11):
    log.log(step, loss=0.5)
length = len(open(path, "rb").read().splitlines(keepends=True)[-1])
limit = os.path.getsize(path) + (fits if fits >= 0 else length + fits)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for step in range(11, 31):
    log.log(step, loss=0.5)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for step in range(31, 41):
    log.log(step, loss=0.5)
log.close()
"""


@pytest.mark.parametrize(("fits", "torn", "whole"), [(0, 0, 10), (1, 1, 10), (20, 1, 10), (-2, 1, 10), (-1, 0, 11)])
def test_a_disk_that_was_full_tears_at_most_one_line_and_counts_the_missing(
    path: Path, fits: int, torn: int, whole: int
):
    result = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(path), str(fits)], capture_output=True, text=True, check=True
    )
    assert result.stderr.count("\n") == 1
    assert "training goes on" in result.stderr
    follower = JsonlFollower(path)
    found = follower.poll()
    assert follower.skipped == torn
    (warning,) = [r for r in found if "event" in r]
    assert warning["message"].startswith(f"{30 - whole} lines are missing here")
    assert [r["step"] for r in found if "step" in r] == [*range(1, whole + 1), *range(31, 41)]
    assert found.index(warning) == whole


def test_a_torn_line_of_an_earlier_process_swallows_no_other(path: Path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    log = RankLog(path)
    log.log(3, loss=0.5)
    log.log(4, loss=0.5)
    log.close()
    follower = JsonlFollower(path)
    assert [r["step"] for r in follower.poll()] == [1, 3, 4]
    assert follower.skipped == 1


def _log_from_child(log: RankLog, child: int) -> None:
    for step in range(200):
        log.log(step, child=child)
    log.close()


def test_forked_processes_write_whole_lines_and_none_twice(log: RankLog, path: Path):
    log.log(0, child=-1)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_log_from_child, args=(log, n)) for n in range(3)]
    for child in children:
        child.start()
    for step in range(200):
        log.log(step, child=3)
    for child in children:
        child.join(timeout=30)
        assert child.exitcode == 0
    log.log(200, child=3)
    found = records(path)
    assert len(found) == 802
    for n in range(3):
        assert [r["step"] for r in found if r["child"] == n] == list(range(200))


def test_kill_9_loses_no_line(path: Path):
    code = (
        "import sys\nfrom ddp_core.telemetry.rank_log import RankLog\nlog = RankLog(sys.argv[1])\n"
        "for step in range(1, 10**9):\n    log.log(step, loss=0.5)\n    print(step, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    assert records(path)[-1]["step"] >= (said[-1] if said else 50)


def test_a_closed_stderr_is_no_error(tmp_path: Path):
    code = (
        "import sys\nfrom ddp_core.telemetry.rank_log import RankLog\nlog = RankLog('/dev/full')\n"
        "sys.stderr.close()\nlog.log(1, loss=0.5)\nsys.stderr = None\nlog.log(2, x='no')\nprint('went on')"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
        == "went on\n"
    )
