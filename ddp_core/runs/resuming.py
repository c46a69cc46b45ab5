"""Continuing a run that has ended, in its own directory, from one of its checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.errors import UserError
from ddp_core.runs import evidence, processes
from ddp_core.runs.actions import ensure_supervised, start_supervisor
from ddp_core.runs.preflight import preflight
from ddp_core.runs.state import RunState, RunStatus, moved, write_state
from ddp_core.runs.store import RunDir, Store

_SUPERVISOR_ENDS_S = 10.0


def resume(run: RunDir, store: Store, *, from_checkpoint: str | None = None) -> None:
    """Start an ended run again as its next attempt; what it has logged and saved stays.

    Args:
        run: The run.
        store: The store it is in.
        from_checkpoint: A checkpoint of this run by its name (``model_epoch3.pth``, ``latest``,
            ``best``), or the path of any; default: the newest whole one of this run. Newer ones of
            this run are then moved to its folder ``superseded``.

    Raises:
        UserError: If the run has not ended or has nothing left to do, if there is no such
            checkpoint, or if the run cannot work on this machine any more.
    """
    with store.locked():
        state = ensure_supervised(run)
        _check(run, state, asked=from_checkpoint is not None)
        checkpoint = _find(run, from_checkpoint) if from_checkpoint is not None else None
        if checkpoint is None and not any(zipfile.is_zipfile(file.path) for file in checkpoint_files(run.path)):
            raise UserError(f"{run.id} has no whole checkpoint to continue from; launch it again instead")
        _check_machine(run)
        base = max([state.attempt, *run.attempts()]) + 1
        # Nothing of the past attempt's end may be taken for the next one's; its words stay in events.jsonl.
        fresh = RunState(
            id=state.id,
            since=state.since,
            created=state.created,
            nproc_per_node=state.nproc_per_node,
            mark=state.mark,
            state=state.state,
        )
        changes = {
            "attempt": base,
            "attempt_base": base,
            "resume_from": str(checkpoint) if checkpoint is not None else None,
            "stage": "starting the supervisor",
        }
        try:
            with _supervisor_gone(run):
                run.stop_file.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    run.agent_log.replace(run.path / f"agent_before_attempt_{base}.log")
                write_state(run.state_file, moved(fresh, RunStatus.QUEUED, **changes))
            start_supervisor(run)
        except OSError as error:
            raise UserError(f"{run.id} cannot be resumed, its directory cannot be written: {error.strerror}") from None


def _check(run: RunDir, state: RunState, *, asked: bool) -> None:
    if not state.state.ended:
        raise UserError(f"{run.id} is {state.state}; only a run that has ended can be resumed")
    if left := processes.marked(state.mark):
        raise UserError(f"{run.id} has ended, but its process {left[0]} is still alive; end it first")
    if state.state is RunStatus.FINISHED and not asked:
        end = evidence.find_event(evidence.tail_records(run.rank_log(state.attempt, 0)), "end") or {}
        if not end.get("reason"):  # otherwise it was ended early, by its time limit for instance
            raise UserError(
                f"{run.id} has trained all its epochs; choose an earlier checkpoint with --from, or launch "
                "a new run with more epochs and checkpoints.resume_from"
            )


def _check_machine(run: RunDir) -> None:
    config = run.config()
    # What the first attempt began from matters no more, and may be gone.
    continued = config.model_copy(update={"checkpoints": config.checkpoints.model_copy(update={"resume_from": None})})
    for finding in preflight(continued):
        if finding["level"] == "error":
            raise UserError(finding["message"], field=finding["field"])


def _find(run: RunDir, asked: str) -> Path:
    # os.path takes whatever was typed: a name that is too long is no file, and nothing is raised.
    found = [path for path in (str(run.path / asked), os.path.expanduser(asked)) if os.path.isfile(path)]  # noqa: PTH111, PTH113
    if not found:
        names = [file.path.name for file in checkpoint_files(run.path)]
        there = f"the newest it has are {', '.join(names[-3:])}" if names else "it has none"
        raise UserError(f"{run.id} has no checkpoint {asked}, and there is no such file; {there}")
    path = Path(found[0]).resolve()
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a whole checkpoint: it is cut off, or another kind of file")
    return path


@contextlib.contextmanager
def _supervisor_gone(run: RunDir) -> Iterator[None]:
    """Hold the supervisor's lock: the one that recorded the end lives on for a moment, and then none comes between."""
    lock = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + _SUPERVISOR_ENDS_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"the supervisor of {run.id} has not ended yet; try again in a moment") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)
