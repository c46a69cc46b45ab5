"""RunConfig: the one schema behind the launch form, the YAML file and the ``ddp`` command.

A field's description is the form's help text and the command line's words, so it is written for
the person who fills it in. Cross-field checks that need no look at the machine are here; those
that do (which GPUs exist, whether torch can use them) are in :mod:`ddp_core.runs.preflight`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ddp_core.catalog import BUILTIN_MODELS, SUGGESTED_MODELS, is_model_name
from ddp_core.errors import UserError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME_LIMIT = 60

DatasetName = Literal["digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"]


class _Section(BaseModel):
    """Base of every section: frozen, and a key that is not a field is an error, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes and on as true, and pydantic would take that for the number 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"should not be {str(value).lower()}; a text needs quotes around it")
        return value


class LaunchConfig(_Section):
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
            raise ValueError("device is cuda but gpus is none; choose GPUs or train on cpu")
        if isinstance(self.gpus, tuple) and self.device != "cpu" and self.nproc_per_node > len(self.gpus):
            raise ValueError(
                f"{self.nproc_per_node} processes on {len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)}: "
                "NCCL needs one GPU per process; lower nproc_per_node or add GPUs"
            )
        return self


class TrainingConfig(_Section):
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
    """Samples per process and step. Effective batch = this × processes."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The optimizer: sgd (with Nesterov momentum 0.9) or adamw."""

    lr: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 0.003
    """Learning rate, for the effective batch as it is; it is not scaled by the number of processes."""

    weight_decay: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 5e-4
    """Weight decay of the optimizer."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights and of the order of the samples."""

    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """DataLoader worker processes of each rank. 0 loads in the training process, right for small data."""

    image_size: Annotated[int, Field(ge=4, le=4096)] | None = None
    """Resize images to this many pixels square. Empty: as the data set has them (image_folder: 224, synthetic: 32)."""

    synthetic_samples: Annotated[int, Field(ge=2, le=100_000_000)] = 10_000
    """Number of made-up training images of the synthetic data set; a tenth as many again for validation."""

    keep_checkpoints: Annotated[int, Field(ge=1, le=10_000)] = 3
    """How many of the newest checkpoints to keep. Epochs get one each, unless they are too quick for it."""

    @field_validator("model")
    @classmethod
    def _model_exists(cls, value: str) -> str:
        if not is_model_name(value):
            raise ValueError(f"unknown model {value!r}{_nearest(value, [*BUILTIN_MODELS, *SUGGESTED_MODELS])}")
        return value

    @model_validator(mode="after")
    def _fits_the_data(self) -> TrainingConfig:
        if self.dataset == "image_folder" and not self.data_dir:
            raise ValueError("image_folder needs data_dir, the folder that holds train/ and val/")
        return self


class RunConfig(_Section):
    """Everything that defines a run. Frozen; ``config.yaml`` of a run directory is exactly this."""

    name: str = "digits"
    """Name of the run; its directory is the name and a number, such as digits-1."""

    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    """How the processes are started and ended."""

    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """What is trained, and how."""

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

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.training.batch_size * self.launch.nproc_per_node


def is_torchrun_variable(name: str) -> bool:
    """Tell whether torchrun sets this environment variable itself or reads it as an option."""
    return name in ("RANK", "WORLD_SIZE", "ROLE_NAME") or name.startswith(
        ("MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_")
    )


def from_yaml(text: str, *, source: str = "config") -> RunConfig:
    """Read a RunConfig from YAML.

    Args:
        text: The YAML document.
        source: What to call it in an error, such as the file's name.

    Raises:
        UserError: Naming the line for bad YAML, or the field for a bad value.
    """
    return from_dict(parse_yaml(text, source=source))


def parse_yaml(text: str, *, source: str = "config") -> dict[str, Any]:
    """Parse YAML into a mapping; UserError, with the line, if it is not one."""
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
        raise UserError(f"{source}{where} is not valid YAML: {problem}") from None
    except ValueError as error:  # a date that does not exist
        raise UserError(f"{source} is not valid YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{source} is not a config: it is nested too deeply") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UserError(f"{source} must be a mapping of fields, not {_kind(document)}")
    return document


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, and a key that stands twice is an error: YAML itself would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {key.value} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig; UserError lists every bad field, with the nearest right name of a mistyped one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = field_errors(error)
        first = next(iter(problems))
        lines = [f"{problems[first]}", *(f"{field}: {text}" for field, text in problems.items() if field != first)]
        raise UserError("; ".join(lines), field=first or None) from None


