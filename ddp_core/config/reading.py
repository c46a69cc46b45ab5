"""Configs from YAML, from files and from ``key=value`` overrides, and what is wrong with them in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ddp_core.config.run import RunConfig, sections
from ddp_core.errors import UserError


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
            field = getattr(item["ctx"]["error"], "field", field)  # a check across fields names the one to mend
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
        owners = [s for s in sections() if key in _fields_of((s,))]
        if len(owners) == 1:
            return [owners[0], key]
    return path


def _fields_of(section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(RunConfig.model_fields)
    model = sections().get(section[0])
    return list(model.model_fields) if model else []


def _field_path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    path: list[str] = []
    for part in loc:
        known = _fields_of(tuple(path)) if len(path) < 2 else []
        if len(path) >= 2 or (path and path[0] not in sections()):
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
    for name in sections():
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
    described: list[tuple[str, type[BaseModel]]] = [("", RunConfig), *((f"{n}.", m) for n, m in sections().items())]
    return [
        f"{prefix}{name} [{'none' if field.default is None else field.get_default(call_default_factory=True)}]\n"
        f"  {field.description}"
        for prefix, model in described
        for name, field in model.model_fields.items()
        if prefix or name not in sections()
    ]
