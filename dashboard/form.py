"""The launch form and the RunConfig: one in terms of the other, without Streamlit.

The form knows no field by itself. Which fields there are, their help texts, ranges and choices come
from the schema of :class:`ddp_core.config.RunConfig`, so a field that is added there appears here.

A form's *values* are what its widgets hold, by dotted field name: text for anything that is typed
(so that nothing typed is lost, however wrong), a choice's name, or a bool. ``launch.gpus`` is two
widgets: its mode (``auto``, ``none`` or ``choose``) and, under :data:`GPU_LIST`, the chosen ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ddp_core import config as config_module
from ddp_core.catalog import SUGGESTED_MODELS
from ddp_core.config import RunConfig, sections
from ddp_core.errors import UserError

GPU_LIST = "launch.gpus.list"
"""Key of the chosen GPUs among the form's values: indices and UUIDs as text."""

Kind = Literal["text", "number", "choice", "suggest", "checkpoint", "toggle", "gpus", "env"]

# Only where the field's own name does not read well as a label.
_LABELS = {
    "launch.nproc_per_node": "Processes",
    "launch.gpus": "GPUs",
    "launch.share_gpus": "Share GPUs",
    "launch.stop_grace_s": "Stop grace (s)",
    "launch.timeout_s": "Collective timeout (s)",
    "launch.omp_num_threads": "OMP threads",
    "launch.env": "Environment variables",
    "training.dataset": "Data set",
    "training.data_dir": "Data folder",
    "training.accumulation": "Gradient accumulation",
    "training.lr": "Learning rate",
    "training.lr_scaling": "Learning rate scaling",
    "training.lr_batch": "Learning rate found for batch",
    "training.warmup_epochs": "Warm-up epochs",
    "training.step_epochs": "Epochs between steps",
    "training.clip_grad_norm": "Clip gradient norm",
    "training.ema_decay": "EMA decay",
    "training.nonfinite": "On NaN or infinity",
    "training.compile": "torch.compile",
    "training.early_stopping": "Early stopping (epochs)",
    "training.max_minutes": "Time limit (minutes)",
    "training.drop_last": "Drop last samples",
    "training.num_workers": "Loader workers",
    "ddp.gradient_as_bucket_view": "Gradients in buckets",
    "ddp.bucket_cap_mb": "Bucket size (MiB)",
    "ddp.sync_batchnorm": "Sync BatchNorm",
    "checkpoints.every_steps": "Checkpoint every (steps)",
    "checkpoints.every_minutes": "Checkpoint every (minutes)",
    "checkpoints.keep": "Keep checkpoints",
    "checkpoints.keep_best": "Keep the best",
    "watch.enabled": "Watch the ranks",
    "watch.every_steps": "Compare every (steps)",
}


@dataclass(frozen=True)
class FormField:
    """One field of the form.

    Attributes:
        name: Dotted name, such as ``training.lr``.
        label: What stands above the widget.
        help: The field's description, with its range.
        kind: Which widget shows it; a number's is a text field, for some of them may also be ``auto``.
        options: Choices, or suggestions for ``suggest``.
        optional: Whether it may be empty, which is None in the config.
        placeholder: What stands for None.
    """

    name: str
    label: str
    help: str
    kind: Kind
    options: tuple[str, ...] = ()
    optional: bool = False
    placeholder: str = ""


# What None means in a field's own words; elsewhere it is "none".
_PLACEHOLDERS = {
    "training.data_dir": "default",
    "training.image_size": "default",
    "checkpoints.resume_from": "nothing",
}


def _field(section: str, name: str, model: type[BaseModel], schema: Mapping[str, Any]) -> FormField:
    dotted = f"{section}.{name}" if section else name
    info = model.model_fields[name]
    branches = [schema, *schema.get("anyOf", [])]
    types = {branch.get("type") for branch in branches}
    kind: Kind
    options: tuple[str, ...] = ()
    if dotted == "launch.gpus":
        kind = "gpus"
    elif dotted == "training.model":
        kind, options = "suggest", tuple(SUGGESTED_MODELS)
    elif dotted == "checkpoints.resume_from":
        kind = "checkpoint"
    elif "enum" in schema:
        kind, options = "choice", tuple(get_args(info.annotation))
    elif "boolean" in types:
        kind = "toggle"
    elif "object" in types:
        kind = "env"
    else:
        kind = "number" if types & {"integer", "number"} else "text"
    help_text = " ".join(f"{info.description or ''}{_range_words(branches)}".split())
    label = _LABELS.get(dotted) or name.replace("_", " ").capitalize()
    optional = "null" in types
    placeholder = _PLACEHOLDERS.get(dotted, "none") if optional else ""
    return FormField(dotted, label, help_text, kind, options, optional, placeholder)


