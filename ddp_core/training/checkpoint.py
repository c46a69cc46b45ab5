"""Checkpoints: written whole or not at all, and read back only if whole."""

from __future__ import annotations

import contextlib
import math
import os
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

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


REQUIRED = ("model", "optimizer")
"""Parts without which a file is no checkpoint; what else is missing begins anew."""


class _Snapshot(NamedTuple):
    """A state as it was, on the CPU, that training no longer changes."""

    name: str
    at: Position
    state: dict[str, Any]
    stall_s: float
    best: bool


class _Written(NamedTuple):
    snapshot: _Snapshot
    seconds: float
    problem: Exception | None


class Checkpoints:
    """The checkpoints of one run directory, written by rank 0 while training goes on.

    After an epoch there is ``model_epoch<k>.pth``; in the middle of one, and after a stop, there is
    ``model_epoch<k>_step<s>.pth``. ``latest`` is a link to the newest whole one, ``best`` to the one of the
    lowest validation loss.

    Training stands still only while its state is copied; a thread writes the copy. Quick epochs do not
    get one each: an epoch's checkpoint is left out while the last is still being written, or while
    writing has taken more than a twentieth of the time. A best one is kept in memory then, and written
    later. The first epoch's, the last one's and those asked for are always written.

    Args:
        run_dir: The run directory.
        config: Goes into each checkpoint; ``checkpoints`` says when they are written and which are kept.
        parts: What is saved and loaded, by name: the bare ``model``, so that names carry no ``module.``, the
            ``optimizer``, and anything else with ``state_dict`` and ``load_state_dict``.
        world: All ranks.
        log: This rank's log.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, *, parts: Mapping[str, Any], world: World, log: RankLog
    ) -> None:
        self._dir = run_dir
        self._config = config
        self._parts = parts
        self._world = world
        self._log = log
        self._next_write = 0.0  # time.monotonic()
        self._last_saved = time.monotonic()
        self._rng: list[dict[str, torch.Tensor]] | None = None
        self._best_loss = math.inf
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[_Written] | None = None
        self._held: _Snapshot | None = None

    def step(self, at: Position) -> None:
        """Write a checkpoint in the middle of an epoch when it is due; every rank calls this after each step."""
        self._collect()
        options = self._config.checkpoints
        due = options.every_steps is not None and at.step % options.every_steps == 0
        if not due and options.every_minutes is not None:
            # Clocks differ, and all ranks must come: rank 0's decides.
            due = self._world.broadcast(time.monotonic() - self._last_saved >= options.every_minutes * 60)
        if due:
            self.save(at, always=True)

    def save(self, at: Position, *, always: bool = False, loss: float | None = None) -> None:
        """Write a checkpoint; every rank must call this, for each one's random numbers go in.

        A disk that is full or gone is said in the log, and training goes on.

        Args:
            at: How far the run is.
            always: Write it even if the last one was a moment ago.
            loss: Validation loss, after an epoch: the lowest one is kept.
        """
        best = loss is not None and loss < self._best_loss
        if best and loss is not None:
            self._best_loss = loss
        best = best and self._config.checkpoints.keep_best
        rng = self._world.gather(_random_state(self._world.device))
        self._last_saved = time.monotonic()
        self._collect()
        if self._world.rank != 0:
            return
        busy = self._writing is not None or time.monotonic() < self._next_write
        if busy and not (always or best):
            return
        began = time.monotonic()
        if always:
            self._wait()
        name = checkpoint_name(at.epoch, None if at.epoch_done else at.step)
        state = {
            **{part: _on_cpu(it.state_dict()) for part, it in self._parts.items()},
            **asdict(at),
            "best_loss": self._best_loss,
            "world_size": self._world.size,
            "rng": rng,
            "config": self._config.model_dump(mode="json"),
            "torch": str(torch.__version__),  # a class of its own, which weights_only would refuse
        }
        snapshot = _Snapshot(name, at, state, time.monotonic() - began, best)
        if best:
            self._held = None
        if busy and not always:
            self._held = snapshot
        else:
            self._writing = self._writer.submit(self._write, snapshot)

    def close(self) -> None:
        """Wait until what was saved is written, also what is held back."""
        self._wait()
        if self._held:
            self._writing, self._held = self._writer.submit(self._write, self._held), None
            self._wait()
        self._writer.shutdown()

    def _write(self, snapshot: _Snapshot) -> _Written:
        """In the writer's thread."""
        began, problem = time.monotonic(), None
        try:
            write_atomically(self._dir / snapshot.name, snapshot.state)
            # A best one that was held back can be older than what is there.
            _link(self._dir, "latest", checkpoint_files(self._dir)[-1].path.name)
            if snapshot.best:
                _link(self._dir, "best", snapshot.name)
            self._remove_old()
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
            problem = error
        return _Written(snapshot, time.monotonic() - began, problem)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.exception()
            self._collect()

    def _collect(self) -> None:
        """Say what has been written meanwhile, and write what was held back when there is time for it."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing.result(), None
            name, at = done.snapshot.name, done.snapshot.at
            if done.problem is not None:
                self._log.event("warning", message=f"could not write the checkpoint {name}: {done.problem}")
            else:
                self._next_write = time.monotonic() + 19 * done.seconds
                times = {"seconds": round(done.seconds, 4), "stall_s": round(done.snapshot.stall_s, 4)}
                self._log.event("checkpoint", path=name, epoch=at.epoch, step=at.step, **times)
        if self._held and self._writing is None and time.monotonic() >= self._next_write:
            self._writing, self._held = self._writer.submit(self._write, self._held), None

    def restore(self, attempt: int) -> Position | None:
        """Load the checkpoint to continue from, if there is one, into all parts; every rank must call this.

        That is the newest whole one of this run in a further attempt, unless another was asked for
        (``DDP_RESUME_FROM``); in the first attempt it is the config's ``checkpoints.resume_from``. Random numbers
        are restored when everything else is set up: see :meth:`restore_random_state`.

        Returns:
            Where the run stood, or None if it is to start from the beginning.

        Raises:
            UserError: If the checkpoint asked for cannot be used, or is not of this model.
        """
        problem: tuple[str, str | None] | None = None
        path: Path | None = None
        if self._world.rank == 0:
            try:
                path = self._choose(attempt)
            except UserError as error:
                problem = (error.message, error.field)
        problem, path = self._world.broadcast((problem, path))
        if problem:
            raise UserError(*problem)
        if path is None:
            if attempt > 0 and self._world.rank == 0:
                self._log.event("warning", message="there is no whole checkpoint to continue from: starting anew")
            return None
        shown = path.name if path.parent == self._dir else str(path)
        state = read(path)
        self._load(state, shown)
        self._rng, self._best_loss = state["rng"], state.get("best_loss", math.inf)
        at = Position(state["epoch"], state["step"], state["samples_consumed"], state["epoch_done"])
        self._log.event("resumed", checkpoint=shown, step=at.step, epoch=at.epoch)
        return at.next_epoch() if at.epoch_done else at

    def restore_random_state(self) -> None:
        """Give this rank back its random numbers; with another number of ranks there is none to give back."""
        if self._rng is not None and len(self._rng) == self._world.size:
            _set_random_state(self._rng[self._world.rank], self._world.device)

    def _load(self, state: dict[str, Any], shown: str) -> None:
        try:
            self._parts["model"].load_state_dict(state["model"])
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{shown} is not a checkpoint of this model: {reason}", "checkpoints.resume_from") from None
        fresh = [part for part in self._parts if part not in state]
        ours, theirs = self._config.training.optimizer, state["config"].get("training", {}).get("optimizer")
        for part, it in self._parts.items():
            if part == "optimizer" and ours != theirs:
                fresh.append(f"optimizer ({ours} instead of {theirs})")
            elif part != "model" and part in state:
                it.load_state_dict(state[part])
        if fresh and self._world.rank == 0:
            self._log.event("warning", message=f"{shown} has nothing for: {', '.join(fresh)}; these begin anew")

    def _choose(self, attempt: int) -> Path | None:
        """On rank 0: which checkpoint to continue from."""
        for leftover in self._dir.glob(".model_epoch*.tmp"):  # of a rank that was killed while writing
            leftover.unlink(missing_ok=True)
        asked = self._config.checkpoints.resume_from
        if attempt > 0:
            by_hand = os.environ.get("DDP_RESUME_FROM")
            if by_hand and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                path = self._usable(Path(by_hand).expanduser().absolute())
                self._supersede(path, attempt)
                return path
            newest = self._newest_whole(self._dir)
            if newest is not None:
                _link(self._dir, "latest", newest.name)
                return newest
        return self._usable(Path(asked).expanduser().absolute()) if asked else None

    def _usable(self, path: Path) -> Path:
        field = "checkpoints.resume_from"
        if path.is_dir():
            newest = self._newest_whole(path)
            if newest is None:
                raise UserError(f"{path} has no whole checkpoint", field=field)
            return newest
        if not path.exists():
            raise UserError(f"there is no checkpoint {path}", field=field)
        problem = damage(path)
        if problem:
            raise UserError(f"{path} cannot be continued from: {problem}", field=field)
        return path.resolve()

    def _newest_whole(self, folder: Path) -> Path | None:
        for path in (file.path for file in reversed(checkpoint_files(folder))):
            problem = damage(path)
            if problem is None:
                return path
            self._log.event("warning", message=f"{path.name} is damaged ({problem}); trying the one before")
        return None

    def _supersede(self, path: Path, attempt: int) -> None:
        """Move what is newer than a chosen checkpoint of this run aside: the newest must be of this attempt."""
        files = [file.path for file in checkpoint_files(self._dir)]
        newer = files[files.index(path) + 1 :] if path in files else []
        aside = self._dir / "superseded" / f"attempt_{attempt}"
        for old in newer:
            aside.mkdir(parents=True, exist_ok=True)
            old.replace(aside / old.name)
        if path in files:
            _link(self._dir, "latest", path.name)
            if (self._dir / "best").is_symlink() and not (self._dir / "best").exists():
                (self._dir / "best").unlink()

    def _remove_old(self) -> None:
        best = (self._dir / "best").resolve()
        for file in checkpoint_files(self._dir)[: -self._config.checkpoints.keep]:
            if file.path.resolve() != best:
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
        missing = {*REQUIRED, "epoch", "step", "samples_consumed", "epoch_done", "rng"} - read(path).keys()
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


def _on_cpu(state: Any) -> Any:
    """Copy all tensors of a state to the CPU; from a GPU into pinned memory, waiting once for all."""
    waits = False

    def copy(value: Any) -> Any:
        nonlocal waits
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cuda":
            return value.detach().to("cpu", copy=True)
        waits = True
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)

    copied = tree_map(copy, state)
    if waits:
        torch.cuda.synchronize()
    return copied


def _link(folder: Path, link: str, name: str) -> None:
    temporary = folder / f".{link}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(folder / link)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
