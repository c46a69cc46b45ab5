"""How checkpoints of a run are named and found: for the rank that writes them and whoever lists them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"model_epoch(?P<epoch>\d+)(_step(?P<step>\d+))?\.pth")


class CheckpointFile(NamedTuple):
    """A checkpoint by its name.

    Attributes:
        epoch: The epoch it was written in or after, counted from 1.
        step: The optimizer step, for one written in the middle of an epoch; None for the epoch's end.
        path: The file.
    """

    epoch: int
    step: int | None
    path: Path


def checkpoint_name(epoch: int, step: int | None = None) -> str:
    """Name of the checkpoint after an epoch, or in the middle of one at ``step``."""
    return f"model_epoch{epoch}.pth" if step is None else f"model_epoch{epoch}_step{step}.pth"


def checkpoint_files(folder: Path) -> list[CheckpointFile]:
    """List a run's whole checkpoints, the oldest first."""
    found = [
        CheckpointFile(int(match["epoch"]), int(match["step"]) if match["step"] else None, path)
        for path in folder.glob("model_epoch*.pth")
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda file: (file.epoch, file.step is None, file.step or 0))
