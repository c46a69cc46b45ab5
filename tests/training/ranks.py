"""What the tests run inside real ranks. Imported ahead by the fork server, so that a rank starts in milliseconds."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader

from ddp_core.config import TrainingConfig, load
from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training import loop
from ddp_core.training.checkpoint import Checkpoints, Position
from ddp_core.training.data import Data, SyntheticImages
from ddp_core.training.distributed import StopVote, process_group
from ddp_core.training.environment import RankEnvironment
from ddp_core.training.loading import train_loader, val_loader
from ddp_core.training.models import build_model
from ddp_core.training.optimization import OPTIMIZERS
from ddp_core.training.wrapping import share_buffers, wrap

CPU = torch.device("cpu")


def run_rank(function, environ, results, args):
    """Body of one rank's process."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        results.put((int(environ["RANK"]), function(*args), None))
    except BaseException:
        results.put((int(environ["RANK"]), None, traceback.format_exc()))
        raise


class Flag:
    """A stop flag without signals."""

    def __init__(self, requested=False):
        self.requested = requested

    def defer(self):
        pass


def here():
    return RankEnvironment.from_environ()


def train_main(run_dir, attempt):
    from ddp_core.training.__main__ import main

    os.environ |= {"DDP_RUN_DIR": str(run_dir), "DDP_ATTEMPT_BASE": str(attempt)}
    os.dup2(os.open(run_dir / f"stderr_{here().rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    return main()


def train_main_with_little_disk(run_dir, limit):
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return train_main(run_dir, 0)


def count_validation(sizes):
    """Validate sets of several sizes with a model whose right answers are known; the counts per size."""
    counts = {}
    config = TrainingConfig(batch_size=16)
    with process_group(here(), CPU) as world:
        for size in sizes:
            data = Data(SyntheticImages(8, (1, 4, 4), 0), SyntheticImages(size, (1, 4, 4), 0), (1, 4, 4), 10)
            model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
            torch.manual_seed(0)
            nn.init.normal_(model[1].weight)
            nn.init.zeros_(model[1].bias)
            result = loop.evaluate(model, val_loader(data, config, world), world, Flag())
            images, labels = next(iter(DataLoader(data.val, batch_size=size)))
            logits = model(images)
            counts[size] = {
                "result": result,
                "loss": nn.functional.cross_entropy(logits, labels).item(),
                "accuracy": (logits.argmax(1) == labels).double().mean().item(),
            }
    return counts


def validate_while_stopping():
    """Only rank 1 is asked to stop during validation: what does each rank get?"""
    with process_group(here(), CPU) as world:
        data = Data(SyntheticImages(8, (1, 4, 4), 0), SyntheticImages(40, (1, 4, 4), 0), (1, 4, 4), 10)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
        flag = Flag(world.rank == 1)
        return loop.evaluate(model, val_loader(data, TrainingConfig(batch_size=2), world), world, flag)


def step_like_one_process(batch_size, steps):
    """Train a few steps; the parameters, gradients and what a single process with the same samples gets."""
    config = TrainingConfig(batch_size=batch_size, lr=0.1)
    with process_group(here(), CPU) as world:
        data = Data(SyntheticImages(64, (1, 8, 8), 0), SyntheticImages(1, (1, 8, 8), 0), (1, 8, 8), 10)
        torch.manual_seed(world.rank)  # different weights: DDP must make them rank 0's
        model = build_model("cnn", data.shape, 10)
        torch.manual_seed(0)
        alone = build_model("cnn", data.shape, 10)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        ddp = wrap(model, world, torch.zeros(2, 1, 8, 8))
        if world.rank == 0:
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "wrap changed the weights"
        ours = OPTIMIZERS["sgd"](model.parameters(), lr=config.lr, weight_decay=0.0)
        theirs = OPTIMIZERS["sgd"](alone.parameters(), lr=config.lr, weight_decay=0.0)
        loader, sampler = train_loader(data, config, world)
        sampler.begin(1)
        seen = []
        for step, (images, labels) in enumerate(loader):
            if step == steps:
                break
            whole = world.gather((images, labels))
            ours.zero_grad()
            nn.functional.cross_entropy(ddp(images), labels).backward()
            theirs.zero_grad()
            everything = [torch.cat(part) for part in zip(*whole, strict=True)]
            nn.functional.cross_entropy(alone(everything[0]), everything[1]).backward()
            gradient = max(
                float((a.grad - b.grad).abs().max())
                for a, b in zip(model.parameters(), alone.parameters(), strict=True)
            )
            ours.step()
            theirs.step()
            seen.append(gradient)
        difference = max(
            float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True)
        )
        return {
            "gradients": seen,
            "parameters": difference,
            "hash": [float(p.detach().double().sum()) for p in model.parameters()],
        }


def wrap_batchnorm_and_dropout():
    """Does wrap leave buffers and random numbers as they were, and does share_buffers make them rank 0's?"""
    with process_group(here(), CPU) as world:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(2 * 36, 3))
        buffers = [b.clone() for b in model.buffers()]
        rng = torch.get_rng_state()
        wrap(model, world, torch.ones(2, 1, 8, 8))
        untouched = all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
        same_rng = torch.equal(rng, torch.get_rng_state())
        clean = all(p.grad is None for p in model.parameters())
        with torch.no_grad():
            model[1].running_mean += world.rank + 1
        share_buffers(model, world)
        return untouched, same_rng, clean, model[1].running_mean.tolist()