def _range_words(branches: Sequence[Mapping[str, Any]]) -> str:
    for branch in branches:
        low, above = branch.get("minimum"), branch.get("exclusiveMinimum")
        high, below = branch.get("maximum"), branch.get("exclusiveMaximum")
        low_words = _grouped(low) if low is not None else f"above {_grouped(above)}" if above is not None else None
        high_words = _grouped(high) if high is not None else f"below {_grouped(below)}" if below is not None else None
        if low_words and high_words:
            return f" ({low_words} to {high_words})"
    return ""


def _grouped(value: float) -> str:
    return f"{value:,}".removesuffix(".0")


def _fields() -> dict[str, FormField]:
    found = {}
    models: dict[str, type[BaseModel]] = {"": RunConfig, **sections()}
    for section, model in models.items():
        for name, schema in model.model_json_schema()["properties"].items():
            if section or name not in sections():
                field = _field(section, name, model, schema)
                found[field.name] = field
    return found


FIELDS: dict[str, FormField] = _fields()
"""Every field of RunConfig, by dotted name."""


@dataclass(frozen=True)
class FormGroup:
    """Fields that stand together.

    Attributes:
        key: Short name.
        title: What stands above them.
        fields: Their dotted names.
        open: Whether they are always to be seen; others are under a title that opens.
    """

    key: str
    title: str
    fields: tuple[str, ...]
    open: bool = False


def _group(key: str, title: str, fields: str, *, open: bool = False) -> FormGroup:
    return FormGroup(key, title, tuple(fields.split()), open=open)


GROUPS = (
    _group(
        "run",
        "Run",
        "name training.model training.dataset training.data_dir training.synthetic_samples training.epochs "
        "training.batch_size",
        open=True,
    ),
    _group(
        "processes",
        "Processes and GPUs",
        "launch.nproc_per_node launch.device launch.share_gpus launch.gpus",
        open=True,
    ),
    _group(
        "optimization",
        "Optimization",
        "training.optimizer training.lr training.lr_scaling training.lr_batch training.accumulation "
        "training.schedule training.warmup_epochs training.step_epochs training.step_factor training.weight_decay "
        "training.label_smoothing training.clip_grad_norm training.ema_decay training.nonfinite",
    ),
    _group(
        "speed",
        "Precision and speed",
        "training.precision training.num_workers ddp.bucket_cap_mb ddp.gradient_compression "
        "ddp.gradient_as_bucket_view training.channels_last training.compile",
    ),
    _group(
        "ddp",
        "DDP",
        "launch.timeout_s watch.every_steps watch.enabled training.drop_last ddp.find_unused_parameters "
        "ddp.static_graph ddp.sync_batchnorm",
    ),
    _group(
        "checkpoints",
        "Checkpoints and ending",
        "checkpoints.resume_from checkpoints.keep checkpoints.keep_best checkpoints.every_steps "
        "checkpoints.every_minutes training.early_stopping training.max_minutes launch.max_restarts "
        "launch.stop_grace_s",
    ),
    _group(
        "environment",
        "Environment and data",
        "training.seed training.image_size launch.omp_num_threads launch.env",
    ),
)
"""All fields, in the order in which people look for them."""

# Fields that mean something only while another one has one of these values.
_ONLY_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    "training.step_epochs": ("training.schedule", ("step",)),
    "training.step_factor": ("training.schedule", ("step",)),
    "training.lr_batch": ("training.lr_scaling", ("linear", "sqrt")),
    "training.synthetic_samples": ("training.dataset", ("synthetic",)),
    "watch.every_steps": ("watch.enabled", (True,)),
}


def applies(name: str, values: Mapping[str, Any]) -> bool:
    """Tell whether a field means something beside the form's other values; one that does not keeps its own."""
    other, wanted = _ONLY_WITH.get(name, ("", ()))
    return not other or values[other] in wanted


