"""The training loop. Read from top to bottom: this is what each rank does."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ddp_core import config as run_config
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.checkpoint import Checkpoints, Position
from ddp_core.training.data import Batch, open_data, rank_seed, size_of, train_loader, val_loader
from ddp_core.training.distributed import StopVote, World, choose_device, process_group, share_buffers, wrap
from ddp_core.training.environment import RankEnvironment, StopFlag
from ddp_core.training.metrics import StepLog
from ddp_core.training.models import OPTIMIZERS, build_model, count_parameters


def train(here: RankEnvironment, log: RankLog, stop: StopFlag) -> Literal["finished", "stopped"]:
    """Train as the run's ``config.yaml`` says, from the newest checkpoint if this is not the first attempt."""
    config = run_config.load(here.run_dir / "config.yaml")
    t = config.training
    device, warning = choose_device(config.launch.device, here.local_rank, here.local_world_size)
    if warning and here.rank == 0:
        log.event("warning", message=warning)

    with process_group(here, device) as world:
        data = open_data(t, world)
        loader, sampler = train_loader(data, t, world)
        steps_per_epoch, smallest_batch = len(loader), (len(sampler) - 1) % t.batch_size + 1

        torch.manual_seed(t.seed)  # the same weights on every rank; DDP gives all of them rank 0's anyway
        model = build_model(t.model, data.shape, data.classes, smallest_batch=smallest_batch).to(device)
        optimizer = OPTIMIZERS[t.optimizer](model.parameters(), lr=t.lr, weight_decay=t.weight_decay)

        checkpoints = Checkpoints(here.run_dir, config, model=model, optimizer=optimizer, world=world, log=log)
        at = checkpoints.restore() if here.attempt > 0 else None
        ddp = wrap(model, world, example=torch.zeros(2, *data.shape))
        torch.manual_seed(rank_seed(t.seed, here.rank))  # dropout and the like differ between ranks
        checkpoints.restore_random_state()

        log.event(
            "joined",
            device=str(device),
            backend=world.backend,
            gpu=gpu_uuid(device),
            steps_per_epoch=steps_per_epoch,
            epochs=t.epochs,
            steps_total=steps_per_epoch * t.epochs,
            train_samples=size_of(data.train),
            val_samples=size_of(data.val),
            parameters=count_parameters(model),
            batch_size=t.batch_size,
        )
        if not world.ready(stop):
            return "stopped"

        at = at or Position()
        validation, vote, steps = val_loader(data, t, world), StopVote(stop, world), StepLog(log, device)
        while at.epoch <= t.epochs:
            sampler.begin(at.epoch, at.samples_consumed)
            model.train()
            steps.begin()
            for batch in loader:
                vote.start()
                images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
                steps.mark()
                logits = ddp(images)
                loss = cross_entropy(logits, labels)
                steps.mark()
                loss.backward()  # type: ignore[no-untyped-call]  # DDP averages the gradients over the ranks meanwhile
                steps.mark()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                steps.mark()
                at = at.advanced(len(labels) * world.size)
                stopped = vote.passed()
                correct = (logits.argmax(1) == labels).sum()
                steps.end(at.step, loss, correct, len(labels), epoch=at.epoch, lr=optimizer.param_groups[0]["lr"])
                if stopped:
                    break
            steps.flush()

            result = None if stopped else evaluate(model, validation, world, stop)
            if result is None:
                checkpoints.save(at, always=True)
                return "stopped"
            log.log(at.step, epoch=at.epoch, val_loss=result[0], val_accuracy=result[1])
            at = at.finished_epoch()
            checkpoints.save(at, always=at.epoch == t.epochs)
            at = at.next_epoch()
    return "finished"


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: DataLoader[Batch], world: World, stop: StopFlag
) -> tuple[float, float, int] | None:
    """Measure the model on the whole validation set, each sample once.

    The bare model is used: with DDP's the ranks would have to have equally many batches.

    Args:
        model: The bare model; it is left in evaluation mode.
        loader: This rank's share of the samples.
        world: All ranks.
        stop: If it is set on any rank meanwhile, all of them give up.

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
        images, labels = (tensor.to(world.device, non_blocking=True) for tensor in batch)
        logits = model(images)
        loss_sum += cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(labels)
    loss, right, counted, stopped = world.sum([loss_sum.item(), correct.item(), count, stop.requested])
    return None if stopped else (loss / counted, right / counted, int(counted))


def gpu_uuid(device: torch.device) -> str | None:
    """Give the GPU's UUID in NVML's form, or None on the CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
