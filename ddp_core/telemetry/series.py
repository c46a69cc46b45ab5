"""What a run's logs say, as columns of numbers that grow while the run does, and as curves to draw.

:class:`RunSeries` follows the rank logs of a run over all attempts, :class:`HardwareSeries` its
hardware log. Both read only what is new at each :meth:`poll` and cost one ``stat`` a file when nothing is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ddp_core.telemetry.curves import Column, Curve, Floats, thin
from ddp_core.telemetry.follower import JsonlFollower
from ddp_core.telemetry.hardware_series import HardwareSeries, HardwareTable
from ddp_core.telemetry.jsonl import number

__all__ = ["HardwareSeries", "HardwareTable", "RankSeries", "RunSeries"]

Axis = Literal["step", "ts", "epoch"]

_KEPT_EVENTS = frozenset({"start", "joined", "resumed", "checkpoint", "warning", "watch", "skipped", "end"})
_SETTLED_NS = 2_000_000_000  # a folder that changed less long ago may change again within its time's precision


class Metric:
    """One metric of one rank: its values and the row (a logged line) each of them is from."""

    def __init__(self) -> None:
        self.rows = Column()
        self.values = Column()

    def __len__(self) -> int:
        return self.values.end


class RankSeries:
    """The columns of one rank: ``step``, ``ts`` and ``epoch`` by row, and each metric by name.

    A metric has values only where it was logged, so a value that is missing and a NaN are two things.
    """

    def __init__(self) -> None:
        self.step = Column()
        self.ts = Column()
        self.epoch = Column()
        self.metrics: dict[str, Metric] = {}
        self.attempt = -1
        self._latest: dict[str, Any] = {}

    @property
    def latest(self) -> dict[str, Any]:
        """The newest value of every field, as logged (a NaN is the string "NaN")."""
        return self._latest

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one metric line; one without a numeric step is no metric line and is ignored."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add metric lines. Lines with the same fields, which is how logs are written, go in column by column."""
        for keys, group in groupby(records, key=tuple):
            rows = [record for record in group if _has_step(record)]
            if not rows:
                continue
            first_row = self.step.end
            for name in ("step", "ts", "epoch"):
                column: Column = getattr(self, name)
                column.extend([math.nan if (v := number(row.get(name))) is None else v for row in rows])
            all_rows = np.arange(first_row, first_row + len(rows), dtype=float)
            for key in keys:
                if key in ("step", "ts", "epoch"):
                    continue
                values = [number(row[key]) for row in rows]
                there = [value is not None for value in values]
                if any(there):
                    metric = self.metrics.setdefault(key, Metric())
                    metric.rows.extend(all_rows if all(there) else all_rows[there])
                    metric.values.extend([value for value in values if value is not None])
            self._latest.update(rows[-1])

    def truncate(self, step: float) -> bool:
        """Take back every row from ``step`` on, which a later attempt does again; tell whether there was one."""
        rows = int(np.searchsorted(self.step.values, step))
        if rows == self.step.end:
            return False
        for column in (self.step, self.ts, self.epoch):
            column.cut(rows)
        for metric in self.metrics.values():
            size = int(np.searchsorted(metric.rows.values, rows))
            metric.rows.cut(size)
            metric.values.cut(size)
        return True

    def curve(self, metric: str, x: Axis = "step", start: int = 0) -> Curve:
        """All points of a metric from position ``start`` on.

        Returns:
            x and y, each of shape (n,); non-finite values are in y as they were logged.
        """
        found = self.metrics.get(metric)
        if found is None:
            return np.empty(0), np.empty(0)
        column: Column = getattr(self, x)
        return column.values[found.rows.since(start).astype(np.intp)], found.values.since(start)


