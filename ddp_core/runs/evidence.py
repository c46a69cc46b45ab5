"""Reading what a run left behind: the rank logs' ends and the cause of a failure.

torchrun's return code is 1 for a stop and for a failure alike, so a verdict comes from evidence:
each rank's own ``end`` event, torchrun's ``error.json`` per rank and its closing table of failures.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ddp_core.runs.store import RunDir
from ddp_core.telemetry import jsonl

_TAIL = 64 * 1024
_DEEP_TAIL = 8 * 1024 * 1024

# The lines of torchrun's table of failed ranks (torch/distributed/elastic/multiprocessing/errors).
_TABLE_ROW = re.compile(
    r"time\s+: (?P<time>\S+)\n.*?rank\s+: (?P<rank>\d+) .*?\n.*?exitcode\s+: (?P<exitcode>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.DOTALL,
)
# What a rank says when it fails because another one is gone; it is then a victim, not the culprit.
_VICTIM = re.compile(
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|gloo|nccl|recv(d|value)|tcpstore|sendbytes"
    r"|timed out waiting|distnetworkerror|distbackenderror|remote process|socket",
    re.IGNORECASE,
)


def tail_records(path: Path, size: int = _TAIL) -> list[dict[str, Any]]:
    """The records in the last ``size`` bytes of a JSON-lines file; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - size)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    # Cut off in the middle of its first line unless read from the beginning; the last may be torn.
    return [record for line in lines[1 if start else 0 :] if line and (record := jsonl.loads(line)) is not None]


def head_records(path: Path, size: int = 16 * 1024) -> list[dict[str, Any]]:
    """The records in the first ``size`` bytes of a JSON-lines file; none if it is not there."""
    try:
        with path.open("rb") as file:
            lines = file.read(size).split(b"\n")[:-1]
    except OSError:
        return []
    return [record for line in lines if (record := jsonl.loads(line)) is not None]


def find_event(records: list[dict[str, Any]], event: str) -> dict[str, Any] | None:
    """The last record of that event."""
    return next((r for r in reversed(records) if r.get("event") == event), None)


def outcomes(run: RunDir, attempt: int, nproc: int) -> dict[int, str | None]:
    """Each rank's own outcome, as its last ``end`` event says; None for a rank that wrote none."""
    found: dict[int, str | None] = {}
    for rank in range(nproc):
        end = find_event(tail_records(run.rank_log(attempt, rank)), "end")
        found[rank] = str(end["outcome"]) if end and "outcome" in end else None
    return found


def latest(run: RunDir, attempt: int, nproc: int) -> dict[str, Any]:
    """Where the training stands: the newest step and epoch, each rank's loss, the last validation.

    Returns:
        ``{"step", "epoch", "loss": {rank: loss}, "val_loss", "val_accuracy"}``, None where unknown.
    """
    result: dict[str, Any] = {"step": None, "epoch": None, "loss": {}, "val_loss": None, "val_accuracy": None}
    for rank in range(nproc):
        path = run.rank_log(attempt, rank)
        records = tail_records(path)
        metric = next((r for r in reversed(records) if "event" not in r and "loss" in r), None)
        if metric is not None:
            result["loss"][rank] = jsonl.number(metric["loss"])
            step, epoch = jsonl.number(metric.get("step")), jsonl.number(metric.get("epoch"))
            if step is not None and step > (result["step"] or 0):
                result["step"] = int(step)
                result["epoch"] = int(epoch) if epoch is not None else None
        if rank == 0:
            validation = next((r for r in reversed(records) if "val_loss" in r), None)
            if validation is None and metric is not None and _size(path) > _TAIL:
                deep = tail_records(path, _DEEP_TAIL)
                validation = next((r for r in reversed(deep) if "val_loss" in r), None)
            if validation is not None:
                result["val_loss"] = jsonl.number(validation.get("val_loss"))
                result["val_accuracy"] = jsonl.number(validation.get("val_accuracy"))
    return result


