from __future__ import annotations

import pytest

from ddp_core.split import split


def test_the_unshuffled_split_of_1000_samples_on_4_ranks():
    parts = split(1000, 4, 16)
    assert [parts.first_indices(rank, 3) for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert (parts.per_rank, parts.padded, parts.steps_per_epoch) == (250, 0, 16)


@pytest.mark.parametrize("samples", [1, 2, 7, 997, 1000])
@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_the_split_is_that_of_distributed_sampler(samples, world_size):
    from torch.utils.data import DistributedSampler

    parts = split(samples, world_size, 4)
    for rank in range(world_size):
        sampler = DistributedSampler(range(samples), world_size, rank, shuffle=False)
        indices = list(sampler)
        assert len(indices) == parts.per_rank
        assert parts.first_indices(rank) == indices[:4]