class _Mean:
    """Mean over ranks of one metric, at the steps that every rank logged; grows with the ranks."""

    def __init__(self) -> None:
        self.step = Column()
        self.value = Column()
        self._done: dict[int, int] = {}

    def update(self, curves: Mapping[int, Curve], lengths: Mapping[int, int]) -> None:
        """Take in what is new; ``curves`` are each rank's points from where :meth:`done` says on."""
        common = min(len(x) for x, _ in curves.values())
        if common == 0:
            return
        heads = [(x[:common], y[:common]) for x, y in curves.values()]
        with np.errstate(invalid="ignore", over="ignore"):
            if all(np.array_equal(heads[0][0], x) for x, _ in heads[1:]):
                self.step.extend(heads[0][0])
                self.value.extend(np.mean([y for _, y in heads], axis=0))
                self._done = {rank: self.done(rank) + common for rank in lengths}
                return
            # The ranks logged at different steps: go as far as all of them are and take the steps they share.
            until = min(x[-1] for x, _ in curves.values())
            taken = {rank: int(np.searchsorted(x, until, "right")) for rank, (x, _) in curves.items()}
            points = [_last_of_each_step(x[: taken[rank]], y[: taken[rank]]) for rank, (x, y) in curves.items()]
            steps = points[0][0]
            for x, _ in points[1:]:
                steps = np.intersect1d(steps, x, assume_unique=True)
            self.step.extend(steps)
            self.value.extend(np.mean([y[np.searchsorted(x, steps)] for x, y in points], axis=0))
        self._done = {rank: self.done(rank) + taken[rank] for rank in lengths}

    def done(self, rank: int) -> int:
        """How many points of a rank are in the mean already."""
        return self._done.get(rank, 0)

    def truncate(self, step: float, lengths: Mapping[int, int]) -> None:
        """Take back the points from ``step`` on; ``lengths`` are the ranks' after they were truncated."""
        size = int(np.searchsorted(self.step.values, step))
        self.step.cut(size)
        self.value.cut(size)
        self._done = {rank: min(done, lengths.get(rank, 0)) for rank, done in self._done.items()}


