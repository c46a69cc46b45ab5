"""Checkpoints: written whole or not at all, and read back only if whole."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_core.checkpoint_files import checkpoint_files, checkpoint_name
from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training.distributed import World


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        epoch: The epoch, counted from 1, that is being trained or was trained last.
        step: Optimizer steps done in the whole run.
        samples_consumed: Samples of this epoch's order that all ranks together have had.
        epoch_done: Whether the epoch was trained and validated to its end.
    """

    epoch: int = 1
    step: int = 0
    samples_consumed: int = 0
    epoch_done: bool = False

    def advanced(self, samples: int) -> Position:
        """Give the position one step and this many samples later."""
        return replace(self, step=self.step + 1, samples_consumed=self.samples_consumed + samples)

    def finished_epoch(self) -> Position:
        """Give the position after the last step and the validation of this epoch."""
        return replace(self, epoch_done=True)

    def next_epoch(self) -> Position:
        """Give the position at the beginning of the epoch after this one."""
        return Position(epoch=self.epoch + 1, step=self.step)


class Checkpoints:
    """The checkpoints of one run directory, written by rank 0.

    After an epoch there is ``model_epoch<k>.pth``; a stop in the middle of an epoch leaves
    ``model_epoch<k>_step<s>.pth``. ``latest`` is a link to the newest whole one.

    Quick epochs do not get one each: an epoch's checkpoint is left out while writing them has
    taken more than a twentieth of the time. The first epoch's, the last one's and the one of a stop are
    always written.

    Args:
        run_dir: The run directory.
        config: Goes into each checkpoint; ``checkpoints.keep`` of them are kept.
        model: The bare model, so that names carry no ``module.``.
        optimizer: The optimizer.
        world: All ranks.
        log: This rank's log.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        log: RankLog,
    ) -> None:
        self._dir = run_dir
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._log = log
        self._next_write = 0.0  # time.monotonic()
        self._rng: list[dict[str, torch.Tensor]] | None = None

    def save(self, at: Position, *, always: bool = False) -> None:
        """Write a checkpoint; every rank must call this, for each one's random numbers go in.

        A disk that is full or gone is said in the log, and training goes on.

        Args:
            at: How far the run is.
            always: Write it even if the last one was a moment ago.
        """
        rng = self._world.gather(_random_state(self._world.device))
        if self._world.rank != 0 or not (always or time.monotonic() >= self._next_write):
            return
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            **asdict(at),
            "world_size": self._world.size,
            "rng": rng,
            "config": self._config.model_dump(mode="json"),
            "torch": str(torch.__version__),  # a class of its own, which weights_only would refuse,
        }
        name = checkpoint_name(at.epoch, None if at.epoch_done else at.step)
        began = time.monotonic()
        try:
            write_atomically(self._dir / name, state)
            _link_latest(self._dir, name)
            self._remove_old()
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
            self._log.event("warning", message=f"could not write the checkpoint {name}: {error}")
            return
        took = time.monotonic() - began
        self._next_write = time.monotonic() + 19 * took
        self._log.event("checkpoint", path=name, epoch=at.epoch, step=at.step, seconds=round(took, 4))

    def restore(self) -> Position | None:
        """Load the newest whole checkpoint into model and optimizer; every rank must call this.

        Random numbers are to be restored when everything else is set up, by the returned
        position's checkpoint: see :meth:`restore_random_state`.

        Returns:
            Where the run stood, or None if there is no whole checkpoint.
        """
        name = self._world.broadcast(self._newest_whole() if self._world.rank == 0 else None)
        if name is None:
            if self._world.rank == 0:
                self._log.event("warning", message="there is no whole checkpoint to continue from: starting anew")
            return None
        state = read(self._dir / name)
        try:
            self._model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(f"{name} is not a checkpoint of this model: {error}") from None
        self._optimizer.load_state_dict(state["optimizer"])
        self._rng = state["rng"]
        at = Position(state["epoch"], state["step"], state["samples_consumed"], state["epoch_done"])
        self._log.event("resumed", checkpoint=name, step=at.step, epoch=at.epoch)
        return at.next_epoch() if at.epoch_done else at

    def restore_random_state(self) -> None:
        """Give this rank back its random numbers; with another number of ranks there is none to give back."""
        if self._rng is not None and len(self._rng) == self._world.size:
            _set_random_state(self._rng[self._world.rank], self._world.device)

    def _newest_whole(self) -> str | None:
        for leftover in self._dir.glob(".model_epoch*.tmp"):  # of a rank that was killed while writing
            leftover.unlink(missing_ok=True)
        for path in (file.path for file in reversed(checkpoint_files(self._dir))):
            problem = damage(path)
            if problem is None:
                _link_latest(self._dir, path.name)
                return path.name
            self._log.event("warning", message=f"{path.name} is damaged ({problem}); trying the one before")
        return None

    def _remove_old(self) -> None:
        for file in checkpoint_files(self._dir)[: -self._config.checkpoints.keep]:
            file.path.unlink(missing_ok=True)


def write_atomically(path: Path, state: Any) -> None:
    """Save so that ``path`` is always either as before or whole, even if the machine loses power."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, as plain data: no code in it is run."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def damage(path: Path) -> str | None:
    """Tell what is wrong with a checkpoint file, or None if it is whole.

    torch.load does not compare checksums (its zip reader is built without), so a flipped bit would
    become a weight: they are compared here first.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"{bad} does not match its checksum"
        missing = {"model", "optimizer", "epoch", "step", "samples_consumed", "epoch_done", "rng"} - read(path).keys()
    except Exception as error:  # whatever a damaged file makes of the reader
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'cannot be read'}"
    return f"it lacks {', '.join(sorted(missing))}" if missing else None


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _link_latest(folder: Path, name: str) -> None:
    temporary = folder / ".latest.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(folder / "latest")
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
