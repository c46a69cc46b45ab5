"""The exact torchrun command of a run and the environment it starts with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_core.config import RunConfig, is_torchrun_variable
from ddp_core.runs.processes import MARK_VARIABLE, RUN_DIR_VARIABLE
from ddp_core.runs.store import RunDir


def torchrun_command(config: RunConfig, run_dir: Path, attempt_base: int = 0) -> list[str]:
    """Build the command that starts all ranks of a run.

    ``--standalone`` gives every run an endpoint of its own on a free port, so two runs never meet.

    Args:
        config: What to launch.
        run_dir: The run's directory; torchrun keeps each rank's output below it.
        attempt_base: The attempt this torchrun begins with; it counts its own from 0 again.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(config.launch.nproc_per_node),
        "--max-restarts",
        str(config.launch.max_restarts),
        "--log-dir",
        str(RunDir(run_dir).torchrun_logs(attempt_base)),
        "--redirects",
        "3",
        "-m",
        "ddp_core.training",
    ]


def omp_num_threads(config: RunConfig) -> int:
    """CPU threads of each rank: as configured, or the cores this process may use over the ranks."""
    if config.launch.omp_num_threads != "auto":
        return config.launch.omp_num_threads
    return max(1, len(os.sched_getaffinity(0)) // config.launch.nproc_per_node)


def torchrun_environment(
    config: RunConfig,
    run_dir: Path,
    *,
    mark: str,
    gpus: Sequence[str],
    attempt_base: int = 0,
    resume_from: str | None = None,
    inherited: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Build the environment of torchrun and its ranks.

    What an outer torchrun left behind is dropped, or the ranks would try to join that one.

    Args:
        config: What to launch.
        run_dir: The run's directory.
        mark: The run's mark, inherited by every descendant.
        gpus: UUIDs of the GPUs the ranks may see; none hides them all.
        attempt_base: The attempt this torchrun begins with.
        resume_from: The checkpoint to continue from, if not from the newest whole one.
        inherited: The environment to start from.
    """
    # DDP_ is ours: a run that is launched from inside another one must not carry its mark.
    kept = {k: v for k, v in inherited.items() if not is_torchrun_variable(k) and not k.startswith("DDP_")}
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",  # what a rank prints is in its log when it dies
        **config.launch.env,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(omp_num_threads(config)),
        # The supervisor escalates after the run's own grace; torchrun must not cut it short.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(config.launch.stop_grace_s) + 30),
        RUN_DIR_VARIABLE: str(run_dir),
        "DDP_ATTEMPT_BASE": str(attempt_base),
        **({"DDP_RESUME_FROM": resume_from} if resume_from else {}),
        MARK_VARIABLE: mark,
    }
