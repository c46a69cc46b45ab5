"""The model as all ranks train it together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_core.config import DdpConfig
from ddp_core.errors import UserError
from ddp_core.training.distributed import World
from ddp_core.training.models import without_trace

_EXCHANGES = {"none": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def place(model: nn.Module, world: World, options: DdpConfig, *, channels_last: bool = False) -> nn.Module:
    """Move a model to this rank's device, before its optimizer is made and before it is wrapped.

    After wrapping it must stay where it is: DDP has its gradients in buckets by then.

    Raises:
        UserError: If the model is wrapped already, or SyncBatchNorm was asked for without CUDA.
    """
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise UserError(
            f"the model is already wrapped in {type(model).__name__}; give the bare model (its .module): "
            "gradients would be averaged twice, and checkpoints carry the prefix module."
        )
    if options.sync_batchnorm:
        if world.device.type != "cuda":
            raise UserError("SyncBatchNorm works on CUDA only, and this run trains on the CPU", "ddp.sync_batchnorm")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    layout = torch.channels_last if channels_last else torch.preserve_format
    return model.to(world.device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


class GradientExchange:
    """What happens to each of DDP's buckets: measured as this rank has it, then averaged over the ranks.

    Args:
        compression: ``none``, ``fp16`` or ``bf16``: how the gradients travel.
        measured: Whether to take this rank's own norm before averaging, which afterwards nobody can tell.
    """

    def __init__(self, compression: str = "none", *, measured: bool = True) -> None:
        self._average = _EXCHANGES[compression]
        self._measured = measured
        self._norms: list[torch.Tensor] = []

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Give a bucket's average over the ranks, in the future: DDP's communication hook."""
        if self._measured:
            self._norms.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32))
        return self._average(cast("dist.ProcessGroup", dist.group.WORLD), bucket)

    def own_norm(self) -> torch.Tensor | None:
        """Norm of this rank's gradients of the step, still on the device; None if it was not measured."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None


class Replica(DistributedDataParallel):
    """DDP that says what it does: in the loop it is used as DDP is."""

    exchange: GradientExchange

    def figures(self) -> dict[str, float]:
        """DDP's own measurement of the last sampled step, in seconds: communication and how much of it was hidden.

        Source: ``DistributedDataParallel._get_ddp_logging_data``, sampled in the first ten steps and then at the
        rate it is set to; in a compiled model and with static_graph there is none.
        """
        data: dict[str, Any] = self._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        names = {"comm_s": "backward_comm_time", "overlap_s": "backward_compute_comm_overlap_time"}
        return {ours: data[theirs] / 1e9 for ours, theirs in names.items() if data.get(theirs)}


def wrap(
    model: nn.Module,
    world: World,
    example: torch.Tensor,
    options: DdpConfig | None = None,
    *,
    measured: bool = False,
) -> nn.Module:
    """Wrap a model, already on its device, for DDP; in a single process without a group it stays as it is.

    After its first backward DDP lays its gradient buckets out anew, in the order in which gradients
    came, and the place of a gradient in its bucket decides the order in which gloo adds up the
    ranks. A run that was continued would therefore differ from an unbroken one in the last bits
    (with more than two ranks). Two backwards without a step, here, settle the layout beforehand.

    Args:
        model: The bare model, on ``world.device``. Its parameters and buffers are left as they are.
        world: All ranks.
        example: Images of the training's shape, ``[batch, channels, height, width]``.
        options: DDP's options.
        measured: Whether to measure each rank's own gradient norm before averaging.

    Raises:
        UserError: If the model is wrapped already, or has parameters that take no part, without the option for it.
    """
    options = options or DdpConfig()
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise UserError(f"the model is already wrapped in {type(model).__name__}; give the bare model")
    if world.control is None:
        return model
    ids = [world.local_rank] if world.device.type == "cuda" else None
    ddp = Replica(
        model,
        device_ids=ids,
        output_device=ids[0] if ids else None,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        bucket_cap_mb=options.bucket_cap_mb,
    )
    ddp.exchange = GradientExchange(options.gradient_compression, measured=measured)
    if measured or options.gradient_compression != "none":
        # DDP wants its own types in the signature, or none.
        ddp.register_comm_hook(None, lambda _, bucket: ddp.exchange.average(bucket))
    with without_trace(model):
        ddp(example.to(world.device)).sum().backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not (options.find_unused_parameters or options.static_graph):
            raise UserError(_unused(unused), field="ddp.find_unused_parameters")
        # The new layout is made at the beginning of the next forward. Its backward must follow: DDP would go on
        # waiting for it, and exchange the gradients of the next one even within no_sync.
        ddp(example.to(world.device)).sum().backward()
    model.zero_grad(set_to_none=True)
    ddp.exchange.own_norm()
    return ddp


@contextmanager
def exchanging(ddp: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one batch: only the last of an optimizer step exchanges gradients.

    ``no_sync`` must enclose the forward too, for it is there that DDP decides.

    Raises:
        UserError: Naming the parameters that took no part in the step before, which DDP finds out only now.
    """
    bare = getattr(ddp, "_orig_mod", ddp)  # torch.compile's wrapper
    try:
        if last or not isinstance(bare, DistributedDataParallel):
            yield
        else:
            with bare.no_sync():
                yield
    except RuntimeError as error:
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if not isinstance(bare, DistributedDataParallel) or indices is None:
            raise
        names = [name for name, p in bare.module.named_parameters() if p.requires_grad]
        unused = [names[int(i)] for i in indices[1].split()]
        raise UserError(_unused(unused), field="ddp.find_unused_parameters") from None


def _unused(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"these parameters take no part in the loss, so that the ranks would wait for their gradients: {shown}; "
        "remove them, or set ddp.find_unused_parameters to true if that is meant"
    )


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers: DDP averages gradients, not BatchNorm's running statistics."""
    if world.control is None:
        return
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
