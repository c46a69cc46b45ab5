"""The documents ``ddp --json`` prints and the dashboard shows: ``show`` and ``ls``."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.errors import UserError
from ddp_core.runs import evidence
from ddp_core.runs.actions import ensure_supervised
from ddp_core.runs.command import torchrun_command
from ddp_core.runs.state import RunState, RunStatus
from ddp_core.runs.store import RunDir, Store

NOTHING: dict[str, float | str | None] = {"loss": None, "val_loss": None, "val_accuracy": None}


def show(run: RunDir) -> dict[str, Any]:
    """Everything known about a run at this moment, the ``show`` document.

    A run whose state file is damaged is shown as lost, with what is wrong in ``problem``.
    """
    try:
        state = ensure_supervised(run)
    except UserError as error:
        return _unreadable(run, str(error))
    nproc = state.nproc_per_node
    joined = evidence.find_event(evidence.head_records(run.rank_log(state.attempt, 0)), "joined") or {}
    if state.state.ended:
        last: dict[str, Any] = {"step": state.step, "epoch": state.epoch}
        final = state.final
    else:
        last = evidence.latest(run, state.attempt, nproc)
        final = None
    return {
        "id": run.id,
        "name": run.id.rpartition("-")[0],
        "state": str(state.state),
        "since": state.since,
        "created": state.created,
        "started": state.started,
        "ended": state.ended,
        "duration_s": duration(state),
        "reason": state.reason,
        "stage": state.stage,
        "attempt": state.attempt,
        "dir": str(run.path),
        "host": socket.gethostname(),
        "pids": {
            "supervisor": state.supervisor.pid if state.supervisor else None,
            "agent": state.agent.pid if state.agent else None,
            "ranks": {str(rank): process.pid for rank, process in sorted(state.ranks.items())},
        },
        "gpus": list(state.gpus),
        "nproc_per_node": nproc,
        "joined": state.joined,
        "step": last["step"],
        "steps_total": joined.get("steps_total"),
        "steps_per_epoch": joined.get("steps_per_epoch"),
        "epoch": last["epoch"],
        "epochs": joined.get("epochs"),
        "final": final or NOTHING,
        "checkpoints": checkpoints(run, state.attempt),
        "failure": state.failure,
        "stop": state.stop,
        "command": _command(run, state.attempt_base),
        "exit_code": state.exit_code,
        "problem": None,
    }


def ls(store: Store) -> list[dict[str, Any]]:
    """All runs of a store, newest first, the ``ls`` document."""
    rows = []
    for run in store.runs():
        try:
            state = ensure_supervised(run)
        except UserError as error:
            rows.append({**_summary_of_nothing(run), "reason": str(error), "problem": str(error)})
            continue
        rows.append(
            {
                "id": run.id,
                "name": run.id.rpartition("-")[0],
                "state": str(state.state),
                "since": state.since,
                "created": state.created,
                "final": state.final or NOTHING,
                "latest": state.final if state.state.ended else _figures_now(run, state),
                "gpus": list(state.gpus),
                "duration_s": duration(state),
                "started": state.started,
                "ended": state.ended,
                "stage": state.stage,
                "reason": state.reason,
                "nproc_per_node": state.nproc_per_node,
                "problem": None,
            }
        )
    return sorted(rows, key=lambda row: (row["created"], row["id"]), reverse=True)


def _figures_now(run: RunDir, state: RunState) -> dict[str, float | None] | None:
    if state.state is RunStatus.QUEUED:
        return None
    return evidence.figures(evidence.latest(run, state.attempt, state.nproc_per_node))


def duration(state: RunState) -> float | None:
    """Seconds from torchrun's start to the run's end, or to now; None while it has not started."""
    if state.started is None:
        return None
    return (state.ended or time.time()) - state.started


def checkpoints(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """The checkpoints that are there, oldest first: ``{"path", "epoch", "step", "size"}`` (bytes)."""
    steps = {
        Path(str(record.get("path"))).name: record.get("step")
        for tried in range(attempt + 1)
        for record in evidence.tail_records(run.rank_log(tried, 0), 1 << 20)
        if record.get("event") == "checkpoint"
    }
    found = []
    for epoch, mid_step, path in checkpoint_files(run.path):
        step = mid_step if mid_step is not None else steps.get(path.name)
        try:
            found.append({"path": str(path), "epoch": epoch, "step": step, "size": path.stat().st_size})
        except OSError:
            continue  # rotated away while we looked
    return found


def _command(run: RunDir, attempt_base: int = 0) -> list[str] | None:
    try:
        return torchrun_command(run.config(), run.path, attempt_base)
    except UserError:
        return None


def _summary_of_nothing(run: RunDir) -> dict[str, Any]:
    created = run.path.stat().st_mtime
    return {
        "id": run.id,
        "name": run.id.rpartition("-")[0],
        "state": str(RunStatus.LOST),
        "since": created,
        "created": created,
        "started": None,
        "ended": None,
        "duration_s": None,
        "stage": "",
        "final": NOTHING,
        "latest": None,
        "gpus": [],
        "nproc_per_node": None,
    }


def _unreadable(run: RunDir, problem: str) -> dict[str, Any]:
    return {
        **_summary_of_nothing(run),
        "reason": problem,
        "problem": problem,
        "attempt": 0,
        "dir": str(run.path),
        "host": socket.gethostname(),
        "pids": {"supervisor": None, "agent": None, "ranks": {}},
        "joined": 0,
        "step": None,
        "steps_total": None,
        "steps_per_epoch": None,
        "epoch": None,
        "epochs": None,
        "checkpoints": checkpoints(run, max(run.attempts(), default=0)),
        "failure": None,
        "stop": None,
        "command": _command(run),
        "exit_code": None,
    }
