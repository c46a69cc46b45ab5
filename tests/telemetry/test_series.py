from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_core.telemetry.curves import thin
from ddp_core.telemetry.jsonl import dumps
from ddp_core.telemetry.series import HardwareSeries, HardwareTable, RankSeries, RunSeries


def write(run: Path, rank: int, *records: dict[str, Any] | bytes, attempt: int = 0) -> None:
    path = run / "metrics" / f"attempt_{attempt}" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for record in records:
            file.write(record if isinstance(record, bytes) else dumps(record))


def steps(first: int, last: int, **values: Any) -> list[dict[str, Any]]:
    return [{"ts": float(s), "step": s, "epoch": 1, "loss": float(s), **values} for s in range(first, last + 1)]


def start(world_size: int, attempt: int = 0) -> dict[str, Any]:
    return {"ts": 0.0, "event": "start", "world_size": world_size, "attempt": attempt}


def points(series: RunSeries, rank: int | None, metric: str = "loss") -> list[tuple[float, float]]:
    return list(zip(*(part.tolist() for part in series.snapshot(metric, rank)), strict=True))


def test_every_ranks_points_come_as_they_are_written(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    assert series.poll() is False  # no folder yet
    write(tmp_path, 0, start(2), *steps(1, 2))
    assert series.poll() is True
    write(tmp_path, 1, start(2), *steps(1, 3))
    write(tmp_path, 0, *steps(3, 3))
    assert series.poll() is True
    assert series.poll() is False
    assert points(series, 0) == points(series, 1) == [(1, 1), (2, 2), (3, 3)]
    assert series.attempts == [0]
    assert series.ranks[0].latest["step"] == 3


def test_a_file_made_in_the_same_instant_as_another_is_found(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    write(tmp_path, 0, *steps(1, 1))
    series.poll()
    series.poll()
    folder = tmp_path / "metrics" / "attempt_0"
    changed = folder.stat().st_mtime_ns
    write(tmp_path, 1, *steps(1, 1))
    os.utime(folder, ns=(changed, changed))  # as coarse as a file system's clock may be
    series.poll()
    assert list(series.ranks) == [0, 1]


def test_mean_of_ranks_0_1_2_3_is_one_and_a_half(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, start(4), {"ts": 1.0, "step": 7, "loss": rank})
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, None) == [(7, 1.5)]


def test_mean_waits_for_every_rank_and_for_ranks_that_have_not_started(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    write(tmp_path, 0, start(3), *steps(1, 5))
    write(tmp_path, 1, start(3), *steps(1, 4))
    series.poll()
    assert points(series, None) == []
    write(tmp_path, 2, start(3), *steps(1, 3))
    series.poll()
    assert points(series, None) == [(1, 1), (2, 2), (3, 3)]
    write(tmp_path, 2, *steps(4, 5))
    series.poll()
    assert points(series, None) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_mean_has_only_steps_that_all_ranks_logged(tmp_path: Path) -> None:
    write(tmp_path, 0, start(2), *steps(1, 10))
    write(tmp_path, 1, start(2), *[r for r in steps(1, 12, loss=0.0) if r["step"] % 2 == 0])
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, None) == [(2, 1), (4, 2), (6, 3), (8, 4), (10, 5)]
    write(tmp_path, 0, *steps(11, 12))
    series.poll()
    assert points(series, None)[-1] == (12, 6)


def test_one_rank_has_no_mean(tmp_path: Path) -> None:
    write(tmp_path, 0, start(1), *steps(1, 3))
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, None) == []


def test_an_attempt_that_goes_back_takes_its_points_back(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    for rank in (0, 1):
        write(tmp_path, rank, start(2), *steps(1, 10))
    series.poll()
    before = series.generation
    write(tmp_path, 0, start(2, 1), {"ts": 1.0, "event": "resumed", "step": 5}, *steps(6, 7, loss=0.0), attempt=1)
    series.poll()
    assert series.generation != before
    assert points(series, 0) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 0), (7, 0)]
    assert points(series, 1)[-1] == (5, 5)  # what it did after step 5 is void although it is not back yet
    assert points(series, None)[-1] == (5, 5)
    write(tmp_path, 1, start(2, 1), *steps(6, 8, loss=2.0), attempt=1)
    series.poll()
    assert points(series, None)[-2:] == [(6, 1), (7, 1)]
    assert series.attempts == [0, 1]