def changed(values: Mapping[str, Any]) -> set[str]:
    """Names of the fields that apply and differ from their defaults."""
    return {name for name, field in FIELDS.items() if applies(name, values) and _differs(field, values)}


def _differs(field: FormField, values: Mapping[str, Any]) -> bool:
    try:
        return bool(_value(field, values) != _value(field, _DEFAULTS))
    except UserError:  # an environment that cannot be read
        return True


def fill(config: RunConfig) -> dict[str, Any]:
    """The values of a form that shows this config."""
    values: dict[str, Any] = {GPU_LIST: []}
    for field in FIELDS.values():
        value = _get(config, field.name)
        if field.kind == "gpus" and isinstance(value, tuple):
            values[field.name], values[GPU_LIST] = "choose", [str(gpu) for gpu in value]
        elif field.kind == "env":
            values[field.name] = _env_text(value)
        elif field.kind in ("number", "text"):
            values[field.name] = _text(value)
        else:
            values[field.name] = value
    return values


def document(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config the form stands for as nested plain values, unchecked.

    Raises:
        UserError: If the environment's text cannot be read.
    """
    result: dict[str, Any] = {name: {} for name in sections()}
    for field in FIELDS.values():
        section, _, name = field.name.rpartition(".")
        target = result[section] if section else result
        target[name] = _value(field, values)
    return {"name": result.pop("name"), **result}


def read(values: Mapping[str, Any]) -> tuple[RunConfig | None, dict[str, str]]:
    """Check the form.

    Returns:
        The config, or None; and one sentence for each field at fault, by dotted field name.
    """
    problems: dict[str, str] = {}
    try:
        nested = document(values)
    except UserError as error:
        problems[error.field or ""] = error.message
        nested = document({**values, "launch.env": ""})
    problems |= {
        field.name: "cannot be empty"
        for field in FIELDS.values()
        if field.kind in ("number", "text", "suggest") and not field.optional and values[field.name] in ("", None)
    }
    if values["launch.gpus"] == "choose" and not values[GPU_LIST]:
        problems["launch.gpus"] = "choose at least one GPU, or None"
    try:
        config = RunConfig.model_validate(nested)
    except ValidationError as error:
        return None, config_module.field_errors(error) | problems
    return (None, problems) if problems else (config, {})


def as_yaml(values: Mapping[str, Any]) -> str:
    """The form as YAML, also while something in it is wrong."""
    config, _ = read(values)
    if config is not None:
        return config_module.to_yaml(config)
    try:
        return yaml.safe_dump(document(values), sort_keys=False, allow_unicode=True)
    except UserError:
        rest = document({**values, "launch.env": ""})
        return yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)


def _get(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


def _value(field: FormField, values: Mapping[str, Any]) -> Any:
    value = values[field.name]
    if field.kind == "gpus":
        return [_number(gpu) for gpu in values[GPU_LIST]] if value == "choose" else value
    if field.kind == "env":
        return _read_env(value)
    if field.kind in ("text", "checkpoint"):
        return None if field.optional and value in ("", None) else value
    if field.kind == "number":
        text = value.strip()
        return None if field.optional and text == "" else _number(text)
    return value


def _number(text: str) -> int | float | str:
    """A number as people type it, or the text as it is for the schema to refuse."""
    plain = text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text


# A value that a line cannot hold as it is (a line break, spaces at an end) is written as a JSON string.
_PLAIN_ENV = re.compile(r"(?![\s\"]).*(?<!\s)|")


def _env_text(env: Mapping[str, str]) -> str:
    return "\n".join(f"{k}={v if _PLAIN_ENV.fullmatch(v) else json.dumps(v)}" for k, v in env.items())


def _read_env(text: str) -> dict[str, str]:
    env: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, equals, value = line.strip().partition("=")
        if not equals:
            raise UserError(f"{line.strip()!r} is not NAME=value, one on each line", field="launch.env")
        if value.startswith('"'):
            try:
                value = json.loads(value)
            except ValueError:
                raise UserError(f"{name}: the quoted value is not closed", field="launch.env") from None
        env[name.strip()] = value
    return env


_DEFAULTS = fill(RunConfig())