def prepare_and_fail():
    """Rank 0 cannot prepare: what each rank raises, and that it still can talk to the others."""
    with process_group(here(), CPU) as world:
        calls = []

        def prepare(download):
            calls.append(download)
            raise UserError("no network", field="training.dataset")

        try:
            world.prepare_on_rank_zero(prepare)
        except UserError as error:
            return str(error), calls, world.sum([1.0])
        return None


def prepare_a_file(folder):
    """Rank 0 writes a file, slowly; the others must find it whole."""
    import time

    path = Path(folder) / "data"

    def prepare(download):
        if download:
            time.sleep(0.5)
            path.write_text("whole")
        return path.read_text()

    with process_group(here(), CPU) as world:
        return world.prepare_on_rank_zero(prepare)


def vote(asked):
    """Rank 2 is asked to stop before step ``asked``: the step after which each rank stops."""
    with process_group(here(), CPU) as world:
        flag = Flag()
        votes = StopVote(flag, world)
        for step in range(1, 10):
            flag.requested = flag.requested or (world.rank == 2 and step == asked)
            votes.start()
            if votes.passed():
                return step
    return None


def leave_by_exception():
    """Rank 1 raises while the others wait for it in a collective: what the others get, and how fast."""
    import time

    began = time.monotonic()
    try:
        with process_group(here(), CPU) as world:
            if world.rank == 1:
                raise ValueError("rank 1 gives up")
            world.sum([1.0])
    except Exception as error:
        return type(error).__name__, time.monotonic() - began, torch.distributed.is_initialized()
    return None


def late_to_be_ready(rank_that_left):
    """One rank leaves before it is ready: do the others, asked to stop, take that as a stop?"""
    with process_group(here(), CPU) as world:
        if world.rank == rank_that_left:
            os._exit(0)
        return world.ready(Flag(requested=True))


def log_a_slow_gpu():
    """Log two steps, the second with a second of work on the GPU: how long that took, and what was logged by then."""
    import time

    from ddp_core.training.metrics import PARTS, StepLog

    class Lines(list):
        def log(self, step, **values):
            self.append(step)

    device = torch.device("cuda", 0)
    lines = Lines()
    log = StepLog(lines, device)
    ones = torch.ones((), device=device)
    torch.cuda.memory_allocated(device)
    torch.cuda.synchronize()
    log.begin()
    waited = 0.0
    for step in (1, 2):
        for part in PARTS:
            log.mark(part)
        log.add(ones, 1.0, torch.ones(1, 2, device=device), torch.zeros(1, device=device))
        if step == 2:
            torch.cuda._sleep(2_000_000_000)
        began = time.monotonic()
        log.end(step, 1, ones, None, epoch=1, lr=0.1)
        waited = time.monotonic() - began
    behind = list(lines)
    log.flush()
    assert list(lines) == [1, 2]
    return waited, behind


def save_epochs(run_dir, epochs):
    """Write a checkpoint after each of some epochs of no training."""
    log = RankLog(run_dir / "metrics" / "attempt_0" / f"rank_{here().rank}.jsonl")
    model = nn.Linear(2, 2)
    optimizer = OPTIMIZERS["sgd"](model.parameters(), lr=0.1, weight_decay=0.0)
    with process_group(here(), CPU) as world:
        config = load(run_dir / "config.yaml")
        parts = {"model": model, "optimizer": optimizer}
        checkpoints = Checkpoints(run_dir, config, parts=parts, world=world, log=log)
        for epoch in range(1, epochs + 1):
            checkpoints.save(Position(epoch=epoch, step=epoch, epoch_done=True), always=True)
        checkpoints.close()


def join_late(late_rank):
    """Join the process group, one rank after the others have looked for it."""
    import time

    if here().rank == late_rank:
        time.sleep(1)
    with process_group(here(), CPU) as world:
        return world.sum([1.0])


def validate_with_statistics_of_its_own():
    """Each rank has running statistics of its own; what they measure, and what rank 0's model gives alone."""
    with process_group(here(), CPU) as world:
        data = Data(SyntheticImages(8, (1, 4, 4), 0), SyntheticImages(31, (1, 4, 4), 0), (1, 4, 4), 10)
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 10))
        images, labels = next(iter(DataLoader(data.val, batch_size=31)))
        model.eval()
        alone = nn.functional.cross_entropy(model(images), labels).item()
        model[0].running_mean += 5.0 * world.rank
        result = loop.evaluate(model, val_loader(data, TrainingConfig(), world), world, Flag())
        return result[0], alone
