"""How samples are divided among ranks: the arithmetic of ``DistributedSampler``, without torch.

Source of the rule: ``torch.utils.data.DistributedSampler``: the list of indices is padded from its own
beginning to a multiple of the world size (or, with ``drop_last``, cut to one), and rank r takes every
world_size-th index from r on. With shuffling it is the same split, of a permutation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """How one epoch of a data set is divided.

    Attributes:
        samples: Samples in the data set.
        world_size: Number of ranks.
        batch_size: Samples per rank and batch.
        per_rank: Samples each rank sees in an epoch, the padding included.
        padded: Samples that are seen twice so that every rank has as many.
        dropped: Samples that are left out, with ``drop_last``, so that every rank has as many.
        batches_per_epoch: Batches of each rank in an epoch; the last one may be short.
        steps_per_epoch: Optimizer steps of an epoch; the last one may have fewer batches.
    """

    samples: int
    world_size: int
    batch_size: int
    per_rank: int
    padded: int
    dropped: int
    batches_per_epoch: int
    steps_per_epoch: int

    def first_indices(self, rank: int, count: int = 4) -> list[int]:
        """First positions rank ``rank`` takes of the (shuffled) order: rank, rank + world_size and so on."""
        return [i % self.samples for i in range(rank, self.per_rank * self.world_size, self.world_size)][:count]


def split(samples: int, world_size: int, batch_size: int, *, accumulation: int = 1, drop_last: bool = False) -> Split:
    """Divide ``samples`` among ``world_size`` ranks as DistributedSampler does.

    Args:
        samples: Samples in the data set.
        world_size: Number of ranks.
        batch_size: Samples per rank and batch.
        accumulation: Batches of an optimizer step.
        drop_last: Leave out the last samples of the order, fewer than ``world_size``, instead of padding.
    """
    per_rank = samples // world_size if drop_last else math.ceil(samples / world_size)
    batches = math.ceil(per_rank / batch_size)
    return Split(
        samples=samples,
        world_size=world_size,
        batch_size=batch_size,
        per_rank=per_rank,
        padded=max(0, per_rank * world_size - samples),
        dropped=max(0, samples - per_rank * world_size),
        batches_per_epoch=batches,
        steps_per_epoch=math.ceil(batches / accumulation),
    )


def auto_workers(cores: int, ranks: int) -> int:
    """DataLoader workers of each rank for ``num_workers: auto``: its cores less one for itself, at most 8."""
    return min(8, max(0, cores // ranks - 1))
