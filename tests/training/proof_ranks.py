"""What the proofs run inside real ranks: whole trainings with one thing done wrong on purpose."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from ddp_core.config import DdpConfig, TrainingConfig
from ddp_core.errors import UserError
from ddp_core.training import setup, spawn
from ddp_core.training.data import SyntheticImages
from ddp_core.training.distributed import StopVote, process_group
from ddp_core.training.loading import EpochSampler
from ddp_core.training.metrics import StepLog
from ddp_core.training.optimization import Optimization
from ddp_core.training.wrapping import exchanging, place, wrap
from tests.training.ranks import CPU, here, train_main


@contextmanager
def at_step(step, rank, act):
    """Call ``act`` on one rank when this step ends."""
    ends = StepLog.end

    def end(self, number, *args, **values):
        if number == step and here().rank == rank:
            act()
        return ends(self, number, *args, **values)

    StepLog.end = end
    try:
        yield
    finally:
        StepLog.end = ends


def train_until_killed(run_dir, step, rank):
    """Kill a rank by -9 in the middle of a step; what the others make of it."""
    with at_step(step, rank, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        try:
            return train_main(run_dir, 0)
        except Exception as error:
            return type(error).__name__


def train_recording(run_dir, attempt, stop_at):
    """Train, stopped after some steps of this attempt if asked for; the samples that were read for training."""
    read, passed, steps = [], StopVote.passed, []
    get = SyntheticImages.__getitem__

    def getitem(self, index):
        if self._first == 0:
            read.append(index)
        return get(self, index)

    def stop(self):
        steps.append(passed(self))
        return "stop" if len(steps) == stop_at else steps[-1]

    SyntheticImages.__getitem__, StopVote.passed = getitem, stop
    assert train_main(run_dir, attempt) == 0
    return read


def train_perturbed(run_dir, step, rank):
    """After a step, one rank's weights move by themselves."""
    placed = []

    def remember(model, *args, **options):
        placed.append(place(model, *args, **options))
        return placed[-1]

    setup.place = remember

    def perturb():
        with torch.no_grad():
            placed[0][2].bias[1] += 1e-6

    with at_step(step, rank, perturb):
        return train_main(run_dir, 0)


def train_without_a_sampler(run_dir):
    """Each rank shuffles the whole data set for itself, as a script does that forgot the DistributedSampler."""

    class Forgotten(EpochSampler):
        def __init__(self, data):
            super().__init__(data, 1, 0)
            self._random = RandomSampler(data)

        def __iter__(self):
            return iter(self._random)

    def loader(data, config, world):
        sampler = Forgotten(data.train)
        return DataLoader(data.train, batch_size=config.batch_size, sampler=sampler), sampler

    setup.train_loader = loader
    return train_main(run_dir, 0)


def train_unevenly(run_dir, odd):
    """One rank has fewer samples."""
    good = setup.train_loader

    def loader(data, config, world):
        if world.rank != odd:
            return good(data, config, world)
        sampler = EpochSampler(range(len(data.train) // 2), world.size, world.rank)
        return DataLoader(data.train, batch_size=config.batch_size, sampler=sampler), sampler

    setup.train_loader = loader
    return train_main(run_dir, 0)


def train_with_a_bad_sample(run_dir, rank, bad):
    """One rank reads an image of NaN at its n-th sample."""
    get, count = SyntheticImages.__getitem__, []

    def getitem(self, index):
        image, label = get(self, index)
        if self._first == 0:
            count.append(index)
        return (
            image * float("nan") if self._first == 0 and len(count) == bad and here().rank == rank else image
        ), label

    SyntheticImages.__getitem__ = getitem
    return train_main(run_dir, 0)


class Branching(nn.Module):
    """Uses its second half only when told to."""

    def __init__(self):
        super().__init__()
        self.used, self.spare, self.both = nn.Linear(4, 2), nn.Linear(4, 2), False

    def forward(self, x):
        return self.used(x) + (self.spare(x) if self.both else 0)


def wrap_with_unused(find):
    """What comes of parameters that take no part from the beginning, and of some that stop taking part later."""
    example = torch.ones(2, 4)
    with process_group(here(), CPU) as world:
        try:
            wrap(Branching(), world, example, DdpConfig(find_unused_parameters=find))
            at_once = None
        except UserError as error:
            at_once = str(error)
        model = Branching()
        model.both = True
        ddp = wrap(model, world, example, DdpConfig(find_unused_parameters=find))
        model.both = False
        try:
            for _ in range(2):
                with exchanging(ddp, True):
                    ddp(example).sum().backward()
            later = None
        except UserError as error:
            later = str(error)
    return at_once, later


def wrap_twice():
    """What a model that is wrapped already is told."""
    with process_group(here(), CPU) as world:
        told = []
        for model in (nn.DataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))):
            for refuse in (place, lambda m, w, o: wrap(m, w, torch.ones(1, 2), o)):
                try:
                    refuse(model, world, DdpConfig())
                except UserError as error:
                    told.append(str(error))
        return told


def accumulate():
    """Count the exchanges of a step of three batches, and compare with one large batch, clipped alike."""
    torch.manual_seed(0)
    with process_group(here(), CPU) as world:
        config = TrainingConfig(clip_grad_norm=0.01, lr=0.1)
        models = [nn.Linear(4, 3), nn.Linear(4, 3)]
        models[1].load_state_dict(models[0].state_dict())
        x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(world.rank)), torch.tensor([0, 1, 2, 0, 1, 2])
        exchanges, norms = [], []
        for model, sizes in zip(models, ([6], [3, 2, 1]), strict=True):
            ddp = wrap(model, world, torch.ones(2, 4), measured=True)
            average, count = ddp.exchange.average, []
            ddp.exchange.average = lambda bucket, average=average, count=count: count.append(1) or average(bucket)
            optimization = Optimization(model, config, 0.1, CPU)
            for number, (a, b) in enumerate(zip(x.split(sizes), y.split(sizes), strict=True), 1):
                with exchanging(ddp, number == len(sizes)):
                    loss = nn.functional.cross_entropy(ddp(a), b)
                    optimization.backward(loss, len(b) / 6)
            norms.append(float(optimization.step()))
            exchanges.append(len(count))
        a, b = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
        return exchanges, norms, float((a - b).abs().max())


def wait_longer_than_the_timeout(folder):
    """Rank 1 does not come to the collective: how long rank 0 waits for it, and what it is told."""
    done = Path(folder) / "done"
    try:
        with process_group(here(), CPU, timeout_s=1.0) as world:
            if world.rank == 1:
                while not done.exists():
                    time.sleep(0.01)
                return None
            began = time.monotonic()
            try:
                world.sum([1.0])
            finally:
                done.touch()
                waited = time.monotonic() - began
    except RuntimeError as error:
        return waited, str(error)
    return None


def spawn_again():
    """Under torchrun every rank would start more."""
    try:
        spawn(os.getpid, 2)
    except UserError as error:
        return str(error)
    return None


def add_up(number):
    """A script's main as it would be under torchrun."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    total = torch.tensor(float(rank + number))
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return rank, total.item(), os.environ["LOCAL_RANK"]


def fail_on_rank_one():
    """Rank 1 raises."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")
    time.sleep(60)
