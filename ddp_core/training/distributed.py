"""The process group, and the few things that all ranks do together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ddp_core.errors import UserError
from ddp_core.training.environment import RankEnvironment, StopFlag
from ddp_core.training.models import without_trace

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank's view of all ranks.

    Attributes:
        rank: Number of this process.
        local_rank: Number of this process on this machine.
        size: Number of processes.
        device: Where this rank trains.
        control: A gloo group for flags, counts and small objects. On CUDA it is apart from NCCL, so
            that asking a question never waits for the GPU.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def backend(self) -> str:
        """The backend of the gradients, ``gloo`` or ``nccl``."""
        return str(dist.get_backend())

    def sum(self, values: list[float]) -> list[float]:
        """Add up each value over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Give every rank rank 0's value (anything that can be pickled)."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the values of all ranks, in order of rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def prepare_on_rank_zero(self, prepare: Callable[[bool], T]) -> T:
        """Let rank 0 prepare something on disk while the others wait, then open it on each.

        Args:
            prepare: Called with True on rank 0 and with False on the others afterwards.

        Raises:
            UserError: On every rank alike, if rank 0 could not.
        """
        result, problem = None, None
        if self.rank == 0:
            try:
                result = prepare(True)
            except UserError as error:
                problem = (error.message, error.field)
        problem = self.broadcast(problem)
        if problem:
            raise UserError(*problem)
        return prepare(False) if result is None else result

    def ready(self, stop: StopFlag) -> bool:
        """Wait until every rank is ready to train; from here on a stop is voted on.

        Returns:
            False if the run was stopped meanwhile: a rank that was not ready yet has just left.
        """
        stop.defer()
        try:
            dist.barrier(group=self.control)
        except RuntimeError:
            if stop.requested:
                return False
            raise
        return True


class StopVote:
    """Lets all ranks stop after the same step: one that left alone would leave the others hanging.

    The vote starts with the step and is counted at its end, so it runs beside forward and backward.
    """

    def __init__(self, stop: StopFlag, world: World) -> None:
        self._stop = stop
        self._group = world.control
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Cast this rank's vote."""
        self._votes.fill_(self._stop.requested)
        self._work = dist.all_reduce(self._votes, group=self._group, async_op=True)

    def passed(self) -> bool:
        """Tell whether any rank had been asked to stop when this step started."""
        assert self._work is not None
        self._work.wait()
        return bool(self._votes.item())


def choose_device(choice: str, local_rank: int, local_world_size: int) -> tuple[torch.device, str | None]:
    """Decide where this rank trains, the same way on every rank.

    Args:
        choice: ``auto``, ``cuda`` or ``cpu``.
        local_rank: Which GPU of the visible ones this rank takes.
        local_world_size: How many GPUs the ranks of this machine need; NCCL refuses two ranks on one.

    Returns:
        The device, and what to warn of: a run that holds GPUs and trains on the CPU says why.

    Raises:
        UserError: If CUDA was asked for and cannot be used.
    """
    if choice == "cpu":
        return torch.device("cpu"), None
    why_not = _why_no_cuda(local_world_size)
    if why_not is None:
        return torch.device("cuda", local_rank), None
    if choice == "cuda":
        raise UserError(f"cuda cannot be used: {why_not}", field="launch.device")
    held = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.device("cpu"), f"training on the CPU although the run holds GPUs: {why_not}" if held else None


def _why_no_cuda(needed: int) -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU or no working driver"
    count = torch.cuda.device_count()
    if count < needed:
        return f"torch can use {count} GPU{'s' * (count != 1)} and {needed} processes need one each"
    return None


@contextmanager
def process_group(here: RankEnvironment, device: torch.device) -> Iterator[World]:
    """Join the process group of torchrun's environment, and leave it on every path.

    Args:
        here: Where this process stands. Address and port come from torchrun, and are never made up here.
        device: This rank's device; NCCL serves CUDA and gloo the CPU.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        # Before anything touches CUDA: otherwise every rank opens a context on GPU 0.
        torch.cuda.set_device(device)
    store, rank, size = next(iter(rendezvous("env://")))
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        # torchrun keeps one store for all attempts (seen in torch 2.14.1: --standalone, --max-restarts). Without
        # a prefix the ranks of this attempt find the addresses of the last one's, who are dead.
        store=dist.PrefixStore(f"attempt_{here.attempt}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        device_id=device if on_cuda else None,
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        control = cast("dist.ProcessGroup", dist.new_group(backend="gloo")) if on_cuda else world
        yield World(here.rank, here.local_rank, here.world_size, device, control)
    except BaseException:
        # Others may be in a collective that this rank will never join. Leaving by abort neither
        # waits for them nor lets them wait: they see the connection close.
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()


def wrap(model: nn.Module, world: World, example: torch.Tensor) -> DistributedDataParallel:
    """Wrap a model, already on its device, for DDP.

    After its first backward DDP lays its gradient buckets out anew, in the order in which gradients
    came, and the place of a gradient in its bucket decides the order in which gloo adds up the
    ranks. A run that was continued would therefore differ from an unbroken one in the last bits
    (with more than two ranks). One backward without a step, here, settles the layout beforehand.

    Args:
        model: The bare model, on ``world.device``. Its parameters and buffers are left as they are.
        world: All ranks.
        example: Images of the training's shape, ``[batch, channels, height, width]``.
    """
    ids = [world.local_rank] if world.device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=ids, output_device=ids[0] if ids else None)
    with without_trace(model):
        ddp(example.to(world.device)).sum().backward()
        # The new layout is made at the beginning of the next forward.
        ddp(example.to(world.device))
    model.zero_grad(set_to_none=True)
    return ddp


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers: DDP averages gradients, not BatchNorm's running statistics."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
