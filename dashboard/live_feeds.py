"""What is watched on the live route's behalf: each run, the store and the machine, once for all tabs.

A feed's ``poll`` and everything that reads its series run in the one worker thread of
:mod:`dashboard.live`, so they need no locks. What may take longer (``show``, ``ls``, NVML) runs in other
threads, and its result is put in place on the event loop.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp_core import runs
from ddp_core.errors import UserError
from ddp_core.runs import gpus, leases
from ddp_core.telemetry.follower import JsonlFollower
from ddp_core.telemetry.hardware_series import HardwareSeries, HardwareTable
from ddp_core.telemetry.host import HostSampler
from ddp_core.telemetry.series import RunSeries

READ_MOST = 2 << 20
"""Bytes read of one file at a time, so that a long log does not hold up everybody else's."""

SHOW_EVERY_S = 0.25
_LOOK_AGAIN_S = 2.0  # a supervisor that died changes no file
_PROCESSES_EVERY_S = 5.0
_RATE_OVER_S = 60.0
HISTORY_S = 3600.0
NOTICED_MOST = 3
ENDED_STATES = frozenset(str(status) for status in runs.RunStatus if status.ended)


class RunFeed:
    """One run's directory, followed.

    Attributes:
        version: Goes up with every change.
        nonce: Tells this feed's cursors from those of another one on the same run.
        error: Why the run cannot be shown, or None.
        shown: The newest ``show`` document.
        document: The ``run`` channel's payload, rebuilt a few times a second at most.
        cache: Payloads made since the last change, shared by all tabs.
    """

    def __init__(self, store: runs.Store, run_id: str) -> None:
        self.store, self.run_id = store, run_id
        self.run: runs.RunDir | None = None
        self.version = 0
        self.nonce = secrets.token_hex(4)
        self.error: str | None = None
        self.shown: dict[str, Any] | None = None
        self.document: dict[str, Any] | None = None
        self.cache: dict[Any, Any] = {}
        self.logs: dict[tuple[int | None, int | None, str], LogFile] = {}
        self.caught_up = True
        self.read = False  # whether the files were looked at, so that there is something to show
        self._signature: tuple[Any, ...] = ()
        self._shown_at = 0.0
        self._documented_at = 0.0
        self._document_is_old = True

    def poll(self) -> bool:
        """Read what is new in the run's files; tell whether anything is."""
        if self.run is None:
            return False
        new_metrics = self.series.poll(READ_MOST)
        self.caught_up = self.series.caught_up
        changed = self.hardware.poll(READ_MOST) | new_metrics
        if self.log.poll():
            changed = True
        for log in self.logs.values():
            changed |= log.changed(self.series.attempts)
        self._document_is_old |= changed
        if changed or not self.read:
            changed = self.read = True
            self.touch()
        if self._document_is_old and self.shown and time.monotonic() - self._documented_at >= SHOW_EVERY_S:
            self.document = self._document(self.shown)
            self._documented_at = time.monotonic()
            self._document_is_old = False
            self.touch()
            changed = True
        return changed

    def touch(self) -> None:
        """Note that something changed."""
        self.version += 1
        self.cache.clear()

    def look(self) -> tuple[runs.RunDir | None, dict[str, Any] | None, str | None] | None:
        """Ask for the ``show`` document if it may be another one now. Runs outside the worker.

        Returns:
            The run, its document and an error, for :meth:`put`; None if nothing changed.
        """
        now = time.monotonic()
        try:
            run = self.store.run(self.run_id)
            signature = _signature(run.path, ("", "state.json", "events.jsonl", "stop.json", "metrics"))
            ended = self.shown is not None and self.shown["state"] in ENDED_STATES
            if signature == self._signature and not self.error and (ended or now - self._shown_at < _LOOK_AGAIN_S):
                return None
            self._signature, self._shown_at = signature, now
            return run, runs.show(run), None
        except UserError as error:
            return None, None, str(error)

    def put(self, found: tuple[runs.RunDir | None, dict[str, Any] | None, str | None]) -> bool:
        """Put in place what :meth:`look` found, in the worker; tell whether it is news."""
        run, shown, error = found
        if (shown, error) == (self.shown, self.error):
            return False
        if run is not None and self.run is None:
            self.run = run
            self.read = False
            self.logs = {}
            self.nonce = secrets.token_hex(4)
            self.series = RunSeries(run.path)
            self.hardware = HardwareSeries(run.path)
            self.log = Events(run.events_file)
        self.shown, self.error = shown, error
        if error:
            self.run = self.document = None
        self._document_is_old = True
        self.touch()
        return True

    def _document(self, shown: dict[str, Any]) -> dict[str, Any]:
        sample = self.hardware.latest
        joined = self.joined()
        processes = sample.get("ranks") or {}
        count = shown.get("nproc_per_node") or 0
        ranks: dict[str, dict[str, Any]] = {}
        for rank in sorted({*range(count), *self.series.ranks}):
            series = self.series.ranks.get(rank)
            start = joined.get(rank, {})
            process = processes.get(str(rank)) or {}
            ranks[str(rank)] = {
                **(series.latest if series else {}),
                "device": start.get("device"),
                "gpu": start.get("gpu"),
                "cpu": process.get("cpu"),
                "memory": process.get("memory"),
            }
        held = set(shown.get("gpus") or ())
        return {
            "show": {**shown, **self._position(shown)},
            "ranks": ranks,
            "gpus": [gpu for gpu in sample.get("gpus") or () if gpu.get("uuid") in held],
            "driver_error": sample.get("driver_error"),
            "host": sample.get("host"),
            "progress": self._progress(shown, joined),
            "skipped": {str(rank): lines for rank, lines in self.series.skipped.items()},
            "metrics": self.series.metrics,
            "noticed": self._noticed(),
            "end_reason": self._end_reason(),
        }

    def _noticed(self) -> dict[str, Any]:
        """What the ranks warned of, newest last: violations, warnings, and the steps that were left out."""
        told: dict[str, list[dict[str, Any]]] = {"watch": [], "warning": [], "skipped": []}
        for events in self.series.events.values():
            for event in events:
                if event["event"] in told:
                    told[event["event"]].append(event)
        skipped = told["skipped"]
        return {
            **{name: told[name][-NOTICED_MOST:] for name in ("watch", "warning")},
            "watch_count": len(told["watch"]),
            "warning_count": len(told["warning"]),
            "skipped": {"count": len(skipped), "last": skipped[-1]} if skipped else None,
        }

    def _end_reason(self) -> str | None:
        """Why the newest attempt finished, if not because all epochs were done."""
        ends = [e for e in self.series.events.get(0, ()) if e["event"] in ("start", "end")]
        reason = ends[-1].get("reason") if ends and ends[-1].get("outcome") == "finished" else None
        return reason if isinstance(reason, str) else None

    def joined(self) -> dict[int, dict[str, Any]]:
        """The newest ``joined`` event of each rank."""
        return {
            rank: event for rank, events in self.series.events.items() for event in events if event["event"] == "joined"
        }

    def _position(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Step and epoch from what was read here, which is newer than the document's."""
        latest = [series.latest for series in self.series.ranks.values() if series.latest]
        steps = [row["step"] for row in latest]
        if not steps:
            return {}
        epochs = [row["epoch"] for row in latest if isinstance(row.get("epoch"), int)]
        return {"step": max(steps), "epoch": max(epochs, default=shown.get("epoch"))}

    def _progress(self, shown: Mapping[str, Any], joined: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        position = {"step": shown.get("step"), "epoch": shown.get("epoch"), **self._position(shown)}
        start = joined.get(0, {})
        total = shown.get("steps_total") or start.get("steps_total")
        step = position["step"]
        speeds = [s.latest.get("samples_per_s") for s in self.series.ranks.values()]
        known = [speed for speed in speeds if isinstance(speed, (int, float))]
        eta = None
        if shown["state"] == "running" and total and step and 0 in self.series.ranks:
            ts, steps = self.series.ranks[0].ts.values, self.series.ranks[0].step.values
            first = int(ts.searchsorted(ts[-1] - _RATE_OVER_S)) if len(ts) else 0
            if len(ts) - first > 1 and steps[-1] > steps[first]:
                eta = (total - step) * float((ts[-1] - ts[first]) / (steps[-1] - steps[first]))
        return {
            **position,
            "steps_total": total,
            "epochs": shown.get("epochs") or start.get("epochs"),
            "fraction": min(step / total, 1.0) if total and step else None,
            "eta_s": eta,
            "samples_per_s": sum(known) if known else None,
        }


class Events:
    """The supervisor's events of one run."""

    def __init__(self, path: Path) -> None:
        self._log = JsonlFollower(path)
        self.generation = 0
        self.records: list[dict[str, Any]] = []

    def poll(self) -> bool:
        """Read what is new; tell whether anything was."""
        records = self._log.poll()
        if self._log.generation != self.generation:
            self.generation = self._log.generation
            self.records = []
        self.records += records
        return bool(records)


class LogFile:
    """Where one rank's output is, and whether it grew. Torchrun names the folder, so it is looked up.

    Args:
        find: Gives the path for an attempt, or None while there is no file.
        attempt: The attempt, or None for the newest.
    """

    def __init__(self, find: Callable[[int], Path | None], attempt: int | None) -> None:
        self._find, self._attempt = find, attempt
        self._found_for: int | None = None
        self._looked_at = 0.0
        self._seen: tuple[int, int] | None = None
        self.path: Path | None = None

    def changed(self, attempts: list[int]) -> bool:
        """Look the file up if need be; tell whether it is another one or has another size."""
        attempt = self._attempt if self._attempt is not None else max(attempts, default=0)
        now = time.monotonic()
        if (self.path is None or attempt != self._found_for) and now - self._looked_at > 0.5:
            self._looked_at = now
            if path := self._find(attempt):
                self.path, self._found_for = path, attempt
        try:
            stat = os.stat(self.path) if self.path else None  # noqa: PTH116
        except OSError:
            stat = None
        seen = (stat.st_ino, stat.st_size) if stat else None
        if seen == self._seen:
            return False
        self._seen = seen
        return True


class StoreFeed:
    """The list of runs."""

    def __init__(self, store: runs.Store, machine: MachineFeed) -> None:
        self.store, self.machine = store, machine
        self.version = 0
        self.error: str | None = None
        self.document: dict[str, Any] | None = None
        self.cache: dict[Any, Any] = {}
        self._signature: tuple[Any, ...] = ()
        self._listed_at = 0.0

    def look(self) -> tuple[dict[str, Any] | None, str | None] | None:
        """List the runs if that may give another list now. Runs outside the worker."""
        now = time.monotonic()
        try:
            found = self.store.runs()
            signature = tuple(sorted((run.id, *_signature(run.path, ("state.json",))) for run in found))
            active = self.document and any(row["state"] not in ENDED_STATES for row in self.document["runs"])
            wait = 1.0 if active else 30.0
            if self.document and signature == self._signature and now - self._listed_at < wait:
                return None
            self._signature, self._listed_at = signature, now
            names = {uuid: gpu.get("name") for uuid, gpu in self.machine.table.gpus.items()}
            rows = [{**row, "gpu_names": [names.get(uuid) for uuid in row["gpus"]]} for row in runs.ls(self.store)]
            return {"runs": rows}, None
        except UserError as error:
            return None, str(error)

    def put(self, found: tuple[dict[str, Any] | None, str | None]) -> bool:
        """Put the list in place; tell whether it is another one."""
        if found == (self.document, self.error):
            return False
        self.document, self.error = found
        self.version += 1
        self.cache.clear()
        return True


class MachineFeed:
    """The machine, sampled once a second for as long as the dashboard runs, with the last hour in memory."""

    def __init__(self, disk: Path) -> None:
        self.version = 0
        self.nonce = secrets.token_hex(4)
        self.error: str | None = None
        self.table = HardwareTable(keep_s=HISTORY_S)
        self.document: dict[str, Any] | None = None
        self.cache: dict[Any, Any] = {}
        self._host = HostSampler(disk if disk.exists() else Path())
        self._processes: dict[str, list[dict[str, Any]]] = {}
        self._processes_at = -_PROCESSES_EVERY_S

    def sample(self) -> dict[str, Any]:
        """Take one sample. Runs outside the worker."""
        report = gpus.report()
        if report["gpus"] and time.monotonic() - self._processes_at >= _PROCESSES_EVERY_S:
            self._processes_at = time.monotonic()
            self._processes = gpus.processes()
        rows = [
            {**gpu, "run": leases.holder(gpu["uuid"]), "processes": self._processes.get(gpu["uuid"], [])}
            for gpu in report["gpus"]
        ]
        return {"ts": time.time(), "gpus": {**report, "gpus": rows}, **self._host.sample({})}

    def put(self, sample: dict[str, Any]) -> None:
        """Add a sample to the history, in the worker."""
        report = sample["gpus"]
        self.table.append({**sample, "gpus": report["gpus"], "driver_error": report["error"]})
        self.document = {"ts": sample["ts"], "gpus": report, "host": sample["host"]}
        self.error = None
        self.version += 1
        self.cache.clear()


def _signature(folder: Path, names: tuple[str, ...]) -> tuple[Any, ...]:
    """What changes when one of a folder's files does."""
    found: list[Any] = []
    for name in names:
        try:
            stat = os.stat(folder / name)  # noqa: PTH116
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
