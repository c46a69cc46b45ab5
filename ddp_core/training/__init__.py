"""The training that runs inside each rank: ``python -m ddp_core.training`` under torchrun.

Importing this package is cheap; torch comes in with its modules. :mod:`~ddp_core.training.loop`
is the place to start reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def spawn(fn: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Run a function as ``nproc`` ranks on this machine, without torchrun: for notebooks and tests.

    Each rank is a process of its own with torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), so a function that joins a process group ``env://`` works as it does under torchrun.
    The port is a free one. If a rank fails the others are ended.

    Args:
        fn: What each rank calls. It must be importable (from a file), except in a notebook.
        nproc: Number of ranks.
        *args: Arguments of ``fn``, the same for each.

    Returns:
        What ``fn`` returned (anything that can be pickled), in order of rank.

    Raises:
        UserError: Under torchrun, where each rank would start ``nproc`` more, or in a notebook that uses CUDA already.
        torch.multiprocessing.ProcessRaisedException: With the traceback of the rank that failed first.
    """
    from ddp_core.training.spawning import spawn

    return spawn(fn, nproc, *args)
