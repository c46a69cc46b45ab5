"""RunConfig, and the checks that look at more than one of its sections."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

from ddp_core.catalog import DATASETS
from ddp_core.config.launch import LaunchConfig
from ddp_core.config.section import FieldError, Section
from ddp_core.config.training import CheckpointsConfig, DdpConfig, TrainingConfig, WatchConfig, accept_old_names
from ddp_core.split import split

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME_LIMIT = 60


class RunConfig(Section):
    """Everything that defines a run. Frozen; ``config.yaml`` of a run directory is exactly this."""

    name: str = "digits"
    """Name of the run; its directory is the name and a number, such as digits-1."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """How the processes are started and ended."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """What is trained, and how."""

    ddp: DdpConfig = Field(default_factory=DdpConfig)
    """How the model is wrapped and gradients are exchanged."""

    checkpoints: CheckpointsConfig = Field(default_factory=CheckpointsConfig)
    """When checkpoints are written, which are kept, and what to continue from."""

    watch: WatchConfig = Field(default_factory=WatchConfig)
    """Checks that the ranks still do the same work."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, values: Any) -> Any:
        return accept_old_names(values)

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, value: str) -> str:
        if len(value) > NAME_LIMIT:
            raise ValueError(f"has {len(value)} characters; at most {NAME_LIMIT} are allowed")
        if not NAME_PATTERN.fullmatch(value):
            raise ValueError(
                f"{value!r} cannot name a run; use letters, digits, '-', '_' and '.', beginning with a letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.launch.device == "cpu":
            if self.training.precision == "fp16":
                raise FieldError(
                    "training.precision",
                    "fp16 needs CUDA: on the CPU it is slow and its loss scaling untested; use bf16",
                )
            if self.ddp.sync_batchnorm:
                raise FieldError("ddp.sync_batchnorm", "SyncBatchNorm works on CUDA only; train without it on the CPU")
        if self.ddp.static_graph and self.ddp.find_unused_parameters:
            raise FieldError(
                "ddp.static_graph",
                "static_graph promises that the used parameters never change, find_unused_parameters looks for "
                "those that do; choose one",
            )
        if self.ddp.static_graph and self.training.compile:
            raise FieldError(
                "ddp.static_graph", "static_graph and compile do not go together: compiled DDP splits the graph itself"
            )
        self._fits_the_data()
        return self

    def _fits_the_data(self) -> None:
        training, nproc = self.training, self.launch.nproc_per_node
        samples = training.synthetic_samples if training.dataset == "synthetic" else DATASETS[training.dataset].train
        if samples is None:
            return  # a folder: the training itself says so, when it has counted
        parts = split(samples, nproc, training.batch_size, drop_last=training.drop_last)
        if parts.per_rank == 0:
            raise FieldError(
                "training.drop_last", f"{samples} samples for {nproc} processes leave nothing with drop_last"
            )
        if training.accumulation > parts.batches_per_epoch:
            raise FieldError(
                "training.accumulation",
                f"an epoch has only {parts.batches_per_epoch} batches on each rank, so {training.accumulation} of them "
                "cannot be added up; lower accumulation or batch_size",
            )

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.training.batch_size * self.launch.nproc_per_node * self.training.accumulation


def sections() -> dict[str, type[BaseModel]]:
    """The sections of a config by name, in order."""
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
