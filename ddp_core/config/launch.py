"""How a run's processes are started and ended."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ddp_core.config.section import FieldError, Section


class LaunchConfig(Section):
    """How the processes are started and ended."""

    nproc_per_node: Annotated[int, Field(ge=1, le=256)] = 4
    """Number of training processes on this machine, one rank each. On GPUs: one per GPU."""

    gpus: Literal["auto", "none"] | tuple[int | str, ...] = "auto"
    """Which GPUs the run holds: auto (the emptiest), none, or a list of indices (nvidia-smi's numbers) or UUIDs."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train: auto (CUDA where torch can use the run's GPUs, else CPU), cuda, or cpu."""

    share_gpus: bool = False
    """Start even if another run holds these GPUs. Off: the run waits as queued until they are free."""

    max_restarts: Annotated[int, Field(ge=0, le=100)] = 0
    """How often torchrun starts all ranks again after one of them failed."""

    stop_grace_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 10.0
    """Seconds a run has after Stop to end by itself, before what is left of it is killed."""

    timeout_s: Annotated[float, Field(ge=1, le=604_800, allow_inf_nan=False)] = 600.0
    """Seconds a rank waits for the others in one collective before the run fails. It must outlast the slowest of
    them, such as a rank that is still loading data."""

    omp_num_threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads of each rank. Auto: the machine's cores divided by the ranks (torchrun alone would take 1)."""

    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables of the training processes."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus_from_text(cls, value: Any) -> Any:
        if any(isinstance(v, bool) for v in (value if isinstance(value, (list, tuple)) else [value])):
            raise ValueError("must be auto, none, or a list such as [0, 1]")
        # "0,1" is what people type on a command line and in CUDA_VISIBLE_DEVICES.
        if isinstance(value, int):
            return (value,)
        if isinstance(value, str) and value not in ("auto", "none"):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, (list, tuple)):
            return tuple(int(v) if isinstance(v, str) and v.isdecimal() else v for v in value)
        return value

    @field_validator("gpus")
    @classmethod
    def _gpus_make_sense(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            if not value:
                raise ValueError("the list is empty; write none to hold no GPU, or auto")
            for gpu in value:
                if isinstance(gpu, int) and gpu < 0:
                    raise ValueError(f"GPU {gpu} cannot exist; indices start at 0")
                if isinstance(gpu, str) and not gpu.startswith(("GPU-", "MIG-")):
                    raise ValueError(f"{gpu!r} is neither an index nor a UUID (GPU-…)")
            twice = sorted({str(g) for g in value if value.count(g) > 1})
            if twice:
                raise ValueError(f"GPU {', '.join(twice)} is listed twice; each GPU can serve one rank")
        return value

    @field_validator("env")
    @classmethod
    def _env_leaves_torchrun_alone(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(f"{name!r} cannot be the name of an environment variable")
            if is_torchrun_variable(name) or name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                raise ValueError(f"{name} is set by the launcher for each rank; use launch.gpus or nproc_per_node")
            if name.startswith("DDP_"):
                raise ValueError(f"{name}: names that begin with DDP_ are this project's own")
        return value

    @model_validator(mode="after")
    def _enough_gpus(self) -> LaunchConfig:
        if self.device == "cuda" and self.gpus == "none":
            raise FieldError("launch.gpus", "device is cuda but gpus is none; choose GPUs or train on cpu")
        if isinstance(self.gpus, tuple) and self.device != "cpu" and self.nproc_per_node > len(self.gpus):
            raise FieldError(
                "launch.nproc_per_node",
                f"{self.nproc_per_node} processes on {len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)}: "
                "NCCL needs one GPU per process; lower nproc_per_node or add GPUs",
            )
        return self


def is_torchrun_variable(name: str) -> bool:
    """Tell whether torchrun sets this environment variable itself or reads it as an option."""
    return name in ("RANK", "WORLD_SIZE", "ROLE_NAME") or name.startswith(
        ("MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")
    )
