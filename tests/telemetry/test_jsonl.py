from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ddp_core.telemetry.jsonl import dumps, loads, number


def test_an_object_is_one_line_of_plain_json():
    record = {
        "ts": 1.5,
        "event": "warning",
        "message": "two\nlines “quoted”",
        "ok": True,
        "none": None,
        "n": [1, {"a": 2}],
    }
    line = dumps(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert json.loads(line) == record
    assert loads(line) == record


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")], ids=str
)
def test_a_number_that_json_lacks_survives_as_text(value: float, text: str):
    record = loads(dumps({"loss": value, "nested": {"values": [1.0, value]}, "none": None}))
    assert record == {"loss": text, "nested": {"values": [1.0, text]}, "none": None}
    back = number(record["loss"])
    assert back == value or (back is not None and math.isnan(back) and math.isnan(value))


def test_what_json_does_not_know_is_written_as_text():
    record = loads(dumps({"path": Path("/a/b"), "broken": "a\udcffb", "bytes": b"x\xff", "huge": 2**70, "set": {1}}))
    assert record == {"path": "/a/b", "broken": "a?b", "bytes": "x\ufffd", "huge": float(2**70), "set": [1]}
    assert loads(dumps({"beyond": 10**400})) == {"beyond": "Infinity"}


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"NaN", b'{"loss": NaN}', b'{"step": 3, "los', b"[1]", b"3", b'"x"', b"\0\0\0", b"\xff\xfe{}"],
)
def test_a_line_that_is_no_object_is_none(line: bytes):
    assert loads(line) is None


def test_only_numbers_and_their_names_are_numbers():
    assert (number(3), number(0.5), number("Infinity")) == (3.0, 0.5, math.inf)
    assert [number(v) for v in (None, True, False, "3", "nan", [], {})] == [None] * 7
