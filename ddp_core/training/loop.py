"""The training loop. Read from top to bottom: this is what each rank does."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ddp_core import config as run_config
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.data import Batch
from ddp_core.training.distributed import StopVote, World, process_group
from ddp_core.training.environment import RankEnvironment, StopFlag
from ddp_core.training.loading import micro_batches, to_device
from ddp_core.training.metrics import StepLog
from ddp_core.training.setup import device_of, prepare
from ddp_core.training.wrapping import exchanging, share_buffers


class End(NamedTuple):
    """How a training ended, and why if not because all epochs were done."""

    outcome: Literal["finished", "stopped"]
    reason: str | None = None


def train(here: RankEnvironment, log: RankLog, stop: StopFlag) -> End:
    """Train as the run's ``config.yaml`` says, from a checkpoint if there is one to continue from."""
    config = run_config.load(here.run_dir / "config.yaml")
    t = config.training
    device = device_of(config, here, log)

    with process_group(here, device, config.launch.timeout_s) as world, prepare(config, here, world, log) as run:
        if not world.ready(stop):
            return End("stopped")
        at, vote, steps = run.at, StopVote(stop, world, t.max_minutes), StepLog(log, device)
        while at.epoch <= t.epochs:
            run.sampler.begin(at.epoch, at.samples_consumed)  # another order each epoch, split over the ranks
            run.watch.samples(run.loader.sampler, at.epoch, run.sampler.left)
            run.model.train()
            steps.begin()
            ended = problem = None
            for batch in micro_batches(run.loader, len(run.sampler), t.accumulation):
                if batch.first:
                    vote.start()
                images, labels = to_device(batch, device, channels_last=t.channels_last)
                steps.mark("data_s")
                with exchanging(run.ddp, batch.last):  # no_sync but for the last batch of the step
                    with run.optimization.autocast():
                        logits = run.ddp(images)
                        loss = cross_entropy(logits, labels, label_smoothing=t.label_smoothing)
                    steps.mark("forward_s")
                    run.optimization.backward(loss, batch.share)  # DDP averages the gradients meanwhile
                steps.mark("backward_s")
                steps.add(loss, batch.share, logits, labels)
                if not batch.last:
                    continue

                lr = run.schedule.set(at.epoch, at.samples_consumed, batch.samples * world.size)
                own_norm = run.own_gradient_norm()
                norm = run.optimization.step()  # unscale, clip, update unless not finite, moving average
                steps.mark("optimizer_s")
                at = at.advanced(batch.samples * world.size)
                figures = run.ddp_figures(at.step)
                done = steps.end(at.step, batch.samples, norm, own_norm, epoch=at.epoch, lr=lr, **figures)
                problem = run.watch.finite(done)
                run.watch.weights(at.step, at.epoch)
                ended = vote.passed()
                if ended or problem:
                    break
                run.checkpoints.step(at)

            problem = run.watch.finite(steps.flush()) or problem
            result = None
            if not (ended or problem):
                result = evaluate(run.validated, run.validation, world, stop, channels_last=t.channels_last)
            if result is None:
                run.checkpoints.save(at, always=True)
                if problem:
                    raise problem
                return End("finished", f"time limit of {t.max_minutes} minutes") if ended == "time" else End("stopped")
            val_loss, val_accuracy, _ = result
            log.log(at.step, epoch=at.epoch, val_loss=val_loss, val_accuracy=val_accuracy)
            run.watch.weights(at.step, at.epoch, epoch_end=True)
            enough = run.patience.ends(val_loss)
            at = at.finished_epoch()
            run.checkpoints.save(at, always=enough is not None or at.epoch == t.epochs, loss=val_loss)
            if enough:
                return End("finished", enough)
            at = at.next_epoch()
    return End("finished")


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: DataLoader[Batch], world: World, stop: StopFlag, *, channels_last: bool = False
) -> tuple[float, float, int] | None:
    """Measure the model on the whole validation set, each sample once.

    The bare model is used: with DDP's the ranks would have to have equally many batches.

    Args:
        model: The bare model; it is left in evaluation mode.
        loader: This rank's share of the samples.
        world: All ranks.
        stop: If it is set on any rank meanwhile, all of them give up.
        channels_last: The layout of the images.

    Returns:
        Mean loss, accuracy from 0 to 1 and the number of samples counted, the same on every rank; None if stopped.
    """
    share_buffers(model, world)  # or each rank would measure another model
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    correct = torch.zeros((), dtype=torch.int64, device=world.device)
    count = 0
    for batch in loader:
        if stop.requested:
            break
        images, labels = to_device(batch, world.device, channels_last=channels_last)
        logits = model(images)
        loss_sum += cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(labels)
    loss, right, counted, stopped = world.sum([loss_sum.item(), correct.item(), count, stop.requested])
    return None if stopped else (loss / counted, right / counted, int(counted))
