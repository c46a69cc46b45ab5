"""JSON lines as this project writes and reads them: one object a line, non-finite numbers as strings.

Plain JSON has no NaN or infinity, and orjson turns them into null, which would hide a diverged
loss; so they are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(obj: Mapping[str, Any]) -> bytes:
    """Write an object as one line.

    Never fails on a value: what JSON does not know (a path, a date, broken Unicode) is written as text.

    Args:
        obj: The object; its keys should be strings.

    Returns:
        UTF-8 JSON that ends with the line's only newline.
    """
    try:
        line = orjson.dumps(obj, option=orjson.OPT_APPEND_NEWLINE)
        # Non-finite numbers come out as null, so without a null there was none: the common, fast case.
        if b"null" not in line:
            return line
    except TypeError:
        pass
    return orjson.dumps(_plain(obj), option=orjson.OPT_APPEND_NEWLINE)


def loads(line: bytes) -> dict[str, Any] | None:
    """Read one line; None if it is torn, null, or anything else than a JSON object."""
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """Give a field's value as a float, or None if it is no number.

    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` are numbers; true and false are not.
    """
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def _plain(value: Any) -> Any:
    """Copy a value with everything replaced that orjson refuses or would turn into null."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int):
        # orjson writes 64 bits; beyond that a float is nearer than a refusal.
        return int(value) if -(2**63) <= value < 2**64 else _plain(_as_float(value))
    if isinstance(value, Mapping):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return _text(value)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _text(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.encode("utf-8", "replace").decode("utf-8")
