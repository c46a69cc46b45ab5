"""The process group, and the few things that all ranks do together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ddp_core.errors import UserError
from ddp_core.training.environment import RankEnvironment, StopFlag

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
            that asking a question never waits for the GPU. None in a single process without a group.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None

    @property
    def backend(self) -> str:
        """The backend of the gradients, ``gloo`` or ``nccl``; ``none`` in a single process without a group."""
        return str(dist.get_backend()) if self.control else "none"

    def sum(self, values: list[float]) -> list[float]:
        """Add up each value over all ranks, in float64."""
        if self.control is None:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Give every rank rank 0's value (anything that can be pickled)."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the values of all ranks, in order of rank."""
        if self.control is None:
            return [value]
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
        if self.control is None:
            return not stop.requested
        try:
            dist.barrier(group=self.control)
        except RuntimeError:
            if stop.requested:
                return False
            raise
        return True


class StopVote:
    """Lets all ranks end after the same step: one that left alone would leave the others hanging.

    The vote starts with the step and is counted at its end, so it runs beside forward and backward.

    Args:
        stop: Set when this rank was asked to stop.
        world: All ranks.
        max_minutes: Vote for the end when so much time has passed from now; clocks differ, so one rank is enough.
    """

    def __init__(self, stop: StopFlag, world: World, max_minutes: float | None = None) -> None:
        self._stop = stop
        self._group = world.control
        self._deadline = time.monotonic() + max_minutes * 60 if max_minutes else math.inf
        self._votes = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Cast this rank's vote."""
        self._votes.fill_(2 if self._stop.requested else time.monotonic() >= self._deadline)
        if self._group is not None:
            self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def passed(self) -> Literal["stop", "time"] | None:
        """Tell whether any rank had been asked to stop, or had run out of time, when this step started."""
        if self._work is not None:
            self._work.wait()
        vote = int(self._votes.item())
        return ("stop" if vote == 2 else "time") if vote else None


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
def process_group(here: RankEnvironment, device: torch.device, timeout_s: float = 600.0) -> Iterator[World]:
    """Join the process group of torchrun's environment, and leave it on every path.

    Args:
        here: Where this process stands. Address and port come from torchrun, and are never made up here.
            A process that torchrun did not start trains alone, without a group.
        device: This rank's device; NCCL serves CUDA and gloo the CPU.
        timeout_s: Seconds a rank waits for the others in one collective.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        # Before anything touches CUDA: otherwise every rank opens a context on GPU 0.
        torch.cuda.set_device(device)
    if here.alone:
        yield World(rank=0, local_rank=0, size=1, device=device, control=None)
        return
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        # torchrun keeps one store for all attempts (seen in torch 2.14.1: --standalone, --max-restarts). Without
        # a prefix the ranks of this attempt find the addresses of the last one's, who are dead.
        store=dist.PrefixStore(f"attempt_{here.attempt}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if on_cuda else None,
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        apart = dist.new_group(backend="gloo", timeout=timeout) if on_cuda else world
        yield World(here.rank, here.local_rank, here.world_size, device, cast("dist.ProcessGroup", apart))
    except BaseException:
        # Others may be in a collective that this rank will never join. Leaving by abort neither
        # waits for them nor lets them wait: they see the connection close.
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()
