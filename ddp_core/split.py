"""How samples are divided among ranks: the arithmetic of ``DistributedSampler``, without torch.

Source of the rule: ``torch.utils.data.DistributedSampler`` with ``drop_last=False``: the list of
indices is padded from its own beginning to a multiple of the world size, and rank r takes every
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
        batch_size: Samples per rank and step.
        per_rank: Samples each rank sees in an epoch, the padding included.
        padded: Samples that are seen twice so that every rank has as many.
        steps_per_epoch: Optimizer steps of an epoch; the last batch may be short.
    """

    samples: int
    world_size: int
    batch_size: int
    per_rank: int
    padded: int
    steps_per_epoch: int

    def first_indices(self, rank: int, count: int = 4) -> list[int]:
        """First positions rank ``rank`` takes of the (shuffled) order: rank, rank + world_size and so on."""
        return [i % self.samples for i in range(rank, self.per_rank * self.world_size, self.world_size)][:count]


def split(samples: int, world_size: int, batch_size: int) -> Split:
    """Divide ``samples`` among ``world_size`` ranks as DistributedSampler does."""
    per_rank = math.ceil(samples / world_size)
    return Split(
        samples=samples,
        world_size=world_size,
        batch_size=batch_size,
        per_rank=per_rank,
        padded=per_rank * world_size - samples,
        steps_per_epoch=math.ceil(per_rank / batch_size),
    )
