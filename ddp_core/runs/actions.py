"""What one can do to a run: launch it, stop it, keep it supervised. Idempotent, from anywhere."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from ddp_core.config import RunConfig, to_yaml
from ddp_core.errors import UserError
from ddp_core.runs import processes
from ddp_core.runs.preflight import preflight
from ddp_core.runs.state import RunState, RunStatus, write_json, write_state
from ddp_core.runs.store import RunDir, Store

_STARTING_S = 10.0  # how long a supervisor that was just started may take to sign in


def launch(config: RunConfig, store: Store, *, intent: str | None = None) -> RunDir:
    """Create a run and start its supervisor, detached from this process.

    Args:
        config: What to launch; its snapshot goes into the run's directory.
        store: Where to.
        intent: A token for one intent of one person. The same token gives the same run, however
            many clicks, reruns or tabs carry it here.

    Raises:
        UserError: If the run cannot work on this machine, or the store cannot be written.
    """
    marker = store.intent_file(intent) if intent is not None else None
    if intent is not None and (earlier := store.launched(intent)) is not None:
        return earlier
    for finding in preflight(config):
        if finding["level"] == "error":
            raise UserError(finding["message"], field=finding["field"])
    with store.locked():
        if intent is not None and (earlier := store.launched(intent)) is not None:
            return earlier
        try:
            run = store.create(config.name)
            try:
                _write_first_files(run, config)
                if marker is not None:
                    marker.parent.mkdir(exist_ok=True)
                    marker.write_text(run.id)
                start_supervisor(run)
            except OSError:
                shutil.rmtree(run.path, ignore_errors=True)  # nothing was launched, so nothing is to be seen
                raise
        except OSError as error:
            raise UserError(f"the store {store.root} cannot be written: {error.strerror}") from None
    return run


def stop(run: RunDir, grace_s: float | None = None, *, wait: bool = False) -> None:
    """Record the intent to stop; the run's supervisor carries it out.

    Stopping a run that has ended does nothing; stopping one that is stopping can only shorten the grace.

    Args:
        run: The run.
        grace_s: Seconds to let it end by itself; default: the run's own ``stop_grace_s``.
        wait: Return only when the run has ended.

    Raises:
        UserError: If the intent cannot be written, or the run's state cannot be read.
    """
    if grace_s is not None and not 0 <= grace_s < math.inf:
        raise UserError(f"the grace must be a number of seconds, not {grace_s:g}")
    state = ensure_supervised(run)
    if state.state.ended:
        return
    if grace_s is not None or not run.stop_file.exists():
        request: dict[str, float] = {"ts": time.time()}
        if grace_s is not None:
            request["grace_s"] = grace_s
        try:
            _write_stop(run, request)
        except OSError as error:
            raise UserError(f"the stop of {run.id} cannot be recorded in {run.path}: {error.strerror}") from None
    while wait and not ensure_supervised(run).state.ended:
        time.sleep(0.05)


def ensure_supervised(run: RunDir) -> RunState:
    """Read a run's state and give an unfinished run a supervisor if its own is dead.

    The new supervisor adopts what is alive, or records that nothing is; a lock in the run's
    directory makes sure that there is only one, whoever else looks at the same time.
    """
    state = run.state()
    if state.state.ended or processes.alive(state.supervisor):
        return state
    # A supervisor that is starting has not signed in yet; the launch, or its lock file, tells when it was started.
    now = time.time()
    begun = state.since if state.state is RunStatus.QUEUED else 0.0
    if any(0 <= now - started < _STARTING_S for started in (begun, _mtime(run.lock_file))):
        return state
    try:
        run.lock_file.touch()
    except OSError:
        return state.model_copy(update={"state": RunStatus.LOST, "reason": "its supervisor is gone"})
    start_supervisor(run)
    return state


def _write_first_files(run: RunDir, config: RunConfig) -> None:
    run.config_file.write_text(to_yaml(config), encoding="utf-8")
    now = time.time()
    state = RunState(
        id=run.id,
        since=now,
        created=now,
        nproc_per_node=config.launch.nproc_per_node,
        mark=uuid.uuid4().hex,
        stage="starting the supervisor",
    )
    write_state(run.state_file, state)


def _write_stop(run: RunDir, request: dict[str, float]) -> None:
    try:
        write_json(run.stop_file, request)
    except OSError:
        # A full disk still takes an empty file, and that is a stop too.
        run.stop_file.touch()


def start_supervisor(run: RunDir) -> None:
    """Start a supervisor for a run, detached from this process; it ends at once if the run has one."""
    with Path(run.path / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "ddp_core.runs.supervisor", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _python_path(), processes.RUN_DIR_VARIABLE: str(run.path)},
        )
    # A dashboard outlives the supervisors it starts and must not keep them as zombies.
    threading.Thread(target=supervisor.wait, name=f"wait for {run.id}", daemon=True).start()


def _python_path() -> str:
    """Let the supervisor and the ranks import this package when it is not installed, only checked out."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    return inherited if root in inherited.split(os.pathsep) else os.pathsep.join(filter(None, [root, inherited]))


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
