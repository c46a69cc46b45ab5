"""Ranks without torchrun, for notebooks and tests."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from ddp_core.errors import UserError


def spawn(fn: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Run a function as ``nproc`` ranks; see :func:`ddp_core.training.spawn`."""
    if "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            f"torchrun has started this process already as one rank of {os.environ.get('WORLD_SIZE', 'several')}; "
            f"each of them would start {nproc} more. Call the function itself, or start the script with plain python"
        )
    if nproc < 1:
        raise UserError(f"nproc must be at least 1, not {nproc}")
    method = "spawn"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if getattr(fn, "__module__", "") == "__main__" and not (script and Path(script).is_file()):
        # A new interpreter cannot import what was typed into a notebook; a copy of this one has it.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise UserError(
                "CUDA is in use in this notebook already, and its copies could not use it; restart the kernel and "
                "call spawn before anything touches the GPU, or put the function into a file"
            )
        method = "fork"
    # The parent serves the store, on whatever port is free: none can be taken between finding and using it.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with tempfile.TemporaryDirectory(prefix="ddp-spawn-") as folder:
        environ = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc))),
        }
        start_processes(  # type: ignore[no-untyped-call]
            _rank, (fn, args, environ, folder), nprocs=nproc, start_method=method
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(nproc)]


def _rank(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], environ: dict[str, str], folder: str) -> None:
    os.environ.update(environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))  # a copied process has read the variable before
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(fn(*args)))
