"""What each channel of the live route sends: everything at first, then only what is new.

A channel is a function of its subscription. It runs in the worker thread when the subscription's feed has
changed, gives the next payload or None, and moves the subscription's cursor on. A cursor is opaque to the
client, which hands the last one back after a dropped connection; one that no longer fits, or that is so far
behind that the difference is longer than a picture, gives a new picture instead. So nothing queues up for a
client that is slow: what it gets next is made when it is ready for it.
"""

from __future__ import annotations

import codecs
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from dashboard.live_feeds import ENDED_STATES, LogFile, MachineFeed, RunFeed, StoreFeed
from ddp_core.telemetry.curves import Curve
from ddp_core.telemetry.hardware_series import HardwareTable

Feed = RunFeed | StoreFeed | MachineFeed
Payload = dict[str, Any]

_log_file = logging.getLogger(__name__)

POINTS_OF_A_CHART = 6000
POINTS_OF_A_TRACE = (250, 1500)
LOG_TAIL = 64 * 1024
EVENTS_MOST = 500


class Subscription:
    """One thing that one client follows.

    Args:
        feed: What it is a view of.
        channel: The channel's name.
        params: As the client gave them.
        cursor: Where the client stopped, or None.
    """

    def __init__(self, feed: Feed, channel: str, params: Mapping[str, Any], cursor: Any) -> None:
        self.feed, self.channel = feed, channel
        self.params = dict(params)
        self.cursor: dict[str, Any] | None = cursor if isinstance(cursor, dict) else None
        self.seen = -1  # the feed's version that was rendered last
        self.params_are_new = "window" in self.params
        self.error: str | None = None
        self.document: Payload | None = None
        self.about: Payload | None = None

    def update(self, params: Mapping[str, Any]) -> None:
        """Change the parameters; the next payload answers them."""
        if params != self.params:
            self.params = dict(params)
            self.params_are_new = True
            self.seen = -1

    def due(self) -> bool:
        """Tell whether there may be something to send."""
        return self.seen != self.feed.version

    def render(self) -> bytes | None:
        """Make the next payload, as JSON of an object; None if there is nothing new. Never raises."""
        self.seen = self.feed.version
        error = self.feed.error
        if error is None:
            try:
                body = self._document() if self.channel in DOCUMENTS else self._increment()
            except Exception as problem:  # whatever it is, the tab is told and the socket lives on
                _log_file.exception("the channel %s failed", self.channel)
                error = f"{type(problem).__name__}: {problem}"
            else:
                if body is not None:
                    self.error = None
                return body
        if error == self.error:
            return None
        self.error, self.cursor, self.document = error, None, None
        return orjson.dumps({"error": error})

    def _document(self) -> bytes | None:
        """The newest whole document of the feed."""
        document = self.feed.document
        if document is None or document is self.document:
            return None
        self.document = document
        made = self.feed.cache.get(self.channel)
        if made is None:
            made = self.feed.cache[self.channel] = _json(document)
        return made

    def _increment(self) -> bytes | None:
        """What is new since the cursor; made once for all tabs that are equally far."""
        if isinstance(self.feed, RunFeed) and not (self.feed.run and self.feed.read):
            return None
        key = (self.channel, repr(self.params), repr(self.cursor), self.params_are_new)
        made = self.feed.cache.get(key)
        if made is None:
            payload = CHANNELS[self.channel](self)
            if payload is not None and self.cursor is not None:
                payload["cursor"] = self.cursor
            made = self.feed.cache[key] = (None if payload is None else _json(payload), self.cursor)
        body: bytes | None
        body, self.cursor = made
        self.params_are_new = False
        return body


def _json(payload: Payload) -> bytes:
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _metric(sub: Subscription) -> Payload | None:
    """A metric of every rank and its mean: ``{traces: [{key, x, y, bad}], snapshot | add, window?}``."""
    feed = _run_feed(sub)
    metric = str(sub.params.get("metric", "loss"))
    series = feed.series
    keys: list[int | None] = [*series.ranks, None]
    budget = _budget(sub, len(series.ranks))
    return _curves(
        sub,
        token=f"{feed.nonce}-{series.generation}",
        ends={_key(key): series.count(metric, key) for key in keys},
        curve=lambda key, start: series.curve(metric, None if key == "mean" else int(key), start=start),
        thinned=lambda key, lo, hi: series.snapshot(
            metric, None if key == "mean" else int(key), lo=lo, hi=hi, points=budget
        ),
        budget=budget,
        about={
            "traces": {_key(key): {} for key in keys},
            "note": f"no {metric.replace('_', ' ')} was logged" if _over(feed) else None,
        },
    )


def _over(feed: Feed) -> bool:
    """Whether what is not there to draw will not come any more."""
    return isinstance(feed, RunFeed) and feed.shown is not None and feed.shown["state"] in ENDED_STATES


