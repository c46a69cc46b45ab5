"""How samples reach the ranks: samplers, loaders, and the batches of an optimizer step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from ddp_core.config import TrainingConfig
from ddp_core.split import auto_workers
from ddp_core.training.data import Batch, Data, size_of
from ddp_core.training.distributed import World


class EpochSampler(DistributedSampler[int]):
    """A DistributedSampler that can also begin in the middle of an epoch.

    It splits exactly as torch's: the permutation of ``seed + epoch``, padded with its own beginning
    to a multiple of the ranks (or cut to one, with ``drop_last``), dealt out in turn. Every rank thus
    has equally many samples.
    """

    consumed: int = 0
    """Samples of this epoch's order that all ranks together have had before, in a run that was stopped."""

    def begin(self, epoch: int, consumed: int = 0) -> None:
        """Choose the order of this epoch, and where in it to start."""
        self.set_epoch(epoch)
        self.consumed = consumed

    @property
    def left(self) -> int:
        """Samples of this epoch that are still to be seen by all ranks together, without padding."""
        left = max(0, size_of(self.dataset) - self.consumed)
        return left // self.num_replicas * self.num_replicas if self.drop_last else left

    def __iter__(self) -> Iterator[int]:
        count = size_of(self.dataset)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(count))
        rest = order[self.consumed : self.consumed + self.left]
        missing = -len(rest) % self.num_replicas
        rest += (order * math.ceil(missing / count))[:missing]
        return iter(rest[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return math.ceil(self.left / self.num_replicas)


class ExactSampler(Sampler[int]):
    """Deals the samples out in turn without padding, so that validation counts each exactly once.

    Ranks may have one sample, and one batch, more than others: nothing in validation may be a
    collective until the end.
    """

    def __init__(self, count: int, rank: int, world_size: int) -> None:
        self._mine = range(rank, count, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)


def train_loader(data: Data, config: TrainingConfig, world: World) -> tuple[DataLoader[Batch], EpochSampler]:
    """Make the loader of this rank's share of the training samples, and the sampler to begin each epoch with."""
    sampler = EpochSampler(
        data.train, world.size, world.rank, shuffle=True, seed=config.seed, drop_last=config.drop_last
    )
    return _loader(data.train, sampler, config, world), sampler


def val_loader(data: Data, config: TrainingConfig, world: World) -> DataLoader[Batch]:
    """Make the loader of this rank's share of the validation samples."""
    return _loader(data.val, ExactSampler(size_of(data.val), world.rank, world.size), config, world)


def _loader(dataset: Dataset[Any], sampler: Sampler[int], config: TrainingConfig, world: World) -> DataLoader[Batch]:
    workers = config.num_workers
    if workers == "auto":
        workers = auto_workers(len(os.sched_getaffinity(0)), world.size)
    return DataLoader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_init_worker,
        # Of its own, so that loading leaves the rank's random numbers (dropout) alone; the workers'
        # seeds are drawn from it, and ranks must not augment alike.
        generator=torch.Generator().manual_seed(rank_seed(config.seed, world.rank)),
        collate_fn=_as_is if hasattr(dataset, "__getitems__") else default_collate,
        pin_memory=world.device.type == "cuda",
    )


def rank_seed(seed: int, rank: int) -> int:
    """Give each rank a seed of its own that no rank of another run's nearby seed has."""
    return int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0] >> 1)


def _init_worker(worker: int) -> None:
    # torchrun signals the rank's whole process group, and a worker that dies of it takes the rank along before it
    # has finished its step. In a group of its own the worker goes on, until the rank ends it or is gone.
    os.setpgid(0, 0)


def _as_is(batch: Any) -> Any:
    return batch


class MicroBatch(NamedTuple):
    """A batch as one part of an optimizer step.

    Attributes:
        images: float32 ``[batch, channels, height, width]``, on the CPU.
        labels: int64 ``[batch]``.
        share: The batch's part of the samples this rank has in the step; the shares of a step add up to 1. So a
            short last batch, or a last step of fewer batches, weighs as much as it has samples.
        samples: Samples this rank has in the step.
        first: Whether a step begins with it.
        last: Whether it completes the step.
    """

    images: torch.Tensor
    labels: torch.Tensor
    share: float
    samples: int
    first: bool
    last: bool


def micro_batches(loader: DataLoader[Batch], samples: int, accumulation: int) -> Iterator[MicroBatch]:
    """Give an epoch's batches, each with its place in its optimizer step.

    Args:
        loader: This rank's loader.
        samples: Samples it will give.
        accumulation: Batches of a step.
    """
    size = loader.batch_size or 1
    per_step = size * accumulation
    for number, (images, labels) in enumerate(loader):
        begin = number // accumulation * per_step
        in_step = min(per_step, samples - begin)
        done = number * size + len(labels) - begin
        yield MicroBatch(
            images, labels, len(labels) / in_step, in_step, number % accumulation == 0, last=done >= in_step
        )


def to_device(
    batch: MicroBatch | Batch, device: torch.device, *, channels_last: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring images and labels to the device; from pinned memory this does not wait."""
    layout = torch.channels_last if channels_last else torch.preserve_format
    images = batch[0].to(device, non_blocking=True, memory_format=layout)
    return images, batch[1].to(device, non_blocking=True)