def test_reading_all_attempts_at_once_gives_the_same_as_following_them(tmp_path: Path) -> None:
    followed = RunSeries(tmp_path)
    for attempt, (first, last) in enumerate([(1, 30), (11, 25), (21, 40)]):
        for rank in range(3):
            write(tmp_path, rank, start(3, attempt), *steps(first, last, loss=float(attempt)), attempt=attempt)
            followed.poll()
    late = RunSeries(tmp_path)
    late.poll()
    for rank in (0, 1, 2, None):
        assert points(late, rank) == points(followed, rank)
    assert [y for _, y in points(late, None)] == [0.0] * 10 + [1.0] * 10 + [2.0] * 20


def test_a_resume_without_repeated_steps_takes_nothing_back(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    write(tmp_path, 0, *steps(1, 5))
    series.poll()
    before = series.generation
    write(tmp_path, 0, *steps(6, 8), attempt=1)
    series.poll()
    assert series.generation == before
    assert len(points(series, 0)) == 8


def test_a_log_that_was_cut_is_read_again(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    write(tmp_path, 0, *steps(1, 5))
    series.poll()
    before = series.generation
    (tmp_path / "metrics/attempt_0/rank_0.jsonl").write_bytes(b"".join(map(dumps, steps(1, 2, loss=9.0))))
    assert series.poll() is True
    assert series.generation != before
    assert points(series, 0) == [(1, 9), (2, 9)]


def test_torn_null_and_binary_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, 3, *steps(1, 1), b"null\n", b'{"step": 2, "lo\n', b"\x00\xff\xfe\n", *steps(3, 3), b'{"step": 4')
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, 3) == [(1, 1), (3, 3)]
    assert series.skipped == {3: 3}


def test_lines_without_a_usable_step_or_value_are_no_points(tmp_path: Path) -> None:
    odd = [
        {"ts": 1.0, "loss": 1.0},
        {"ts": 1.0, "step": "NaN", "loss": 1.0},
        {"ts": 1.0, "step": True, "loss": 1.0},
        {"ts": 1.0, "step": 1, "loss": None},
        {"ts": 1.0, "step": 2, "loss": [1.0]},
        {"event": ["odd"], "step": 3},
    ]
    write(tmp_path, 0, *odd, *steps(4, 4))
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, 0) == [(4, 4)]


def test_a_diverged_loss_stays_what_it_is(tmp_path: Path) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, 2.0]
    write(tmp_path, 0, *[{"ts": 1.0, "step": s, "loss": v} for s, v in enumerate(values)])
    series = RunSeries(tmp_path)
    series.poll()
    _, y = series.snapshot("loss", 0)
    np.testing.assert_array_equal(y, values)
    assert series.ranks[0].latest["loss"] == 2.0


def test_a_metric_logged_at_some_steps_has_only_those(tmp_path: Path) -> None:
    write(tmp_path, 0, *steps(1, 4), {"ts": 4.0, "step": 4, "epoch": 1, "val_loss": 0.5}, *steps(5, 6))
    series = RunSeries(tmp_path)
    series.poll()
    assert points(series, 0, "val_loss") == [(4, 0.5)]
    assert len(points(series, 0)) == 6
    assert series.metrics == ["loss", "val_loss"]
    x, _ = series.snapshot("val_loss", 0, x="ts")
    assert x.tolist() == [4.0]


def test_append_adds_one_line() -> None:
    rank = RankSeries()
    rank.append({"ts": 1.0, "step": 1, "loss": "NaN"})
    rank.append({"no": "step"})
    x, y = rank.curve("loss")
    assert x.tolist() == [1.0]
    assert math.isnan(y[0])


@pytest.mark.parametrize("size", [100, 5_000, 200_000])
@pytest.mark.parametrize("budget", [10, 250, 1500])
def test_extremes_and_single_spikes_survive_thinning(size: int, budget: int) -> None:
    random = np.random.default_rng(0)
    x = np.arange(size, dtype=float)
    y = random.normal(size=size)
    up, down = random.integers(1, size - 1, 2)
    y[up], y[down] = 50.0, -50.0
    thin_x, thin_y = thin(x, y, points=budget)
    assert len(thin_x) <= budget + 2
    assert (thin_y.min(), thin_y.max()) == (y.min(), y.max())
    assert {float(up), float(down)} <= set(thin_x)
    assert (thin_x[0], thin_x[-1]) == (x[0], x[-1])


def test_a_spike_is_in_every_window_that_holds_it() -> None:
    x = np.arange(1_000_000, dtype=float)
    y = np.sin(x / 1000)
    y[654_321] = 99.0
    for width in (1_000_000, 100_000, 10_000, 100):
        lo = 654_321 - width / 3
        thin_x, thin_y = thin(x, y, lo=lo, hi=lo + width, points=500)
        assert thin_y.max() == 99.0
        assert thin_x[0] <= max(lo, 0)
        assert len(thin_x) <= 504


