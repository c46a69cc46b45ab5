"""The states of a run, which may follow which, and the file that holds the present one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from ddp_core.errors import UserError
from ddp_core.telemetry import jsonl

SCHEMA_VERSION = 1


class RunStatus(StrEnum):
    """Where a run stands. Only its supervisor moves it on."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        """True when nothing of the run is alive any more, and nothing will come unless somebody resumes it."""
        return self in _ENDED


TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.QUEUED: frozenset({RunStatus.STARTING, RunStatus.STOPPING, RunStatus.FAILED, RunStatus.LOST}),
    RunStatus.STARTING: frozenset(
        {RunStatus.RUNNING, RunStatus.STOPPING, RunStatus.FINISHED, RunStatus.FAILED, RunStatus.LOST}
    ),
    RunStatus.RUNNING: frozenset({RunStatus.STOPPING, RunStatus.FINISHED, RunStatus.FAILED, RunStatus.LOST}),
    # Finished: it was done before the stop reached it.
    RunStatus.STOPPING: frozenset({RunStatus.STOPPED, RunStatus.FINISHED, RunStatus.LOST}),
    # Resumed.
    RunStatus.STOPPED: frozenset({RunStatus.QUEUED}),
    RunStatus.FINISHED: frozenset({RunStatus.QUEUED}),
    RunStatus.FAILED: frozenset({RunStatus.QUEUED}),
    RunStatus.LOST: frozenset({RunStatus.QUEUED}),
}
_ENDED = frozenset({RunStatus.STOPPED, RunStatus.FINISHED, RunStatus.FAILED, RunStatus.LOST})


class ProcessId(BaseModel):
    """A process that cannot be mistaken for a later one that got its number.

    Attributes:
        pid: The process id.
        create_time: When it started, in seconds after the boot: setting the clock changes nothing.
        boot_id: The boot it belongs to, from ``/proc/sys/kernel/random/boot_id``.
    """

    model_config = ConfigDict(frozen=True)

    pid: int
    create_time: float
    boot_id: str


class RunState(BaseModel):
    """What ``state.json`` holds. Later versions may add fields; those are ignored here.

    Attributes:
        attempt: Counts from 0 on over every restart by torchrun and every resume.
        attempt_base: The attempt that the present torchrun began with: 0 until the run is resumed.
        resume_from: The checkpoint that a resume asked for; None for the newest whole one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = SCHEMA_VERSION
    id: str
    state: RunStatus = RunStatus.QUEUED
    since: float
    created: float
    stage: str = ""
    reason: str | None = None
    attempt: int = 0
    attempt_base: int = 0
    resume_from: str | None = None
    joined: int = 0
    nproc_per_node: int
    mark: str
    gpus: tuple[str, ...] = ()
    supervisor: ProcessId | None = None
    agent: ProcessId | None = None
    ranks: dict[int, ProcessId] = {}
    exit_code: int | None = None
    heartbeat: float | None = None
    started: float | None = None
    ended: float | None = None
    final: dict[str, float | str | None] | None = None
    step: int | None = None
    epoch: int | None = None
    failure: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None


def read_state(path: Path) -> RunState:
    """Read ``state.json``; UserError if it is missing or damaged."""
    try:
        return RunState.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        raise UserError(f"{path.parent.name} has no state file; was its launch interrupted?") from None
    except OSError as error:
        raise UserError(f"the state file of {path.parent.name} cannot be read: {error.strerror}") from None
    except (orjson.JSONDecodeError, ValidationError):
        raise UserError(
            f"the state file of {path.parent.name} is damaged ({path}); its logs and checkpoints are still there"
        ) from None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a file by a JSON document in one step, so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(jsonl.dumps(document))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_state(path: Path, state: RunState) -> None:
    """Replace ``state.json`` in one step; where the disk is full, write over what it holds already."""
    document = state.model_dump(mode="json")
    try:
        write_json(path, document)
    except OSError as error:
        data = jsonl.dumps(document)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or not path.exists() or path.stat().st_blocks * 512 < len(data):
            raise
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()


def moved(state: RunState, to: RunStatus, **changes: Any) -> RunState:
    """Return the state after a transition.

    Raises:
        ValueError: If the table does not allow it; that is a mistake in this program.
    """
    if to not in TRANSITIONS[state.state]:
        raise ValueError(f"{state.id}: a run cannot go from {state.state} to {to}")
    now = time.time()
    if to.ended:
        changes.setdefault("ended", now)
    return state.model_copy(update={"state": to, "since": now, **changes})
