"""A run's hardware log, or the machine's last hour, as columns of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ddp_core.telemetry.curves import Column, Curve, thin
from ddp_core.telemetry.follower import JsonlFollower
from ddp_core.telemetry.jsonl import number

GAP_S = 5.0
"""Samples further apart than this, in seconds, are not connected by a line."""


class HardwareTable:
    """Hardware samples as columns: ``ts`` and one column per GPU (by UUID), host or rank and field.

    A value that is missing is NaN; why it is, is in the newest sample.

    Args:
        keep_s: Forget what is older than this many seconds; None keeps all.
    """

    def __init__(self, keep_s: float | None = None) -> None:
        self.keep_s = keep_s
        self.ts = Column()
        self.columns: dict[tuple[str, str], Column] = {}
        self.gpus: dict[str, dict[str, Any]] = {}
        self.latest: dict[str, Any] = {}

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one line of a hardware log; one without a time is ignored."""
        ts = number(sample.get("ts"))
        if ts is None:
            return
        row = {
            (who, field): value
            for who, values in _parts(sample)
            for field, item in values.items()
            if (value := number(item)) is not None and math.isfinite(value)
        }
        for key in row.keys() - self.columns.keys():
            column = self.columns[key] = Column()
            column.extend(np.full(self.ts.end - self.ts.start, math.nan))
            column.start = self.ts.start
        self.ts.extend([ts])
        for key, column in self.columns.items():
            column.extend([row.get(key, math.nan)])
        for gpu in sample.get("gpus") or ():
            if isinstance(gpu, dict) and isinstance(gpu.get("uuid"), str):
                self.gpus[gpu["uuid"]] = gpu
        self.latest = dict(sample)
        if self.keep_s is not None and len(self.ts.values) % 256 == 0:
            old = int(np.searchsorted(self.ts.values, ts - self.keep_s))
            for column in (self.ts, *self.columns.values()):
                column.drop(old)

    def curve(self, who: str, field: str, start: int = 0) -> Curve:
        """A column from position ``start`` on, with a NaN wherever a line must not be drawn across.

        Args:
            who: A GPU's UUID, ``host``, or a rank as text.
            field: Such as ``busy``.
            start: Position (see :class:`Column`) of the first sample.

        Returns:
            ts (UTC seconds) and values, each of shape (n,).
        """
        ts = self.ts.since(start)
        column = self.columns.get((who, field))
        if column is None:
            return np.empty(0), np.empty(0)
        before = self.ts.values[-len(ts) - 1 : -len(ts)] if len(ts) < len(self.ts.values) else ts[:1]
        late = np.flatnonzero(np.diff(ts, prepend=before) > GAP_S) if len(ts) else np.empty(0, dtype=np.intp)
        values = column.since(start)
        return np.insert(ts, late, ts[late]), np.insert(values, late, math.nan)

    def snapshot(
        self, who: str, field: str, lo: float | None = None, hi: float | None = None, points: int = 2000
    ) -> Curve:
        """A column with at most about ``points`` points; extremes stay and gaps stay gaps. See :meth:`curve`."""
        return thin(*self.curve(who, field), lo=lo, hi=hi, points=points)


class HardwareSeries(HardwareTable):
    """Follow the hardware log of one run.

    Args:
        run_dir: The run directory; it may be empty or not there yet.

    Attributes:
        generation: Changes when the log was cut or replaced and everything was read again.
    """

    def __init__(self, run_dir: Path | str) -> None:
        super().__init__()
        self._log = JsonlFollower(Path(run_dir) / "hardware.jsonl")
        self.generation = self._log.generation

    def poll(self, max_bytes: int = 8 << 20) -> bool:
        """Read what is new; tell whether anything was."""
        samples = self._log.poll(max_bytes)
        if self._log.generation != self.generation:
            self.generation = self._log.generation
            self.ts, self.columns, self.gpus, self.latest = Column(), {}, {}, {}
        for sample in samples:
            self.append(sample)
        return bool(samples)


def _parts(sample: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The GPUs, the host and the ranks of a sample, each with its name in the table."""
    for gpu in sample.get("gpus") or ():
        if isinstance(gpu, dict) and isinstance(gpu.get("uuid"), str):
            yield gpu["uuid"], gpu
    host, ranks = sample.get("host"), sample.get("ranks")
    if isinstance(host, dict):
        yield "host", host
    if isinstance(ranks, dict):
        yield from ((rank, values) for rank, values in ranks.items() if isinstance(values, dict))
