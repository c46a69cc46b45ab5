"""What a rank decides and builds before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.checkpoint import Checkpoints, Position
from ddp_core.training.data import Batch, Data, open_data, size_of
from ddp_core.training.distributed import World, choose_device
from ddp_core.training.environment import RankEnvironment
from ddp_core.training.loading import EpochSampler, rank_seed, train_loader, val_loader
from ddp_core.training.models import build_model, count_parameters
from ddp_core.training.optimization import Optimization
from ddp_core.training.schedule import Schedule, scaled_lr
from ddp_core.training.watch import Watch
from ddp_core.training.wrapping import Replica, place, wrap


def device_of(config: RunConfig, here: RankEnvironment, log: RankLog) -> torch.device:
    """Choose this rank's device, and say so when it is not the one that was meant."""
    device, warning = choose_device(config.launch.device, here.local_rank, here.local_world_size)
    if warning and here.rank == 0:
        log.event("warning", message=warning)
    return device


def new_model(config: RunConfig, data: Data, samples: int, world: World) -> nn.Module:
    """Build the model on this rank's device, with the same weights on every rank.

    Args:
        config: The config.
        data: What it will be trained on.
        samples: This rank's samples of an epoch.
        world: All ranks.
    """
    t = config.training
    torch.manual_seed(t.seed)  # DDP would give all of them rank 0's anyway
    model = build_model(t.model, data.shape, data.classes, smallest_batch=(samples - 1) % t.batch_size + 1)
    return place(model, world, config.ddp, channels_last=t.channels_last)


def compiled(ddp: nn.Module) -> nn.Module:
    """Compile a wrapped model.

    Raises:
        UserError: On a Python that torch.compile does not know.
    """
    try:
        return torch.compile(ddp)  # type: ignore[return-value]
    except RuntimeError as error:
        raise UserError(f"the model cannot be compiled here: {error}", field="training.compile") from None


def gpu_uuid(device: torch.device) -> str | None:
    """Give the GPU's UUID in NVML's form, or None on the CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class Patience:
    """Ends the training when validation loss has not improved for some epochs; it is the same on every rank.

    Args:
        epochs: How many; None never ends it.
    """

    def __init__(self, epochs: int | None) -> None:
        self._epochs = epochs
        self._best = float("inf")
        self._waited = 0

    def ends(self, loss: float) -> str | None:
        """Take in an epoch's validation loss; the reason to end, if there is one."""
        self._waited = 0 if loss < self._best else self._waited + 1
        self._best = min(loss, self._best)
        if self._epochs is None or self._waited < self._epochs:
            return None
        return f"early stopping: validation loss has not improved for {self._waited} epochs"

    def state_dict(self) -> dict[str, Any]:
        """The best loss so far and the epochs since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self._best, self._waited = state["best"], state["waited"]


@dataclass(frozen=True)
class Prepared:
    """All that the loop works with.

    Attributes:
        loader: This rank's training batches.
        sampler: Begins each epoch.
        validation: This rank's validation batches.
        model: The bare model.
        validated: The bare model that is validated: the moving average of it, if there is one.
        ddp: The model to train with: wrapped, and compiled if asked for.
        optimization: Optimizer and all around it.
        schedule: The learning rate.
        patience: Early stopping.
        checkpoints: Written by rank 0.
        watch: Compares the ranks.
        at: Where to begin.
    """

    loader: DataLoader[Batch]
    sampler: EpochSampler
    validation: DataLoader[Batch]
    model: nn.Module
    validated: nn.Module
    ddp: nn.Module
    optimization: Optimization
    schedule: Schedule
    patience: Patience
    checkpoints: Checkpoints
    watch: Watch
    at: Position
    _replica: Replica | None

    def own_gradient_norm(self) -> torch.Tensor | None:
        """Norm of this rank's gradient before averaging, on the device; None if it was not measured."""
        norm = self._replica.exchange.own_norm() if self._replica else None
        return None if norm is None else self.optimization.unscaled(norm)

    def ddp_figures(self, step: int) -> dict[str, float]:
        """DDP's own figures, at the steps at which the ranks are compared."""
        return self._replica.figures() if self._replica and self.watch.due(step) else {}


@contextmanager
def prepare(config: RunConfig, here: RankEnvironment, world: World, log: RankLog) -> Iterator[Prepared]:
    """Build everything, in the order that matters, and finish writing checkpoints on every path.

    Data, then the model on its device, then its optimizer, then the checkpoint into both, and only then
    DDP around the model; the random numbers come last, for all of that draws some.
    """
    t = config.training
    data = open_data(t, world)
    loader, sampler = train_loader(data, t, world)
    samples, lr = len(sampler), scaled_lr(config, world.size)
    if samples == 0 or t.accumulation > len(loader):
        raise UserError(
            f"an epoch has only {len(loader)} batches on each rank, too few for an accumulation of {t.accumulation}",
            field="training.accumulation",
        )
    model = new_model(config, data, samples, world)
    optimization = Optimization(model, t, lr, world.device)
    schedule = Schedule(optimization.optimizer, t, lr, sampler.left)
    patience = Patience(t.early_stopping)
    parts = {"model": model, **dict(optimization.parts()), "schedule": schedule, "patience": patience}
    checkpoints = Checkpoints(here.run_dir, config, parts=parts, world=world, log=log)
    try:
        at = checkpoints.restore(here.attempt) or Position()
        ddp = wrap(model, world, torch.zeros(2, *data.shape), config.ddp, measured=config.watch.enabled)
        replica = ddp if isinstance(ddp, Replica) else None
        if replica and config.watch.enabled:
            replica._set_ddp_runtime_logging_sample_rate(config.watch.every_steps)  # type: ignore[no-untyped-call]
        torch.manual_seed(rank_seed(t.seed, world.rank))  # dropout and the like differ between ranks
        checkpoints.restore_random_state()
        watch = Watch(world, log, config, model)
        watch.batches(len(loader))
        steps_per_epoch = -(-len(loader) // t.accumulation)
        log.event(
            "joined",
            device=str(world.device),
            backend=world.backend,
            gpu=gpu_uuid(world.device),
            steps_per_epoch=steps_per_epoch,
            epochs=t.epochs,
            steps_total=steps_per_epoch * t.epochs,
            train_samples=size_of(data.train),
            val_samples=size_of(data.val),
            parameters=count_parameters(model),
            batch_size=t.batch_size,
            accumulation=t.accumulation,
            effective_batch=t.batch_size * t.accumulation * world.size,
            lr=lr,
            precision=t.precision,
        )
        yield Prepared(
            loader=loader,
            sampler=sampler,
            validation=val_loader(data, t, world),
            model=model,
            validated=optimization.ema.model if optimization.ema else model,
            ddp=compiled(ddp) if t.compile else ddp,
            optimization=optimization,
            schedule=schedule,
            patience=patience,
            checkpoints=checkpoints,
            watch=watch,
            at=at,
            _replica=replica,
        )
    finally:
        checkpoints.close()
