"""What each step says in the rank log, measured without making a GPU wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ddp_core.telemetry.rank_log import RankLog

PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""The parts of a step, each ended by a call of :meth:`StepLog.mark` in this order."""


@dataclass
class _Step:
    """A step whose numbers may still be on their way from the GPU."""

    step: int
    values: dict[str, float]
    samples: int
    results: torch.Tensor
    times: list[Any]


class StepLog:
    """Times the parts of each step and logs them with its loss and accuracy.

    On CUDA, times are events on the stream and the loss is copied to pinned memory; both are read
    one step later, when the next step is enqueued, by waiting for the end of *that* step. ``loss.item()``
    would wait for everything enqueued so far and leave the GPU idle.

    Args:
        log: This rank's log.
        device: This rank's device.
    """

    def __init__(self, log: RankLog, device: torch.device) -> None:
        self._log = log
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._times: list[Any] = []
        self._waiting: _Step | None = None

    def begin(self) -> None:
        """Start the clock, before an epoch's first batch is asked for."""
        self._times = [self._now()]

    def mark(self) -> None:
        """End a part of the step."""
        self._times.append(self._now())

    def end(self, step: int, loss: torch.Tensor, correct: torch.Tensor, samples: int, *, epoch: int, lr: float) -> None:
        """End the step, log it (on CUDA, the one before it) and start the clock of the next.

        Args:
            step: The optimizer step, counted from 1.
            loss: This rank's mean loss, a scalar on the device.
            correct: How many of the samples this rank got right, a scalar on the device.
            samples: This rank's samples in the step.
            epoch: The epoch, counted from 1.
            lr: The learning rate of the step.
        """
        results = torch.stack((loss.detach().float(), correct.float()))
        if self._on_cuda:
            results = torch.empty(2, pin_memory=True).copy_(results, non_blocking=True)
        self.mark()
        before = self._waiting
        self._waiting = _Step(step, {"epoch": epoch, "lr": lr}, samples, results, self._times)
        self._times = [self._times[-1]]
        if self._on_cuda:
            self._write(before)
        else:
            self.flush()

    def flush(self) -> None:
        """Log the step that is still waiting for its numbers."""
        waiting, self._waiting = self._waiting, None
        self._write(waiting)

    def _write(self, done: _Step | None) -> None:
        if done is None:
            return
        if self._on_cuda:
            done.times[-1].synchronize()
            done.values["memory_allocated"] = torch.cuda.memory_allocated(self._device)
            done.values["memory_reserved"] = torch.cuda.memory_reserved(self._device)
        loss, correct = done.results.tolist()
        self._log.log(
            done.step,
            loss=loss,
            accuracy=correct / done.samples,
            samples_per_s=done.samples / self._between(done.times[0], done.times[-1]),
            **{part: self._between(a, b) for part, a, b in zip(PARTS, done.times, done.times[1:], strict=False)},
            **done.values,
        )

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b) / 1000 if self._on_cuda else b - a)
