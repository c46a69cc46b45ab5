"""What is trained and how: the sections ``training``, ``ddp``, ``checkpoints`` and ``watch``."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ddp_core.catalog import BUILTIN_MODELS, SUGGESTED_MODELS, is_model_name
from ddp_core.config.section import FieldError, Section

DatasetName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"]


class TrainingConfig(Section):
    """What the built-in training trains, and how."""

    model: str = "cnn"
    """cnn, mlp, or a torchvision classification model such as resnet18; its ends are fitted to the data."""

    dataset: DatasetName = "digits"
    """Which data set to train on."""

    data_dir: str | None = None
    """Folder of the data: where downloads go (default: data/ under the current folder), or image_folder's own."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 60
    """How often to go through the training set."""

    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Samples per process and backward. Effective batch = this × processes × accumulation."""

    accumulation: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Batches whose gradients are added up before each optimizer step; the ranks exchange them only then."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The optimizer: sgd (with Nesterov momentum 0.9) or adamw."""

    lr: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.003
    """Learning rate, before any scaling. With lr_scaling none it is used as it is."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How lr follows the effective batch: none, linear (twice the batch, twice the rate) or sqrt."""

    lr_batch: Literal["auto"] | Annotated[int, Field(ge=1, le=100_000_000)] = "auto"
    """The batch that lr was found for, which lr_scaling starts from. Auto: batch_size, the batch of one GPU."""

    schedule: Literal["constant", "cosine", "step"] = "constant"
    """How the learning rate goes on after the warm-up: constant, cosine (down to 0 at the end) or step."""

    warmup_epochs: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] = 0.0
    """Epochs over which the learning rate rises from 0 to its value, such as 0.5 or 5."""

    step_epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    """With the step schedule: epochs between two steps."""

    step_factor: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.1
    """With the step schedule: what each step multiplies the learning rate by."""

    weight_decay: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 5e-4
    """Weight decay of the optimizer."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Share of each label that is spread over all classes. Validation loss is measured without it."""

    clip_grad_norm: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Longer gradients are scaled to this norm before each optimizer step. Empty: no clipping."""

    ema_decay: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Keep a moving average of the weights with this decay, such as 0.999, and validate that. Empty: none."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """What all ranks do when a loss or gradient is NaN or infinite: stop (after a checkpoint) or skip the step and
    count it."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward: fp32, bf16 (autocast), or fp16 (autocast with loss scaling; CUDA only)."""

    channels_last: bool = False
    """Keep images and convolutions in channels_last layout, faster on GPUs with fp16 or bf16."""

    compile: bool = False
    """Compile the model with torch.compile: the first steps take minutes, later ones less time."""

    early_stopping: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """End when validation loss has not improved for this many epochs. Empty: go through all epochs."""

    max_minutes: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    """End, with a checkpoint, after this many minutes of training. Empty: no limit."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and of the order of the samples."""

    drop_last: bool = False
    """When samples do not divide evenly among the ranks, leave the last few of an epoch's order out. Off: a few are
    seen twice."""

    num_workers: Literal["auto"] | Annotated[int, Field(ge=0, le=256)] = 0
    """DataLoader worker processes of each rank. 0 loads in the training process, right for small data; auto: from
    the cores each rank has."""

    image_size: Annotated[int, Field(ge=4, le=4096)] | None = None
    """Resize images to this many pixels square. Empty: as the data set has them (image_folder: 224, synthetic: 32)."""

    synthetic_samples: Annotated[int, Field(ge=2, le=100_000_000)] = 10_000
    """Number of made-up training images of the synthetic data set; a tenth as many again for validation."""

    @field_validator("model")
    @classmethod
    def _model_exists(cls, value: str) -> str:
        if not is_model_name(value):
            near = difflib.get_close_matches(value, [*BUILTIN_MODELS, *SUGGESTED_MODELS], n=1, cutoff=0.6)
            raise ValueError(f"unknown model {value!r}{f'; did you mean {near[0]}?' if near else ''}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.dataset == "image_folder" and not self.data_dir:
            raise FieldError("training.data_dir", "image_folder needs data_dir, the folder that holds train/ and val/")
        if self.warmup_epochs > self.epochs:
            raise FieldError(
                "training.warmup_epochs",
                f"a warm-up of {self.warmup_epochs:g} epochs does not end within {self.epochs} epochs",
            )
        return self


class DdpConfig(Section):
    """How DistributedDataParallel wraps the model and exchanges gradients."""

    find_unused_parameters: bool = False
    """Look through the graph in every step for parameters that took no part. It costs time: only for models that
    leave some out."""

    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way, so that DDP can prepare for it."""

    gradient_as_bucket_view: bool = True
    """Let gradients live inside DDP's communication buckets, which saves a copy and memory of the gradients' size."""

    bucket_cap_mb: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] = 25.0
    """MiB of gradients that are exchanged at a time. Smaller ones start earlier, larger ones cost less each."""

    sync_batchnorm: bool = False
    """Let BatchNorm count over the samples of all ranks, for small batches. CUDA only, and slower."""

    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    """Exchange gradients in half precision: half the traffic, less exact sums."""


class CheckpointsConfig(Section):
    """When checkpoints are written, which are kept, and what a run continues from."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Also write one in the middle of an epoch, after every so many optimizer steps."""

    every_minutes: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    """Also write one in the middle of an epoch, when so many minutes have passed since the last one."""

    keep: Annotated[int, Field(ge=1, le=10_000)] = 3
    """How many of the newest checkpoints to keep. Epochs get one each, unless they are too quick for it."""

    keep_best: bool = True
    """Also keep the one with the lowest validation loss, which the link best names."""

    resume_from: str | None = None
    """A checkpoint (or a run's folder: its newest) to continue from: weights, optimizer, position, random numbers."""


class WatchConfig(Section):
    """Checks, while training, that the ranks still do the same work."""

    enabled: bool = True
    """Compare weights, samples and batch counts over the ranks, and log each rank's own gradient norm."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 100
    """Optimizer steps between two comparisons; one more at the end of each epoch."""


def accept_old_names(values: Any) -> Any:
    """Read a config of an earlier version: ``training.keep_checkpoints`` has become ``checkpoints.keep``."""
    if isinstance(values, dict) and isinstance(values.get("training"), dict):
        training = dict(values["training"])
        checkpoints = values.get("checkpoints")
        if (
            "keep_checkpoints" in training
            and isinstance(checkpoints, dict | None)
            and "keep" not in (checkpoints or {})
        ):
            keep = training.pop("keep_checkpoints")
            return {**values, "training": training, "checkpoints": {**(checkpoints or {}), "keep": keep}}
    return values
