"""What each step says in the rank log, measured without making a GPU wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ddp_core.telemetry.rank_log import RankLog

PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")
"""The parts of a step; with accumulation each is the sum over the step's batches."""


@dataclass
class _Step:
    """A step whose numbers may still be on their way from the GPU."""

    step: int
    values: dict[str, float]
    samples: int
    results: torch.Tensor
    began: Any
    ended: Any
    parts: list[tuple[str, Any, Any]]
    measured: bool


class StepLog:
    """Times the parts of each step and logs them with its loss, accuracy and gradient norm.

    On CUDA, times are events on the stream and the numbers are copied to pinned memory; both are read
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
        self._began = self._last = self._now()
        self._parts: list[tuple[str, Any, Any]] = []
        self._loss = self._correct = torch.zeros((), device=device)
        self._waiting: _Step | None = None

    def begin(self) -> None:
        """Start the clock, before an epoch's first batch is asked for."""
        self._began = self._last = self._now()
        self._reset()

    def mark(self, part: str) -> None:
        """End a part of the step, one of :data:`PARTS`."""
        now = self._now()
        self._parts.append((part, self._last, now))
        self._last = now

    def add(self, loss: torch.Tensor, share: float, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take in one batch of the step: its mean loss weighed by its share, and how many were right."""
        self._loss = self._loss + loss.detach().float() * share
        self._correct = self._correct + (logits.detach().argmax(1) == labels).sum()

    def end(
        self, step: int, samples: int, norm: torch.Tensor, own_norm: torch.Tensor | None, **values: float
    ) -> dict[str, float] | None:
        """End the step, log it (on CUDA, the one before it) and start the clock of the next.

        Args:
            step: The optimizer step, counted from 1.
            samples: This rank's samples in the step.
            norm: Norm of the averaged gradient, a scalar on the device.
            own_norm: Norm of this rank's gradient before averaging, or None if it was not measured.
            **values: What else to log, such as the epoch and the learning rate.

        Returns:
            The numbers of the step that was logged, or None.
        """
        results = torch.stack((self._loss, self._correct.float(), norm.float(), norm if own_norm is None else own_norm))
        if self._on_cuda:
            results = torch.empty(4, pin_memory=True).copy_(results, non_blocking=True)
        self._last = self._now()
        done = _Step(step, values, samples, results, self._began, self._last, self._parts, own_norm is not None)
        self._began = self._last
        self._reset()
        if not self._on_cuda:
            return self._write(done)
        before, self._waiting = self._waiting, done
        return self._write(before)

    def flush(self) -> dict[str, float] | None:
        """Log the step that is still waiting for its numbers; like :meth:`end`."""
        waiting, self._waiting = self._waiting, None
        return self._write(waiting)

    def _reset(self) -> None:
        self._parts = []
        self._loss = self._correct = torch.zeros((), device=self._device)

    def _write(self, done: _Step | None) -> dict[str, float] | None:
        if done is None:
            return None
        values = dict(done.values)
        if self._on_cuda:
            done.ended.synchronize()
            values["memory_allocated"] = torch.cuda.memory_allocated(self._device)
            values["memory_reserved"] = torch.cuda.memory_reserved(self._device)
            values["memory_peak"] = torch.cuda.max_memory_allocated(self._device)
        loss, correct, norm, own_norm = done.results.tolist()
        parts = dict.fromkeys(PARTS, 0.0)
        for part, begin, end in done.parts:
            parts[part] += self._between(begin, end)
        if done.measured:
            values["rank_grad_norm"] = own_norm
        values = {
            "loss": loss,
            "accuracy": correct / done.samples,
            "grad_norm": norm,
            "samples_per_s": done.samples / self._between(done.began, done.ended),
            **parts,
            **values,
        }
        self._log.log(done.step, **values)
        return {"step": done.step, **values}

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b) / 1000 if self._on_cuda else b - a)
