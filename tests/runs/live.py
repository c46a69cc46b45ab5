"""Helpers for tests that launch real runs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from ddp_core.config import from_dict
from ddp_core.errors import UserError
from ddp_core.runs import RunDir, RunStatus, Store, launch, processes, show, stop
from tests.conftest import wait_for

FAULTS = str(Path(__file__).parents[1] / "faults")


def start(
    store: Store, *, nproc: int = 2, epochs: int = 100_000, fault: str = "", fault_rank: int = 0, **launch_fields: Any
) -> RunDir:
    """Launch a CPU training that lasts until it is stopped, with a fault in one rank if one is named."""
    env = {"PYTHONPATH": FAULTS, "FAULT": fault, "FAULT_RANK": str(fault_rank)} if fault else {}
    fields = {"nproc_per_node": nproc, "device": "cpu", "env": env, **launch_fields}
    return launch(from_dict({"launch": fields, "training": {"epochs": epochs}}), store)


def training(run: RunDir) -> dict[str, Any]:
    """Wait until the run has taken a step on every rank; its show document."""

    def steps() -> dict[str, Any] | None:
        document = show(run)
        assert document["state"] in ("queued", "starting", "running"), document
        return document if (document["step"] or 0) > 2 and document["joined"] == document["nproc_per_node"] else None

    return wait_for(steps, f"{run.id} trains", 90)


def ended(run: RunDir, timeout: float = 60) -> dict[str, Any]:
    """Wait until the run has ended; its show document."""
    wait_for(lambda: RunStatus(show(run)["state"]).ended, f"{run.id} ends", timeout)
    return show(run)


def marked(run: RunDir) -> list[int]:
    """Living processes that carry the run's mark."""
    return processes.marked(run.state().mark)


def cleared(store: Store) -> None:
    """End whatever a failed test has left."""
    for run in store.runs():
        with contextlib.suppress(UserError):  # a directory that a test has damaged on purpose
            stop(run, 0, wait=True)


def kill(pid: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one process."""
    os.kill(pid, signum)