def field_errors(error: ValidationError) -> dict[str, str]:
    """Turn pydantic's errors into one sentence per dotted field name, in the config's own words."""
    problems: dict[str, str] = {}
    for item in error.errors():
        # A union adds the tried branch to the location ("gpus", "literal['auto','none']"): cut there.
        path = _field_path(item["loc"])
        field = ".".join(path)
        if item["type"] == "extra_forbidden":
            section, key = path[:-1], path[-1]
            text = f"unknown field{_nearest(key, _fields_of(section), section)}"
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
        elif item["type"] in ("float_parsing", "int_parsing", "float_type", "int_type", "int_from_float"):
            kind = "a whole number" if item["type"].startswith("int") else "a number"
            text = f"must be {kind}, not {_short(item['input'])}"
        elif item["type"] == "model_type":
            text = f"must be a section with fields of its own, not {_short(item['input'])}"
        elif item["type"] in ("literal_error", "int_type", "tuple_type") and field == "launch.gpus":
            text = "must be auto, none, or a list of GPU indices or UUIDs such as [0, 1]"
        else:
            text = f"{_lower_first(item['msg']).removeprefix('input ')}, not {_short(item['input'])}"
        problems.setdefault(field, text)
    return problems


def to_yaml(config: RunConfig) -> str:
    """Write a RunConfig as YAML; :func:`from_yaml` gives back an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load(path: Path) -> RunConfig:
    """Read a config file; UserError if it cannot be read or is not a RunConfig."""
    return from_dict(load_dict(path))


def load_dict(path: Path) -> dict[str, Any]:
    """Read a YAML file as a mapping, unchecked, so that ``--set`` can still correct it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return parse_yaml(text, source=str(path))


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` overrides, such as ``training.lr=0.1``; values are read as YAML.

    A section may be left out where the field's name is unique: ``lr=0.1`` is ``training.lr=0.1``.

    Raises:
        UserError: For an override without ``=`` or with a path through something that is no section.
    """
    result: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set wants key=value, such as training.lr=0.1, not {override!r}")
        path = _full_path(key.strip())
        target = result
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise UserError(f"{part} is not a section", field=key.strip())
        try:
            target[path[-1]] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            target[path[-1]] = text
    return result


def _full_path(key: str) -> list[str]:
    path = key.split(".")
    if len(path) == 1 and key not in RunConfig.model_fields:
        owners = [s for s in ("launch", "training") if key in _fields_of((s,))]
        if len(owners) == 1:
            return [owners[0], key]
    return path


def _sections() -> dict[str, type[BaseModel]]:
    return {"launch": LaunchConfig, "training": TrainingConfig}


def _fields_of(section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(RunConfig.model_fields)
    model = _sections().get(section[0])
    return list(model.model_fields) if model else []


def _field_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    path: list[str] = []
    for part in loc:
        known = _fields_of(tuple(path)) if len(path) < 2 else []
        if len(path) >= 2 or (path and path[0] not in _sections()):
            break
        if path and str(part) not in known and len(loc) > len(path) + 1:
            break
        path.append(str(part))
    return tuple(path)


def _nearest(word: str, known: list[str], section: tuple[str, ...] = ()) -> str:
    """Words such as ``; did you mean lr?``, looking in the other sections for a misplaced field."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if match:
        return f"; did you mean {match[0]}?"
    for name in _sections():
        if word in _fields_of((name,)) and (name,) != section:
            return f"; {word} belongs under {name}"
    return ""


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", int: "a number", float: "a number"}.get(type(value), type(value).__name__)


def describe_fields() -> list[str]:
    """One line per field: its dotted name, its default and its description, for ``ddp launch --help``."""
    sections: list[tuple[str, type[BaseModel]]] = [("", RunConfig), *((f"{n}.", m) for n, m in _sections().items())]
    return [
        f"{prefix}{name} [{'none' if field.default is None else field.get_default(call_default_factory=True)}]\n"
        f"  {field.description}"
        for prefix, model in sections
        for name, field in model.model_fields.items()
        if prefix or name not in _sections()
    ]