def _hardware(sub: Subscription) -> Payload | None:
    """One field of every GPU, of the host or of every rank over time, of a run or of the whole machine."""
    feed = sub.feed
    if isinstance(feed, RunFeed):
        table: HardwareTable = _run_feed(sub).hardware
        token = f"{feed.nonce}-{feed.hardware.generation}"
        held = (feed.shown or {}).get("gpus") or []
        gpus = {uuid: table.gpus.get(uuid, {}) for uuid in held}
    else:
        assert isinstance(feed, MachineFeed)
        table, token, gpus = feed.table, feed.nonce, table_gpus(feed.table)
    of, field = str(sub.params.get("of", "gpus")), str(sub.params.get("field", "busy"))
    about: dict[str, dict[str, Any]]
    if of == "gpus":
        # A GPU that was never sampled has no number to be shown by yet.
        order = {uuid: gpu["index"] for uuid, gpu in gpus.items() if "index" in gpu}
        about = {
            uuid: {"index": order[uuid], "name": f"GPU {order[uuid]}", "detail": gpus[uuid].get("name")}
            for uuid in sorted(order, key=lambda uuid: order[uuid])
        }
    elif of == "ranks":
        ranks = sorted({int(who) for who, of_field in table.columns if of_field == field and who.isdigit()})
        about = {str(rank): {"index": rank, "name": f"rank {rank}"} for rank in ranks}
    else:
        about = {"host": {"index": 0, "name": "host"}}
    budget = _budget(sub, len(about))
    end = table.ts.end
    return _curves(
        sub,
        token=token,
        ends={key: end if (key, field) in table.columns else 0 for key in about},
        first=table.ts.start,
        curve=lambda key, start: table.curve(key, field, start),
        thinned=lambda key, lo, hi: table.snapshot(key, field, lo, hi, budget),
        budget=budget,
        about={
            "traces": about,
            "limit": _limit(of, field, gpus, table),
            "note": _note(of, field, gpus, table) or ("no sample was taken" if _over(feed) else None),
        },
    )


def _curves(
    sub: Subscription,
    *,
    token: str,
    ends: Mapping[str, int],
    curve: Callable[[str, int], Curve],
    thinned: Callable[[str, float | None, float | None], Curve],
    budget: int,
    about: Mapping[str, Any],
    first: int = 0,
) -> Payload | None:
    """A picture of all curves, or what was added to them since the cursor, and the window if it is asked for.

    Args:
        sub: The subscription; its cursor moves on.
        token: Changes whenever earlier points are void.
        ends: How many points each curve has, by key.
        curve: Gives a curve's points from a position on.
        thinned: Gives a curve's points that matter within a window.
        budget: Most points of a curve.
        about: What does not change with every point: goes along with a picture, and when it changed.
        first: Position of the oldest points there are.
    """
    cursor = sub.cursor or {}
    before, sent = cursor.get("n"), cursor.get("s")
    known = (
        cursor.get("g") == token
        and isinstance(before, dict)
        and isinstance(sent, int)
        and all(isinstance(n, int) and n <= ends.get(key, -1) for key, n in before.items())
    )
    payload: Payload = {}
    window = _window(sub.params.get("window"))
    if known:
        assert isinstance(before, dict)
        assert isinstance(sent, int)
        new = {key: end - before.get(key, 0) for key, end in ends.items() if end > before.get(key, 0)}
        sent += max(new.values(), default=0)
        if new and sent <= budget and all(before.get(key, first) >= first for key in new):
            payload["add"] = [_trace(key, curve(key, before.get(key, 0))) for key in new]
            sub.cursor = {"g": token, "n": dict(ends), "s": sent}
        elif new:
            known = False
    if not known:
        payload["snapshot"] = [_trace(key, thinned(key, None, None)) for key in ends]
        sub.cursor = {"g": token, "n": dict(ends), "s": 0}
    if window and (sub.params_are_new or not known):
        lo, hi = window
        payload["window"] = {"lo": lo, "hi": hi, "traces": [_trace(key, thinned(key, lo, hi)) for key in ends]}
    elif sub.params_are_new and not window:
        payload["window"] = None
    about_now = dict(about)
    if not known or about_now != sub.about:
        payload["about"] = about_now
        sub.about = about_now
    return payload or None


def _trace(key: str, curve: Curve) -> Payload:
    """A curve on the wire: x, y with null for what is not finite, and those values by name in ``bad``."""
    x, y = curve
    bad = [[x[i], _name(y[i])] for i in np.flatnonzero(~np.isfinite(y))]
    whole = x.astype(np.int64)
    return {
        "key": key,
        "x": whole if np.array_equal(whole, x) else np.ascontiguousarray(x),
        "y": np.ascontiguousarray(y),
        "bad": bad,
    }


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _events(sub: Subscription) -> Payload | None:
    """What happened to the run: the supervisor's events, and what the ranks say beside their numbers."""
    feed = _run_feed(sub)
    token = f"{feed.nonce}-{feed.log.generation}-{feed.series.generation}"
    told = {
        str(rank): [e for e in events if e["event"] in TOLD or (rank == 0 and e["event"] == "end" and e.get("reason"))]
        for rank, events in feed.series.events.items()
    }
    lists: dict[str, list[dict[str, Any]]] = {"supervisor": feed.log.records, **told}
    ends = {name: len(records) for name, records in lists.items()}
    before = (sub.cursor or {}).get("n")
    reset = (sub.cursor or {}).get("g") != token or not isinstance(before, dict)
    starts = {} if reset or not isinstance(before, dict) else before
    new = [e for name, records in lists.items() for e in records[_whole(starts.get(name)) :]]
    if not new and not reset:
        return None
    sub.cursor = {"g": token, "n": ends}
    new.sort(key=_time_of)
    return {"reset": reset, "events": new[-EVENTS_MOST:]}


