"""The learning rate: scaled to the effective batch, and how it goes over the epochs."""

from __future__ import annotations

import math

import torch

from ddp_core.config import RunConfig, TrainingConfig


def scaled_lr(config: RunConfig, world_size: int) -> float:
    """Scale the config's learning rate to the samples of one optimizer step.

    Sources of the rules: linear, Goyal et al., 2017, "Accurate, Large Minibatch SGD"; sqrt, Krizhevsky, 2014, "One
    weird trick for parallelizing convolutional neural networks".

    Args:
        config: The config; ``training.lr`` is for a batch of ``training.lr_batch`` samples.
        world_size: Number of ranks.
    """
    t = config.training
    reference = t.batch_size if t.lr_batch == "auto" else t.lr_batch
    ratio = t.batch_size * t.accumulation * world_size / reference
    return t.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[t.lr_scaling]


def lr_factor(t: TrainingConfig, epochs: float) -> float:
    """What the learning rate is multiplied by when so many epochs, a fraction included, have been trained."""
    if epochs < t.warmup_epochs:
        return epochs / t.warmup_epochs
    match t.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * (epochs - t.warmup_epochs) / (t.epochs - t.warmup_epochs)))
        case "step":
            return t.step_factor ** int(epochs / t.step_epochs)
    return 1.0


class Schedule:
    """Sets the optimizer's learning rate for each step, by how much of the data has been seen.

    It depends on nothing else, so a run that goes on with another number of ranks, and thus other
    steps, goes on with the same rate. A step counts as being at its middle: the first one of a warm-up
    is not lost to a rate of 0, nor the last one of a cosine.

    Args:
        optimizer: Its learning rate is set.
        t: The schedule's options.
        lr: The learning rate at a factor of 1.
        samples: Training samples of an epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, t: TrainingConfig, lr: float, samples: int) -> None:
        self._optimizer, self._t, self._lr, self._samples = optimizer, t, lr, samples
        self._epochs = 0.0

    def set(self, epoch: int, consumed: int, batch: int) -> float:
        """Set the rate of one step.

        Args:
            epoch: The epoch, counted from 1.
            consumed: Samples of this epoch that all ranks have had before the step.
            batch: Samples that all ranks have in the step.

        Returns:
            The learning rate.
        """
        self._epochs = epoch - 1 + min(1.0, (consumed + batch / 2) / self._samples)
        lr = self._lr * lr_factor(self._t, min(self._epochs, self._t.epochs))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def state_dict(self) -> dict[str, float]:
        """Where the schedule is."""
        return {"epochs": self._epochs, "lr": self._lr}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take it up again: the next step sets the rate by its own position."""
        self._epochs = state["epochs"]
