"""Checks, while training, that the ranks still do the same work, and who does not.

A violation is an event in rank 0's log, with the rank, the tensor or sample and the step, said once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.distributed import World


class Watch:
    """Compares the ranks: their batch counts, their samples, their weights, and whose loss is not finite.

    Args:
        world: All ranks.
        log: This rank's log; violations go into rank 0's.
        config: ``watch`` says whether and how often, ``training.nonfinite`` what to do.
        model: The bare model.
    """

    def __init__(self, world: World, log: RankLog, config: RunConfig, model: nn.Module) -> None:
        self._world, self._log, self._model = world, log, model
        self._stop_at_nonfinite = config.training.nonfinite == "stop"
        self._fp16 = config.training.precision == "fp16"
        self._on = config.watch.enabled and world.size > 1
        self._every = config.watch.every_steps
        self._skipped = 0
        self._said: set[Any] = set()
        # Between two broadcasts each rank's BatchNorm has statistics of its own samples; that is how DDP works.
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)]
        self._own_buffers = {id(buffer) for norm in norms for buffer in norm.buffers()}

    def batches(self, count: int) -> None:
        """Refuse ranks with different numbers of batches: the one with more would wait for the others for ever.

        Raises:
            UserError: On every rank, naming those that differ.
        """
        if not self._on:
            return
        counts = self._world.gather(count)
        usual = Counter(counts).most_common(1)[0][0]
        odd = {rank: n for rank, n in enumerate(counts) if n != usual}
        for rank, n in odd.items():
            self._violation("batches", rank, f"rank {rank} has {n} batches in an epoch and the others have {usual}")
        if odd:
            raise UserError(
                f"the ranks have different numbers of batches ({', '.join(map(str, counts))} by rank): the epoch would "
                "end in a hang; split the data with a DistributedSampler"
            )

    def samples(self, sampler: Iterable[int], epoch: int, left: int) -> None:
        """Check that the ranks' samples of an epoch are disjoint and cover what is left of it.

        Args:
            sampler: Gives the indices, in the data set, of what this rank will train on.
            epoch: The epoch, counted from 1.
            left: Samples that are to be seen, over all ranks and without padding.
        """
        if not self._on:
            return
        indices = torch.tensor(list(sampler), dtype=torch.int64)
        size = 1 + max(self._world.gather(int(indices.max()) if len(indices) else 0))
        mine = torch.bincount(indices, minlength=size).to(torch.int32)
        total = mine.clone()
        dist.all_reduce(total, group=self._world.control)
        padding = -left % self._world.size
        seen, trained = int(total.count_nonzero()), int(total.sum())
        if seen >= left and trained <= left + padding:
            return
        twice = int(total.argmax())
        holders = [rank for rank, has in enumerate(self._world.gather(bool(mine[twice]))) if has]
        shared = ", ".join(map(str, holders))
        self._violation(
            "samples",
            holders[-1] if len(holders) > 1 else None,
            f"epoch {epoch}: the ranks together train {trained} samples, {seen} different ones, instead of {left}; "
            f"sample {twice} is trained by ranks {shared}: is the sampler of each rank told its rank?",
            epoch=epoch,
        )

    def due(self, step: int) -> bool:
        """Tell whether the weights are to be compared after this step."""
        return self._on and step % self._every == 0

    def weights(self, step: int, epoch: int, *, epoch_end: bool = False) -> None:
        """Every so many steps, compare a hash of every parameter, and of the buffers that should be equal.

        It reads each tensor once and waits for the GPU once; at the default of every 100 steps neither is felt.

        Args:
            step: The optimizer step.
            epoch: The epoch.
            epoch_end: Compare them in any case.
        """
        if not (self.due(step) or (epoch_end and self._on)):
            return
        tensors: list[tuple[str, torch.Tensor]] = [*self._model.named_parameters()]
        tensors += [(n, b) for n, b in self._model.named_buffers() if id(b) not in self._own_buffers]
        mine = torch.stack([fingerprint(tensor) for _, tensor in tensors]).cpu()
        everyone = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(everyone, mine, group=self._world.control)
        rows = [[tuple(pair) for pair in hashes.tolist()] for hashes in everyone]
        if all(row == rows[0] for row in rows):
            return
        usual: list[tuple[int, ...]] = [Counter(column).most_common(1)[0][0] for column in zip(*rows, strict=True)]
        for rank, row in enumerate(rows):
            odd = [tensors[i][0] for i, (a, b) in enumerate(zip(row, usual, strict=True)) if a != b]
            if odd:
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                self._violation(
                    "weights",
                    rank,
                    f"rank {rank}'s weights are no longer the other ranks': {odd[0]}{more}, noticed after step {step}",
                    tensor=odd[0],
                    step=step,
                    epoch=epoch,
                )

    def finite(self, done: dict[str, float] | None) -> UserError | None:
        """Count a step that was left out because a loss or gradient was not finite.

        Args:
            done: A step's numbers, as all ranks have them at the same time; None if there are none yet.

        Returns:
            On every rank alike, what to end the run with, unless such steps are to be skipped.
        """
        if done is None or math.isfinite(done["grad_norm"]):
            return None
        # Averaging has given every rank the same gradient, so all of them are here and can be asked.
        own = self._world.gather((done["loss"], done.get("rank_grad_norm", 0.0)))
        bad_loss = [rank for rank, (loss, _) in enumerate(own) if not math.isfinite(loss)]
        bad_norm = [rank for rank, (_, norm) in enumerate(own) if not math.isfinite(norm)]
        what, ranks = ("loss", bad_loss) if bad_loss else ("gradient", bad_norm)
        self._skipped += 1
        step = int(done["step"])
        if self._world.rank == 0:
            self._log.event("skipped", step=step, ranks=ranks, what=what, count=self._skipped)
        overflow = self._fp16 and not bad_loss  # what loss scaling is there for: it lowers the scale and goes on
        if not self._stop_at_nonfinite or overflow:
            return None
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        return UserError(
            f"the {what} became NaN or infinite{where} in step {step}; lower lr or clip gradients, or set "
            "nonfinite to skip to leave such steps out",
            field="training.nonfinite",
        )

    def _violation(
        self,
        check: str,
        rank: int | None,
        message: str,
        *,
        tensor: str | None = None,
        step: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if self._world.rank != 0 or (check, rank) in self._said:
            return
        self._said.add((check, rank))
        self._log.event("watch", check=check, rank=rank, tensor=tensor, step=step, epoch=epoch, message=message)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bits in two ways: two int64 that differ if anything in it does, but for unlikely chance.

    Words of 4 bytes are summed, which any change shows in, and words of 8, which also tell odd from even places.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words, pairs = (
        data[: data.numel() // size * size].view(kind) for size, kind in ((4, torch.int32), (8, torch.int64))
    )
    rest = data[data.numel() // 4 * 4 :].sum(dtype=torch.int64)
    return torch.stack([words.sum(dtype=torch.int32).to(torch.int64) + rest, pairs.sum()])
