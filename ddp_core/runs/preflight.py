"""Checks of a config against this machine, in words, before anything starts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal, TypedDict

from ddp_core.catalog import DATASETS, count_image_folder
from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.runs import gpus, leases
from ddp_core.runs.torch_probe import probe_compile
from ddp_core.split import auto_workers, split
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
    cuda, why_not = gpus.trains_on_gpus(config, found)
    findings = [
        *_check_gpus(config, found, cuda, why_not),
        *_check_device(config, cuda, why_not),
        *_check_data(config),
        *_check_checkpoint(config),
        *_check_cpu(config),
    ]
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


def scaled_lr(config: RunConfig) -> float:
    """The learning rate after ``lr_scaling``, as the training will have it."""
    t = config.training
    ratio = config.effective_batch / _lr_batch(config)
    return t.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[t.lr_scaling]


def _lr_batch(config: RunConfig) -> int:
    t = config.training
    return t.batch_size if t.lr_batch == "auto" else t.lr_batch


def split_preview(config: RunConfig) -> dict[str, Any]:
    """How an epoch's samples will be divided among the ranks, for the launch form.

    Returns:
        ``{"train_samples", "val_samples", "per_rank", "padded", "dropped", "steps_per_epoch", "steps_total",
        "effective_batch", "lr": after scaling, "lr_batch": what it was found for, "ranks": [{"rank",
        "samples", "first": positions in the epoch's order}]}``.
    """
    training, nproc = config.training, config.launch.nproc_per_node
    train, val = dataset_size(config)
    parts = split(train, nproc, training.batch_size, accumulation=training.accumulation, drop_last=training.drop_last)
    return {
        "train_samples": train,
        "val_samples": val,
        "per_rank": parts.per_rank,
        "padded": parts.padded,
        "dropped": parts.dropped,
        "steps_per_epoch": parts.steps_per_epoch,
        "steps_total": parts.steps_per_epoch * training.epochs,
        "effective_batch": config.effective_batch,
        "lr": scaled_lr(config),
        "lr_batch": _lr_batch(config),
        "ranks": [
            {"rank": rank, "samples": parts.per_rank, "first": parts.first_indices(rank)} for rank in range(nproc)
        ]
        if train
        else [],
    }


def _error(field: str, message: str) -> Finding:
    return {"level": "error", "field": field, "message": message}


def _warning(field: str, message: str) -> Finding:
    return {"level": "warning", "field": field, "message": message}


def _check_gpus(config: RunConfig, found: Report, cuda: bool, why_not: str) -> list[Finding]:
    launch = config.launch
    names = sorted({gpu["name"] or "unnamed GPU" for gpu in found["gpus"]})
    machine = f"{len(found['gpus'])} × {', '.join(names)}, driver {found['driver']}" if names else ""
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


def _check_device(config: RunConfig, cuda: bool, why_not: str) -> list[Finding]:
    """Check what not every device can do."""
    findings = []
    if not cuda and config.training.precision == "fp16":
        findings.append(
            _error("training.precision", f"fp16 needs CUDA, and this would train on the CPU ({why_not}); use bf16")
        )
    if not cuda and config.ddp.sync_batchnorm:
        findings.append(
            _error("ddp.sync_batchnorm", f"SyncBatchNorm needs CUDA, and this would train on the CPU ({why_not})")
        )
    if config.training.compile and (problem := probe_compile("cuda" if cuda else "cpu", config.launch.env)):
        findings.append(_error("training.compile", f"torch.compile cannot work here: {problem}"))
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
        elif part == "train":
            if classes == 1:
                findings.append(_warning("training.data_dir", f"{root / part} has only one class"))
            findings += _check_split(config, images)
    return findings


def _check_split(config: RunConfig, samples: int) -> list[Finding]:
    """What the config checks itself for data sets whose size it knows."""
    training, nproc = config.training, config.launch.nproc_per_node
    parts = split(samples, nproc, training.batch_size, drop_last=training.drop_last)
    if parts.per_rank == 0:
        return [_error("training.drop_last", f"{samples} images for {nproc} processes leave nothing with drop_last")]
    if training.accumulation > parts.batches_per_epoch:
        return [
            _error(
                "training.accumulation",
                f"an epoch has only {parts.batches_per_epoch} batches on each rank, so {training.accumulation} of them "
                "cannot be added up; lower accumulation or batch_size",
            )
        ]
    return []


def _check_checkpoint(config: RunConfig) -> list[Finding]:
    if config.checkpoints.resume_from is None:
        return []
    path = Path(config.checkpoints.resume_from).expanduser()
    if not path.exists():
        return [_error("checkpoints.resume_from", f"there is no checkpoint or run folder {path}")]
    if path.is_dir() and not checkpoint_files(path):
        return [_error("checkpoints.resume_from", f"the folder {path} holds no checkpoint (model_epoch….pth)")]
    return []


def _check_cpu(config: RunConfig) -> list[Finding]:
    cores, ranks, each = len(os.sched_getaffinity(0)), config.launch.nproc_per_node, config.training.num_workers
    workers = ranks * (auto_workers(cores, ranks) if each == "auto" else each)
    processes = ranks + workers
    if processes > 4 * cores:
        return [
            _warning(
                "training.num_workers" if workers else "launch.nproc_per_node",
                f"{processes} processes on {cores} cores: they will wait for each other",
            )
        ]
    return []