def figures(latest: Mapping[str, Any]) -> dict[str, float | None]:
    """What :func:`latest` found in three numbers: the mean of the ranks' losses and the last validation.

    Returns:
        ``{"loss", "val_loss", "val_accuracy"}``, None where unknown; the loss is a mean over ranks.
    """
    losses = [loss for loss in latest["loss"].values() if loss is not None]
    mean = sum(losses) / len(losses) if losses else None
    return {"loss": mean, "val_loss": latest["val_loss"], "val_accuracy": latest["val_accuracy"]}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def find_failure(run: RunDir, attempt: int, nproc: int, exit_code: int | None) -> dict[str, Any]:
    """Say which rank failed first and why, and which only went down with it.

    Returns:
        ``{"rank", "kind", "message", "traceback", "victims": [rank, …]}``; kind is ``exception``,
        ``signal``, ``exit`` or ``agent`` (torchrun itself, ``rank`` None).
    """
    causes = [cause for rank in range(nproc) if (cause := _cause_of_rank(run, attempt, rank)) is not None]
    known = {cause["rank"] for cause in causes}
    for rank, exit_status in _table(run).items():
        if rank not in known and rank < nproc:
            causes.append(_cause_of_exit(run, attempt, rank, exit_status))
    if not causes:
        tail = _text_tail(run.agent_log)
        last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
        said = f": {last.strip()}" if last else ""
        killed = exit_code is not None and exit_code < 0
        return {
            "rank": None,
            "kind": "agent",
            "message": f"torchrun itself was ended by {exit_words(exit_code)}; the ranks it left behind were stopped"
            if killed
            else f"torchrun ended with {exit_words(exit_code)} and no rank said why{said}",
            "traceback": tail or None,
            "victims": [],
        }
    # A rank that lost its peer reports at once, the agent sees the peer's own death up to a
    # monitoring interval later: so the cause decides first, the time only among equals.
    first = min(causes, key=lambda c: (c["victim"], c["ts"]))
    return {
        "rank": first["rank"],
        "kind": first["kind"],
        "message": first["message"],
        "traceback": first["traceback"],
        "victims": sorted(c["rank"] for c in causes if c is not first),
    }


def _cause_of_rank(run: RunDir, attempt: int, rank: int) -> dict[str, Any] | None:
    """A rank's own account: its ``end`` event, or the error file torchrun's ``record`` wrote."""
    end = find_event(tail_records(run.rank_log(attempt, rank)), "end")
    message, traceback, ts = None, None, None
    if end is not None and end.get("outcome") == "failed":
        message, ts = str(end.get("message") or "failed"), jsonl.number(end.get("ts"))
    path = run.output_file(attempt, rank, "error.json")
    if path is not None:
        try:
            document = orjson.loads(path.read_bytes())["message"]
            extra = document["extraInfo"] if isinstance(document, dict) else {}
            traceback = extra.get("py_callstack")
            message = message or (document["message"] if isinstance(document, dict) else str(document))
            ts = ts or float(extra.get("timestamp") or path.stat().st_mtime)
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
    if message is None:
        return None
    return {
        "rank": rank,
        "kind": "exception",
        "message": message,
        "traceback": traceback or _text_tail(run.output_file(attempt, rank, "stderr.log")) or None,
        "ts": ts or 0.0,
        "victim": bool(_VICTIM.search(message)),
    }


def _cause_of_exit(run: RunDir, attempt: int, rank: int, exit_status: int) -> dict[str, Any]:
    stderr = _text_tail(run.output_file(attempt, rank, "stderr.log"))
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    said = f"; its last words: {last}" if last and exit_status > 0 else ""
    return {
        "rank": rank,
        "kind": "signal" if exit_status < 0 else "exit",
        "message": f"rank {rank} ended with {exit_words(exit_status)}{said}",
        "traceback": stderr or None,
        "ts": float("inf"),  # torchrun's time is when it looked, not when it happened
        # SIGTERM is what torchrun sends to the others once one has failed.
        "victim": exit_status == -signal.SIGTERM,
    }


def _table(run: RunDir) -> dict[int, int]:
    """Exit codes by rank from torchrun's closing table, of its last attempt only."""
    text = _text_tail(run.agent_log)
    start = text.rfind("FAILED\n")
    return {int(m["rank"]): int(m["exitcode"]) for m in _TABLE_ROW.finditer(text[max(start, 0) :])}


def _text_tail(path: Path | None, size: int = 16 * 1024) -> str:
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def exit_words(exit_code: int | None) -> str:
    """An exit code in words: ``exit code 3``, ``SIGKILL (signal 9)``."""
    if exit_code is None:
        return "an unknown exit code"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
    hint = ", out of memory?" if name == "SIGKILL" else ""
    return f"{name} (signal {-exit_code}{hint})"