class RunSeries:
    """Follow the rank logs of one run, all ranks and attempts.

    An attempt that starts again from an earlier step takes back the points it does again.

    Args:
        run_dir: The run directory; it may be empty or not there yet.

    Attributes:
        ranks: The columns of each rank.
        attempts: Attempts seen, in order.
        events: Events of each rank's logs, in order, each with its ``attempt`` and the ``rank`` it is about: the
            log's own, unless the event names another.
        generation: Changes whenever points were taken back, so that what was drawn before is void.
        world_size: Number of ranks of the newest attempt, 0 while unknown.
        caught_up: False if the last poll left something to be read at once.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.run_dir = Path(run_dir)
        self._begin()
        self.generation = 0

    def _begin(self) -> None:
        self.ranks: dict[int, RankSeries] = {}
        self.attempts: list[int] = []
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.world_size = 0
        self.caught_up = True
        self._means: dict[str, _Mean] = {}
        self._logs: dict[tuple[int, int], JsonlFollower] = {}
        self._log_generations: dict[tuple[int, int], int] = {}
        self._folders: dict[str, int] = {}

    @property
    def skipped(self) -> dict[int, int]:
        """Lines of each rank that could not be used: torn, null, or not JSON objects."""
        counts = dict.fromkeys(self.ranks, 0)
        for (_, rank), log in self._logs.items():
            counts[rank] = counts.get(rank, 0) + log.skipped
        return counts

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics that any rank logged."""
        return sorted({name for rank in self.ranks.values() for name in rank.metrics})

    def poll(self, max_bytes: int = 8 << 20) -> bool:
        """Read what is new, of each file at most ``max_bytes``.

        Returns:
            Whether anything was (a line that had to be skipped too), or points were taken back.
        """
        self._find_logs()
        changed = False
        self.caught_up = True
        for attempt in self.attempts:
            for (of, rank), log in self._logs.items():
                if of != attempt:
                    continue
                skipped = log.skipped
                records = log.poll(max_bytes)
                changed |= log.skipped != skipped
                if log.generation != self._log_generations[of, rank]:
                    # A log that was cut or replaced: what was read of it is void, so all is read again.
                    self._begin()
                    self.generation += 1
                    self.poll(max_bytes)
                    return True
                if records:
                    changed = True
                    self._take(attempt, rank, records)
                self.caught_up &= log.caught_up
            if not self.caught_up:
                break  # an attempt is only understood once those before it are read
        if changed:
            self._update_means()
        return changed

    def snapshot(  # noqa: PLR0917  the same order as everywhere
        self,
        metric: str,
        rank: int | None,
        x: Axis = "step",
        lo: float | None = None,
        hi: float | None = None,
        points: int = 2000,
    ) -> Curve:
        """A metric's curve with at most about ``points`` points; extremes and non-finite values stay.

        Args:
            metric: Its name as logged.
            rank: The rank, or None for the mean over ranks (by step only).
            x: What the x axis is.
            lo: Leave out what is left of this, but for one point, so that the line enters the window.
            hi: The same on the right.
            points: About how many points to give.

        Returns:
            x and y, each of shape (n,); empty if there are none.
        """
        return thin(*self.curve(metric, rank, x), lo=lo, hi=hi, points=points)

    def curve(self, metric: str, rank: int | None, x: Axis = "step", start: int = 0) -> Curve:
        """All points of a rank's metric, or of the mean (rank None), from position ``start`` on."""
        if rank is not None:
            return self.ranks[rank].curve(metric, x, start) if rank in self.ranks else (np.empty(0), np.empty(0))
        mean = self._means.get(metric)
        return (mean.step.since(start), mean.value.since(start)) if mean else (np.empty(0), np.empty(0))

    def count(self, metric: str, rank: int | None) -> int:
        """How many points a rank's metric, or the mean (rank None), has."""
        if rank is None:
            return self._means[metric].value.end if metric in self._means else 0
        found = self.ranks[rank].metrics.get(metric) if rank in self.ranks else None
        return len(found) if found else 0

    def _find_logs(self) -> None:
        """Look for new attempts and ranks, in folders that changed."""
        root = self.run_dir / "metrics"
        if not self._folder_changed(root) and not any(
            self._folder_changed(root / f"attempt_{n}") for n in self.attempts
        ):
            return
        for attempt in _numbered(root, "attempt_", ""):
            for rank in _numbered(root / f"attempt_{attempt}", "rank_", ".jsonl"):
                if (attempt, rank) not in self._logs:
                    path = root / f"attempt_{attempt}" / f"rank_{rank}.jsonl"
                    self._logs[attempt, rank] = log = JsonlFollower(path)
                    self._log_generations[attempt, rank] = log.generation
            if attempt not in self.attempts:
                self.attempts = sorted([*self.attempts, attempt])
        self._logs = dict(sorted(self._logs.items()))

    def _folder_changed(self, folder: Path) -> bool:
        try:
            changed = os.stat(folder).st_mtime_ns  # noqa: PTH116
        except OSError:
            changed = 0
        if self._folders.get(str(folder)) == changed:
            return False
        if time.time_ns() - changed > _SETTLED_NS:
            self._folders[str(folder)] = changed
        return True

    def _take(self, attempt: int, rank: int, records: list[dict[str, Any]]) -> None:
        series = self.ranks.get(rank)
        if series is None:
            series = self.ranks[rank] = RankSeries()
            self.ranks = dict(sorted(self.ranks.items()))
        for record in records:
            if "event" in record and str(record["event"]) in _KEPT_EVENTS:
                self.events.setdefault(rank, []).append({"rank": rank, **record, "attempt": attempt})
                if record["event"] == "start" and isinstance(record.get("world_size"), int):
                    self.world_size = record["world_size"]
        rows = [r for r in records if "event" not in r and _has_step(r)]
        if not rows or attempt < series.attempt:
            return  # a late line of an attempt that another one has replaced
        if attempt > series.attempt:
            self._update_means()
            self._start_attempt(attempt, rank, rows[0]["step"])
        series.extend(rows)

    def _start_attempt(self, attempt: int, rank: int, step: float) -> None:
        """Take back what ``rank`` does again in this attempt, and what ranks did that are not in it (yet)."""
        self.ranks[rank].attempt = attempt
        behind = [s for s in self.ranks.values() if s.attempt < attempt and s.step.end]
        taken_back = [series.truncate(step) for series in [self.ranks[rank], *behind]]
        if any(taken_back):
            self.generation += 1
            for metric, mean in self._means.items():
                mean.truncate(step, {r: self.count(metric, r) for r in self.ranks})

    def _update_means(self) -> None:
        expected = set(range(self.world_size)) or set(self.ranks)
        if len(expected) < 2 or not expected <= self.ranks.keys():
            return
        for metric in self.ranks[min(expected)].metrics:
            if all(metric in self.ranks[rank].metrics for rank in expected):
                mean = self._means.setdefault(metric, _Mean())
                curves = {rank: self.ranks[rank].curve(metric, start=mean.done(rank)) for rank in expected}
                mean.update(curves, {rank: self.count(metric, rank) for rank in expected})


def _has_step(record: Mapping[str, Any]) -> bool:
    step = number(record.get("step"))
    return step is not None and math.isfinite(step)


def _last_of_each_step(x: Floats, y: Floats) -> Curve:
    steps, first_from_end = np.unique(x[::-1], return_index=True)
    return steps, y[::-1][first_from_end]


def _numbered(folder: Path, prefix: str, suffix: str) -> list[int]:
    """The numbers n of the entries ``<prefix>n<suffix>`` of a folder, in order; none if it is not there."""
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    middles = [n[len(prefix) : len(n) - len(suffix)] for n in names if n.startswith(prefix) and n.endswith(suffix)]
    return sorted(int(middle) for middle in middles if middle.isdigit())
