"""A run directory that nobody trains in: the test writes what ranks and supervisor would."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from ddp_core.config import RunConfig, to_yaml
from ddp_core.runs.state import RunState, RunStatus, write_state
from ddp_core.telemetry.jsonl import dumps


class SyntheticRun:
    """A run that has ended, as its state says, so that no supervisor looks after it; its logs still grow."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.path, self.id, self.ranks = path, path.name, ranks

    @classmethod
    def create(cls, store: Path, ranks: int = 4, gpus: int = 0) -> SyntheticRun:
        number = 1
        while (store / f"fake-{number}").exists():
            number += 1
        run = cls(store / f"fake-{number}", ranks)
        run.path.mkdir(parents=True)
        (run.path / "config.yaml").write_text(to_yaml(RunConfig(name="fake")))
        run.set_state(gpus=tuple(gpu_uuid(n) for n in range(gpus)))
        for rank in range(ranks):
            run.event(rank, "start", local_rank=rank, world_size=ranks, pid=1, host="here")
        return run

    def set_state(self, **fields: Any) -> None:
        now = time.time()
        known = {"id": self.id, "since": now, "created": now, "nproc_per_node": self.ranks, "mark": "none"}
        write_state(self.path / "state.json", RunState(**{"state": RunStatus.FINISHED, **known, **fields}))

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        return self.path / "metrics" / f"attempt_{attempt}" / f"rank_{rank}.jsonl"

    def write(self, rank: int, *lines: bytes, attempt: int = 0) -> None:
        path = self.rank_log(rank, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"".join(lines))

    def event(self, rank: int, event: str, attempt: int = 0, **fields: Any) -> None:
        self.write(
            rank,
            dumps({"ts": time.time(), "event": event, "rank": rank, "attempt": attempt, **fields}),
            attempt=attempt,
        )

    def watched(self, rank: int | None, **fields: Any) -> None:
        """Log a violation: rank 0 says what it noticed of a rank."""
        self.write(0, dumps({"ts": time.time(), "event": "watch", "rank": rank, **fields}))

    def log(self, first: int, last: int, attempt: int = 0, ts: float | None = None, **values: float) -> None:
        """Log the steps ``first`` to ``last`` on every rank: a falling loss, or the values given."""
        for rank in range(self.ranks):
            lines = []
            for step in range(first, last + 1):
                loss = 2 * math.exp(-step / 400) + 0.1 * rank + 0.05 * math.sin(step * 12.9898 + rank)
                record = {"ts": ts or time.time(), "step": step, "epoch": 1 + step // 100, "loss": loss, **values}
                lines.append(dumps(record))
            self.write(rank, *lines, attempt=attempt)

    def sample(self, ts: float, gpus: list[dict[str, Any]], **host: float) -> None:
        """Append a hardware sample; a GPU's values that are not given are missing."""
        fields = ("busy", "memory_used", "memory_total", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz")
        rows = [
            {
                "index": n,
                "uuid": gpu_uuid(n),
                "name": "NVIDIA S100 (simulated)",
                "status": "ok",
                **{field: values.get(field) for field in fields},
                "missing": {field: "not supported" for field in fields if values.get(field) is None},
            }
            for n, values in enumerate(gpus)
        ]
        ranks = {
            str(r): {"pid": 1, "cpu": 90 + r, "memory": (300 + r) << 20, "processes": 1} for r in range(self.ranks)
        }
        record = {"ts": ts, "gpus": rows, "driver_error": None, "host": {"cpu": 50.0, **host}, "ranks": ranks}
        with (self.path / "hardware.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{number:012d}"
