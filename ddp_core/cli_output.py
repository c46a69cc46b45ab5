"""How the ``ddp`` command prints: tables for people, JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_core import runs
from ddp_core.runs import RunDir
from ddp_core.telemetry import jsonl
from ddp_core.telemetry.follower import LineFollower

_CONSOLE = Console(highlight=False, soft_wrap=True)
_STREAMS = ("stdout", "stderr")


def json_line(document: Any) -> None:
    """Print one JSON document on one line."""
    # The writer takes objects; a list goes through it as the value of one.
    text = jsonl.dumps({"": document}).decode()
    print(text[text.index(":") + 1 : text.rindex("}")], flush=True)


def say(text: str) -> None:
    """Print a line as it is: what a run wrote must not be taken for markup."""
    print(text, flush=True)


def progress(line: dict[str, Any]) -> None:
    """Print one line of ``--follow``."""
    parts = [line["state"]]
    if line.get("step") is not None:
        losses = "  ".join(f"{rank}: {_number(loss)}" for rank, loss in line["loss"].items())
        parts.append(f"epoch {line['epoch']}  step {line['step']}  loss by rank {losses}")
    say("  ".join(parts))


def run_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the list of runs."""
    if not rows:
        say("no runs yet")
        return
    table = Table("run", "state", "created", "duration", "loss", "accuracy", "GPUs", box=None, pad_edge=False)
    for row in rows:
        created = datetime.fromtimestamp(row["created"]).strftime("%Y-%m-%d %H:%M:%S")
        final = row["final"]
        table.add_row(
            row["id"],
            row["state"],
            created,
            _seconds(row["duration_s"]),
            _number(final["loss"]),
            _percent(final["val_accuracy"]),
            str(len(row["gpus"])) if row["gpus"] else "CPU",
        )
    _say_table(table)


def run_details(document: dict[str, Any]) -> None:
    """Print the show document for people."""
    final, failure = document["final"], document["failure"]
    facts = {
        "run": document["id"],
        "state": document["state"] + (f" ({document['reason']})" if document["reason"] else ""),
        "stage": document["stage"],
        "progress": f"epoch {document['epoch']}, step {document['step']} of {document['steps_total']}"
        if document["step"] is not None
        else "",
        "final": f"loss {_number(final['loss'])}, validation accuracy {_percent(final['val_accuracy'])}"
        if final["loss"] is not None
        else "",
        "duration": _seconds(document["duration_s"]),
        "ranks": str(document["nproc_per_node"] or ""),
        "GPUs": ", ".join(document["gpus"]),
        "checkpoints": ", ".join(c["path"].rpartition("/")[2] for c in document["checkpoints"]),
        "directory": document["dir"],
    }
    for name, value in facts.items():
        if value:
            say(f"{name:<12}{value}")
    if failure is not None:
        victims = ", ".join(str(rank) for rank in failure["victims"])
        who = f"rank {failure['rank']}: " if failure["rank"] is not None else ""
        say(f"{'failed':<12}{who}{failure['message']}" + (f" (victims: {victims})" if victims else ""))
        if failure["traceback"]:
            say("")
            say(failure["traceback"].rstrip())


def gpu_table(document: dict[str, Any]) -> None:
    """Print every GPU of the machine."""
    if document["error"]:
        say(f"no GPU: {document['error']}")
        return
    table = Table("GPU", "name", "busy", "memory", "power", "temp.", "used by", box=None, pad_edge=False)
    for gpu in document["gpus"]:
        others = ", ".join(f"pid {process['pid']}" for process in gpu["processes"])
        table.add_row(
            str(gpu["index"]),
            gpu["name"],
            "lost" if gpu["status"] == "lost" else _unit(gpu["busy"], " %"),
            f"{_gib(gpu['memory_used'])} / {_gib(gpu['memory_total'])} GiB",
            _unit(gpu["power_w"], " W"),
            _unit(gpu["temperature_c"], " °C"),
            gpu["run"] or others or "free",
        )
    say(f"driver {document['driver']}")
    _say_table(table)


def _say_table(table: Table) -> None:
    # Not printed by rich, which leaves with 1 when the reader, such as head, has seen enough.
    with _CONSOLE.capture() as capture:
        _CONSOLE.print(table)
    say(capture.get().rstrip("\n"))


def log_lines(run: RunDir, ranks: Sequence[int], follow: bool) -> Iterator[tuple[int, str, str]]:
    """Yield ``(rank, stream, line)`` of the latest attempt, and with ``follow`` what comes until the run ends."""
    followers: dict[tuple[int, int, str], LineFollower] = {}
    while True:
        state = runs.ensure_supervised(run)
        for rank in ranks:
            for stream in _STREAMS:
                key = (state.attempt, rank, stream)
                if key not in followers and (path := run.output_file(state.attempt, rank, f"{stream}.log")):
                    followers[key] = LineFollower(path)
        # Those of an earlier attempt too: their last words may come after the next one has begun.
        for (_, rank, stream), follower in followers.items():
            while lines := follower.poll():
                for line in lines:
                    yield rank, stream, _last_shown(line)
        if not follow or state.state.ended:
            for (_, rank, stream), follower in followers.items():
                if follower.rest:
                    yield rank, stream, _last_shown(follower.rest)
            return
        time.sleep(0.2)


def _last_shown(line: bytes) -> str:
    """Of a progress bar that redraws itself only the last state is a line."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _number(value: Any) -> str:
    found = jsonl.number(value)
    return "–" if found is None else f"{found:.4g}"


def _percent(value: Any) -> str:
    found = jsonl.number(value)
    return "–" if found is None else f"{100 * found:.2f} %"


def _unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.0f}{unit}"


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