def _log(sub: Subscription) -> Payload | None:
    """A rank's output: a bounded tail, then what is added."""
    feed = _run_feed(sub)
    rank, attempt = _optional_int(sub.params.get("rank")), _optional_int(sub.params.get("attempt"))
    stream = "stderr" if sub.params.get("stream") == "stderr" else "stdout"
    log = feed.logs.get((attempt, rank, stream))
    if log is None:
        run = feed.run
        assert run is not None

        def find(of: int) -> Path | None:
            return run.agent_log if rank is None else run.output_file(of, rank, f"{stream}.log")

        log = feed.logs[attempt, rank, stream] = LogFile(find, attempt)
        log.changed(feed.series.attempts)
    try:
        file = os.open(log.path, os.O_RDONLY | os.O_NONBLOCK) if log.path else None
    except OSError:
        file = None
    if file is None:
        if sub.cursor == {"f": None}:
            return None
        sub.cursor = {"f": None}
        return {"reset": True, "text": "", "missing": True}
    try:
        return _read_log(sub, file, str(log.path))
    finally:
        os.close(file)


def _read_log(sub: Subscription, file: int, path: str) -> Payload | None:
    stat = os.fstat(file)
    identity = f"{path}:{stat.st_ino}"
    cursor = sub.cursor or {}
    offset = _whole(cursor.get("o"))
    reset = cursor.get("f") != identity or not offset <= stat.st_size <= offset + LOG_TAIL
    if reset:
        offset = max(0, stat.st_size - LOG_TAIL)
    elif offset == stat.st_size:
        return None
    data = os.pread(file, LOG_TAIL, offset)
    if reset and offset:
        # Begin with a whole line, if there is one.
        cut = data.find(b"\n") + 1
        data, offset = data[cut:], offset + cut
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    held_back = len(decoder.getstate()[0])  # half a character, whose rest is still to come
    sub.cursor = {"f": identity, "o": offset + len(data) - held_back}
    if not text and not reset:
        return None
    return {"reset": reset, "text": text, "cut": reset and offset > 0, "size": stat.st_size}


def table_gpus(table: HardwareTable) -> dict[str, dict[str, Any]]:
    """The GPUs of the newest sample, by UUID: one that vanished for good is not shown for ever."""
    return {gpu["uuid"]: gpu for gpu in table.latest.get("gpus") or ()}


def _limit(of: str, field: str, gpus: Mapping[str, Mapping[str, Any]], table: HardwareTable) -> float | None:
    """The most that a field can be, for the axis: the memory's size, the power limit."""
    whole = {"memory_used": "memory_total", "power_w": "power_limit_w"}.get(field)
    if whole is None or of == "ranks":
        return None
    rows: Iterable[Mapping[str, Any]] = gpus.values() if of == "gpus" else [table.latest.get("host") or {}]
    limits = [row[whole] for row in rows if isinstance(row.get(whole), (int, float))]
    return max(limits, default=None)


def _note(of: str, field: str, gpus: Mapping[str, Mapping[str, Any]], table: HardwareTable) -> str | None:
    """Why nothing can be drawn, in words, if that is known."""
    if of != "gpus":
        return None
    if not gpus:
        return table.latest.get("driver_error") or ("no GPU" if table.latest else None)
    reasons = {(gpu.get("missing") or {}).get(field) for gpu in gpus.values()}
    return reasons.pop() if len(reasons) == 1 else None


def _run_feed(sub: Subscription) -> RunFeed:
    assert isinstance(sub.feed, RunFeed)
    return sub.feed


def _key(rank: int | None) -> str:
    return "mean" if rank is None else str(rank)


def _budget(sub: Subscription, traces: int) -> int:
    least, most = POINTS_OF_A_TRACE
    wanted = sub.params.get("points")
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        most = min(max(wanted, least), 20 * most)
    return max(least, min(most, POINTS_OF_A_CHART // max(traces, 1)))


def _window(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, (int, float)) for v in value):
        return None
    lo, hi = sorted(map(float, value))
    return lo, hi


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _optional_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time_of(event: Mapping[str, Any]) -> float:
    ts = event.get("ts")
    return float(ts) if isinstance(ts, (int, float)) else 0.0


TOLD = frozenset({"warning", "watch", "skipped", "checkpoint", "resumed"})
CHANNELS: dict[str, Callable[[Subscription], Payload | None]] = {
    "metric": _metric,
    "hardware": _hardware,
    "events": _events,
    "log": _log,
}
DOCUMENTS = {"run", "runs", "machine"}