def test_small_spikes_among_many_points_all_survive() -> None:
    x = np.arange(400_000, dtype=float)
    y = np.sin(x / 40_000)
    spikes = np.arange(5_003, 400_000, 10_007)
    y[spikes] += 0.5
    thin_x, _ = thin(x, y, points=1500)
    assert set(spikes.astype(float)) <= set(thin_x)


def test_a_stretch_of_nan_leaves_a_gap_however_many_points_are_kept() -> None:
    x = np.arange(50_000, dtype=float)
    y = np.ones(50_000)
    y[20_000:21_000] = math.nan
    y[30_000] = math.inf
    thin_x, thin_y = thin(x, y, points=300)
    inside = (thin_x >= 20_000) & (thin_x < 21_000)
    assert inside.any()
    assert np.isnan(thin_y[inside]).all()
    assert thin_y[thin_x == 30_000].tolist() == [math.inf]


def test_steps_out_of_order_are_drawn_in_order() -> None:
    x, y = thin(np.array([3.0, 1.0, 2.0]), np.array([30.0, 10.0, 20.0]))
    assert x.tolist() == [1, 2, 3]
    assert y.tolist() == [10, 20, 30]


def gpu(uuid: str, **values: Any) -> dict[str, Any]:
    return {"index": 0, "uuid": uuid, "name": "S100", "status": "ok", "busy": None, "missing": {}, **values}


def test_hardware_is_followed_per_gpu_host_and_rank(tmp_path: Path) -> None:
    series = HardwareSeries(tmp_path)
    assert series.poll() is False
    log = tmp_path / "hardware.jsonl"
    first = {"ts": 1.0, "gpus": [gpu("A", busy=0)], "host": {"cpu": None}, "ranks": {}}
    second = {
        "ts": 2.0,
        "gpus": [gpu("A", busy=7), gpu("B", busy=9)],
        "host": {"cpu": 5.0},
        "ranks": {"0": {"cpu": 99.0}},
    }
    log.write_bytes(dumps(first))
    assert series.poll() is True
    with log.open("ab") as file:
        file.write(dumps(second) + dumps({"ts": 3.0, "gpus": [gpu("A"), gpu("B", busy=8)]}) + b"torn")
    series.poll()
    np.testing.assert_array_equal(series.curve("A", "busy")[1], [0.0, 7.0, math.nan])  # zero is a value
    np.testing.assert_array_equal(series.curve("B", "busy")[1], [math.nan, 9.0, 8.0])  # not there is none
    np.testing.assert_array_equal(series.curve("host", "cpu")[1], [math.nan, 5.0, math.nan])
    np.testing.assert_array_equal(series.curve("0", "cpu")[1], [math.nan, 99.0, math.nan])
    assert series.gpus["B"]["busy"] == 8


def test_a_gap_in_the_samples_is_a_gap_in_the_curve_also_when_only_new_points_are_asked_for() -> None:
    table = HardwareTable()
    for ts in (1.0, 2.0, 100.0, 101.0):
        table.append({"ts": ts, "gpus": [gpu("A", busy=50)]})
    x, y = table.curve("A", "busy")
    assert x.tolist() == [1, 2, 100, 100, 101]
    np.testing.assert_array_equal(y, [50, 50, math.nan, 50, 50])
    np.testing.assert_array_equal(table.curve("A", "busy", start=2)[1], [math.nan, 50, 50])
    np.testing.assert_array_equal(table.curve("A", "busy", start=3)[1], [50])
    assert len(table.curve("A", "busy", start=4)[1]) == 0


def test_the_machines_history_is_bounded_and_positions_stay_valid() -> None:
    table = HardwareTable(keep_s=100)
    for ts in range(2000):
        table.append({"ts": float(ts), "gpus": [gpu("A", busy=ts % 100)]})
    x, _ = table.curve("A", "busy")
    assert 100 <= len(x) <= 100 + 257
    assert x[-1] == 1999
    assert table.ts.end == 2000
    assert table.curve("A", "busy", start=1998)[0].tolist() == [1998, 1999]
    table.append({"ts": 2000.0, "gpus": [gpu("B", busy=1)]})
    assert len(table.curve("B", "busy")[0]) == len(table.curve("A", "busy")[0])


def test_forty_thousand_lines_are_read_in_a_second(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, b"".join(map(dumps, steps(1, 10_000, accuracy=0.5, lr=0.1, data_s=0.01))))
    series = RunSeries(tmp_path)
    begin = time.perf_counter()
    series.poll()
    assert len(points(series, 0)) == 2000
    assert time.perf_counter() - begin < 2.0
