"""What a supervisor writes down: the state, the events, a hardware sample a second."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from ddp_core.runs import gpus
from ddp_core.runs.state import RunState, RunStatus, moved, write_state
from ddp_core.runs.store import RunDir
from ddp_core.telemetry import jsonl
from ddp_core.telemetry.host import HostSampler

HEARTBEAT_S = 5.0


class Recorder:
    """The only writer of a run's ``state.json``, ``events.jsonl`` and ``hardware.jsonl``.

    A full disk or a vanished folder must not end the training, so a failed write is said once in
    the supervisor's own log and tried again with the next change.

    Args:
        run: The run's directory.
        state: The state to start from.
    """

    def __init__(self, run: RunDir, state: RunState) -> None:
        self.run = run
        self.state = state
        self._host = HostSampler(run.path)
        self._written = 0.0
        self._failing = False

    def update(self, **changes: Any) -> None:
        """Change fields of the state without a transition."""
        self.state = self.state.model_copy(update=changes)
        self._write_state()

    def move(self, to: RunStatus, **changes: Any) -> None:
        """Make a transition and record it as an event."""
        self.state = moved(self.state, to, **changes)
        self._write_state()
        reason = f": {self.state.reason}" if self.state.reason else ""
        self.event("state", f"{to}{reason}", state=str(to))

    def stage(self, words: str) -> None:
        """Say what the run is doing within its state."""
        if words != self.state.stage:
            self.update(stage=words)
            self.event("stage", words)

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append one event."""
        self._append("events.jsonl", {"ts": time.time(), "event": name, "message": message, **fields})

    def heartbeat(self) -> None:
        """Show that the supervisor lives."""
        if time.monotonic() - self._written > HEARTBEAT_S:
            self._write_state()

    def sample(self) -> None:
        """Append one sample of the run's GPUs, the host and the ranks' processes."""
        held = set(self.state.gpus)
        record: dict[str, Any] = {"ts": time.time(), "gpus": [], "driver_error": None}
        if held:
            report = gpus.report()
            record["gpus"] = [gpu for gpu in report["gpus"] if gpu["uuid"] in held]
            record["driver_error"] = report["error"]
        record.update(self._host.sample({rank: process.pid for rank, process in self.state.ranks.items()}))
        self._append("hardware.jsonl", record)

    def _write_state(self) -> None:
        self.state = self.state.model_copy(update={"heartbeat": time.time()})
        self._written = time.monotonic()
        try:
            write_state(self.run.state_file, self.state)
            self._failing = False
        except OSError as error:
            self._complain(error)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        try:
            descriptor = os.open(self.run.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, jsonl.dumps(record))
            finally:
                os.close(descriptor)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failing:
            with contextlib.suppress(OSError):  # that log is on the same disk
                print(f"{self.run.path} cannot be written: {error.strerror}; the training goes on", file=sys.stderr)
        self._failing = True
