"""Checks of a config against this machine, in words, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypedDict

from ddp_core.catalog import DATASETS, count_image_folder
from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.runs import gpus, leases
from ddp_core.split import split
from ddp_core.telemetry.nvml import Report


class Finding(TypedDict):
    """One thing to know before the launch.

    ``error`` means the run cannot work and is refused; ``warning`` that it will not do what was
    meant, or slowly; ``info`` is what was found.
    """

    level: Literal["error", "warning", "info"]
    field: str | None
    message: str


def preflight(config: RunConfig, found: Report | None = None) -> list[Finding]:
    """Check a config against this machine.

    Args:
        config: What to launch.
        found: A look at the GPUs, if there is one already.

    Returns:
        Findings, the errors first.
    """
    found = found if found is not None else gpus.report()
    findings = [*_check_gpus(config, found), *_check_data(config), *_check_cpu(config)]
    return sorted(findings, key=lambda f: ("error", "warning", "info").index(f["level"]))


def demo_config(found: Report | None = None) -> RunConfig:
    """A config that runs on this machine as it is: one rank on each GPU torch can use, else four on the CPU."""
    found = found if found is not None else gpus.report()
    demo = RunConfig()
    if not gpus.trains_on_gpus(demo, found)[0]:
        return demo
    healthy = sum(gpu["status"] == "ok" for gpu in found["gpus"])
    return demo.model_copy(update={"launch": demo.launch.model_copy(update={"nproc_per_node": max(1, healthy)})})


def dataset_size(config: RunConfig) -> tuple[int, int]:
    """Training and validation samples the config's data set has; zeros for a folder that is not there."""
    training = config.training
    facts = DATASETS[training.dataset]
    if training.dataset == "synthetic":
        return training.synthetic_samples, max(1, training.synthetic_samples // 10)
    if training.dataset == "image_folder":
        root = Path(training.data_dir or "").expanduser()
        return count_image_folder(root / "train")[0], count_image_folder(root / "val")[0]
    return facts.train or 0, facts.val or 0


def split_preview(config: RunConfig) -> dict[str, Any]:
    """How an epoch's samples will be divided among the ranks, for the launch form.

    Returns:
        ``{"train_samples", "val_samples", "per_rank", "padded", "steps_per_epoch", "steps_total",
        "effective_batch", "ranks": [{"rank", "samples", "first": positions in the epoch's order}]}``.
    """
    train, val = dataset_size(config)
    nproc = config.launch.nproc_per_node
    parts = split(train, nproc, config.training.batch_size) if train else None
    return {
        "train_samples": train,
        "val_samples": val,
        "per_rank": parts.per_rank if parts else 0,
        "padded": parts.padded if parts else 0,
        "steps_per_epoch": parts.steps_per_epoch if parts else 0,
        "steps_total": parts.steps_per_epoch * config.training.epochs if parts else 0,
        "effective_batch": config.effective_batch,
        "ranks": [
            {"rank": rank, "samples": parts.per_rank, "first": parts.first_indices(rank)} for rank in range(nproc)
        ]
        if parts
        else [],
    }


def _error(field: str, message: str) -> Finding:
    return {"level": "error", "field": field, "message": message}


def _warning(field: str, message: str) -> Finding:
    return {"level": "warning", "field": field, "message": message}


def _check_gpus(config: RunConfig, found: Report) -> list[Finding]:
    launch = config.launch
    names = sorted({gpu["name"] or "unnamed GPU" for gpu in found["gpus"]})
    machine = f"{len(found['gpus'])} × {', '.join(names)}, driver {found['driver']}" if names else ""
    cuda, why_not = gpus.trains_on_gpus(config, found)
    if launch.device == "cuda" and not cuda:
        return [_error("launch.device", f"CUDA was asked for, but {why_not}")]
    wanted: list[str] | None = None
    if isinstance(launch.gpus, tuple):
        try:
            wanted = gpus.resolve(launch.gpus, found)
        except UserError as error:
            return [_error(error.field or "launch.gpus", error.message)]
    if not cuda:
        said = (
            f"{machine}; training on CPU with gloo: {why_not}" if machine else f"training on CPU with gloo: {why_not}"
        )
        # Hiding that a GPU machine trains on its CPU would cost somebody a day.
        loud = bool(found["gpus"]) and launch.device == "auto" and launch.gpus != "none"
        return [{"level": "warning" if loud else "info", "field": "launch.device", "message": said}]
    available = len(wanted) if wanted is not None else len(found["gpus"])
    if launch.nproc_per_node > available:
        return [
            _error(
                "launch.nproc_per_node",
                f"{launch.nproc_per_node} processes, but {available} GPU{'s' * (available != 1)}: NCCL needs one GPU "
                "per process; lower nproc_per_node or train on cpu",
            )
        ]
    findings: list[Finding] = [{"level": "info", "field": "launch.device", "message": f"{machine}; training on CUDA"}]
    if wanted is not None:
        on_gpu = gpus.processes()
        by_uuid = {gpu["uuid"]: gpu["index"] for gpu in found["gpus"]}
        for uuid in wanted:
            if on_gpu.get(uuid) and leases.holder(uuid) is None:
                who = ", ".join(gpus.describe_process(p) for p in on_gpu[uuid])
                findings.append(_warning("launch.gpus", f"GPU {by_uuid[uuid]} is used by {who}"))
    return findings


def _check_data(config: RunConfig) -> list[Finding]:
    training = config.training
    if training.dataset != "image_folder":
        return []
    root = Path(training.data_dir or "").expanduser()
    if not root.is_dir():
        return [_error("training.data_dir", f"there is no folder {root}")]
    findings = []
    for part in ("train", "val"):
        images, classes = count_image_folder(root / part)
        if images == 0:
            findings.append(
                _error("training.data_dir", f"{root / part} has no images; expected {part}/<class>/<image>")
            )
        elif classes == 1 and part == "train":
            findings.append(_warning("training.data_dir", f"{root / part} has only one class"))
    return findings


def _check_cpu(config: RunConfig) -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    workers = config.training.num_workers * config.launch.nproc_per_node
    processes = config.launch.nproc_per_node + workers
    if processes > 4 * cores:
        return [
            _warning(
                "training.num_workers" if workers else "launch.nproc_per_node",
                f"{processes} processes on {cores} cores: they will wait for each other",
            )
        ]
    return []
