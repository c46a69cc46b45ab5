"""What one line of the rank log costs the training: ``python -m benchmarks.rank_log``.

Against the plainest file that is as safe (written at once) and as unsafe (buffered) as can be, and
against TensorBoard's SummaryWriter where that is installed. All in turn in one process, ten values a step.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_core.telemetry.rank_log import RankLog

ROUNDS = 40
CALLS = 200
LIMIT_US = 10.0
VALUES: dict[str, float] = {
    "epoch": 3,
    "loss": 0.5312345678,
    "accuracy": 0.8125,
    "lr": 0.02,
    "samples_per_s": 1234.5,
    "data_s": 0.00123,
    "forward_s": 0.00456,
    "backward_s": 0.00789,
    "optimizer_s": 0.00111,
    "grad_norm": 1.2345,
}


def writers(folder: Path, open_files: contextlib.ExitStack) -> dict[str, Callable[[int], Any]]:
    """Give each way to log one step, by name."""
    log = RankLog(folder / "rank_0.jsonl")
    buffered = (folder / "buffered.jsonl").open("w")
    unbuffered = (folder / "unbuffered.jsonl").open("wb", buffering=0)

    def record(step: int) -> str:
        return json.dumps({"ts": time.time(), "step": step, **VALUES}) + "\n"

    ways: dict[str, Callable[[int], Any]] = {
        "RankLog.log": lambda step: log.log(step, **VALUES),
        "file.write(json.dumps()), unbuffered": lambda step: unbuffered.write(record(step).encode()),
        "file.write(json.dumps()), buffered: lost by kill -9": lambda step: buffered.write(record(step)),
    }
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: SummaryWriter is not measured")
        return ways
    board = SummaryWriter(str(folder / "board"))
    open_files.callback(board.close)  # before its folder goes

    def scalars(step: int) -> None:
        for name, value in VALUES.items():
            board.add_scalar(name, value, step)

    ways["SummaryWriter.add_scalar × 10, by a thread, ≤ 120 s late"] = scalars
    ways["SummaryWriter.add_scalar × 1, a single value"] = lambda step: board.add_scalar("loss", VALUES["loss"], step)
    return ways


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_files:
        ways = writers(Path(folder), open_files)
        times: dict[str, list[float]] = {name: [] for name in ways}
        step = 0
        for _ in range(ROUNDS):
            for name, write in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    step += 1
                    write(step)
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    own = statistics.median(times["RankLog.log"])
    print(f"{'one step of 10 values':<58}{'median':>10}{'best':>10}{'RankLog is':>14}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<58}{median:>7.1f} µs{min(values):>7.1f} µs{own / median:>12.2f} ×")
    ok = min(times["RankLog.log"]) <= LIMIT_US
    print(f"goal: a call ≤ {LIMIT_US:.0f} µs: {'met' if ok else 'MISSED'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
