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
from ddp_core.config import LaunchConfig, RunConfig, TrainingConfig
from ddp_core.errors import UserError

GPU_LIST = "launch.gpus.list"
"""Key of the chosen GPUs among the form's values: indices and UUIDs as text."""

Kind = Literal["text", "number", "choice", "suggest", "toggle", "gpus", "env"]

# Only where the field's own name does not read well as a label.
_LABELS = {
    "launch.nproc_per_node": "Processes",
    "launch.gpus": "GPUs",
    "launch.share_gpus": "Share GPUs",
    "launch.stop_grace_s": "Stop grace (s)",
    "launch.omp_num_threads": "OMP threads",
    "launch.env": "Environment",
    "training.dataset": "Data set",
    "training.data_dir": "Data folder",
    "training.lr": "Learning rate",
}


@dataclass(frozen=True)
class FormField:
    """One field of the form.

    Attributes:
        name: Dotted name, such as ``training.lr``.
        label: What stands above the widget.
        help: The field's description, with its range.
        kind: Which widget shows it.
        options: Choices, or suggestions for ``suggest``.
        optional: Whether it may be empty, which is None in the config.
    """

    name: str
    label: str
    help: str
    kind: Kind
    options: tuple[str, ...] = ()
    optional: bool = False


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
    elif "enum" in schema:
        kind, options = "choice", tuple(get_args(info.annotation))
    elif "boolean" in types:
        kind = "toggle"
    elif "object" in types:
        kind = "env"
    else:
        kind = "number" if types & {"integer", "number"} else "text"
    help_text = f"{info.description or ''}{_range_words(branches)}"
    label = _LABELS.get(dotted) or name.replace("_", " ").capitalize()
    return FormField(dotted, label, help_text, kind, options, optional="null" in types)


def _range_words(branches: Sequence[Mapping[str, Any]]) -> str:
    for branch in branches:
        low, above = branch.get("minimum"), branch.get("exclusiveMinimum")
        high, below = branch.get("maximum"), branch.get("exclusiveMaximum")
        low_words = f"{low:,}" if low is not None else f"above {above:,}" if above is not None else None
        high_words = f"{high:,}" if high is not None else f"below {below:,}" if below is not None else None
        if low_words and high_words:
            return f" ({low_words} to {high_words})"
    return ""


def _fields() -> dict[str, FormField]:
    sections: tuple[tuple[str, type[BaseModel]], ...] = (
        ("", RunConfig),
        ("launch", LaunchConfig),
        ("training", TrainingConfig),
    )
    found = {}
    for section, model in sections:
        for name, schema in model.model_json_schema()["properties"].items():
            if not section and name in ("launch", "training"):
                continue
            field = _field(section, name, model, schema)
            found[field.name] = field
    return found


FIELDS: dict[str, FormField] = _fields()
"""Every field of RunConfig, by dotted name."""

RUN_FIELDS = (
    "name",
    "training.model",
    "training.dataset",
    "training.data_dir",
    "training.epochs",
    "training.batch_size",
    "training.optimizer",
    "training.lr",
)
PROCESS_FIELDS = ("launch.nproc_per_node", "launch.device", "launch.share_gpus", "launch.gpus")
ADVANCED_FIELDS = tuple(name for name in FIELDS if name not in (*RUN_FIELDS, *PROCESS_FIELDS))


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
    result: dict[str, Any] = {"launch": {}, "training": {}}
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
        found = config_module.field_errors(error).items()
        return None, {_field_at_fault(name, text): text for name, text in found} | problems
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


def _field_at_fault(name: str, text: str) -> str:
    """A check across fields reports its section; the field to mend is the first one it names."""
    if name not in ("launch", "training"):
        return name
    in_text = [
        (match.start(), field)
        for field in FIELDS
        if field.startswith(f"{name}.") and (match := re.search(rf"\b{field.partition('.')[2]}\b", text))
    ]
    return min(in_text)[1] if in_text else name


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
    if field.kind == "text":
        return None if field.optional and value == "" else value
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
