from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.telemetry import follower
from ddp_core.telemetry.follower import MAX_LINE, JsonlFollower, LineFollower


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_each_line_comes_once_and_a_torn_tail_waits_for_its_rest(path: Path):
    lines = LineFollower(path)
    append(path, b"one\ntwo\nthr")
    assert lines.poll() == [b"one", b"two"]
    assert lines.offset == len(b"one\ntwo\n")
    assert lines.poll() == []
    append(path, b"ee")
    assert lines.poll() == []
    append(path, b"\nfour\n")
    assert lines.poll() == [b"three", b"four"]
    assert lines.offset == path.stat().st_size
    assert lines.generation == 0


def test_a_file_that_comes_later_is_followed_from_its_start(path: Path):
    lines = LineFollower(path.parent / "later" / "rank_0.jsonl")
    assert lines.poll() == []
    (path.parent / "later").mkdir()
    append(path.parent / "later" / "rank_0.jsonl", b"one\n")
    assert lines.poll() == [b"one"]
    assert lines.generation == 0


def test_any_cut_of_the_writing_gives_the_same_lines(path: Path):
    rng = random.Random(1)
    expected = [bytes(rng.choices(b"abc\0\xff\r", k=rng.randrange(40))) for _ in range(300)]
    data = b"\n".join(expected) + b"\n"
    lines, found = LineFollower(path), []
    while data:
        cut = rng.randrange(1, 60)
        append(path, data[:cut])
        data = data[cut:]
        found += lines.poll(max_bytes=rng.randrange(1, 50))
    while lines.offset < path.stat().st_size:
        found += lines.poll(max_bytes=7)
    assert found == expected


def test_a_poll_reads_no_more_than_it_may_and_says_if_there_is_more(path: Path):
    append(path, b"12345678\n" * 10)
    lines = LineFollower(path)
    assert lines.poll(max_bytes=30) == [b"12345678"] * 3
    assert not lines.caught_up
    assert lines.poll() == [b"12345678"] * 7
    assert lines.caught_up


def test_a_truncated_file_is_read_again_from_its_start(path: Path):
    append(path, b"one\ntwo\n")
    lines = LineFollower(path)
    lines.poll()
    path.write_bytes(b"new\n")
    assert lines.poll() == [b"new"]
    assert lines.generation == 1


@pytest.mark.parametrize("new", [b"new\nmore\nand more\n", b"uno\ndue\n"], ids=["longer", "same length"])
@pytest.mark.parametrize("how", ["replaced", "rewritten"])
def test_another_file_in_its_place_is_read_from_its_start(path: Path, new: bytes, how: str):
    append(path, b"one\ntwo\n")
    lines = LineFollower(path)
    assert len(lines.poll()) == 2
    if how == "replaced":
        path.with_suffix(".new").write_bytes(new)
        path.with_suffix(".new").replace(path)
    else:
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before:  # the clock of a file system may tick slowly
            path.write_bytes(new)
    assert lines.poll() == new.splitlines()
    assert lines.generation == 1


def test_a_file_that_was_away_for_a_moment_goes_on_where_it_was(path: Path):
    append(path, b"one\n")
    lines = LineFollower(path)
    lines.poll()
    away = path.rename(path.with_suffix(".away"))
    assert lines.poll() == []
    append(away, b"two\n")
    away.rename(path)
    assert lines.poll() == [b"two"]
    assert lines.generation == 0


def test_lines_that_are_too_long_are_skipped_and_counted(path: Path):
    long = b"x" * (MAX_LINE + 1)
    lines = LineFollower(path)
    append(path, b"one\n" + long + b"\ntwo\n" + b"y" * MAX_LINE + b"\n")
    assert lines.poll() == [b"one", b"two", b"y" * MAX_LINE]
    assert lines.skipped == 1
    append(path, long)
    assert lines.poll() == []
    append(path, long)
    assert lines.poll() == []
    append(path, b"end of it\nthree\n")
    assert lines.poll() == [b"three"]
    assert lines.skipped == 2
    path.write_bytes(b"new\n")
    assert lines.poll() == [b"new"]
    assert lines.skipped == 0


def test_an_endless_line_takes_no_memory(path: Path):
    with path.open("wb") as file:
        file.truncate(400 << 20)  # a hole: 400 MB of NULs, as a power cut can leave
    code = (
        "import resource, sys\n"
        "from ddp_core.telemetry.follower import JsonlFollower\n"
        "f = JsonlFollower(sys.argv[1])\n"
        "f.poll()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "while not f.caught_up: assert f.poll() == []\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, f.skipped)\n"
    )
    out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
    grown_kb, skipped = map(int, out.split())
    assert grown_kb < 8 << 10
    assert skipped == 1


def test_what_cannot_be_used_is_skipped_and_counted(path: Path):
    append(
        path,
        b'{"step": 1}\nnull\n{"loss": NaN}\n\n\0\0\0\n\xff\xfe\x00garbage\n[1]\n{"step": 2, "lo\n  \n{"step": 3}\n',
    )
    records = JsonlFollower(path)
    assert records.poll() == [{"step": 1}, {"step": 3}]
    assert records.skipped == 6  # blank lines are nothing
    path.write_bytes(b"null\n")
    assert records.poll() == []
    assert (records.skipped, records.generation) == (1, 1)


def test_a_poll_without_news_is_one_stat(path: Path, monkeypatch: pytest.MonkeyPatch):
    append(path, b"one\ntw")
    lines = LineFollower(path)
    lines.poll()

    def refuse(*args: object) -> int:
        raise AssertionError("opened")

    monkeypatch.setattr(follower.os, "open", refuse)
    for _ in range(3):
        assert lines.poll() == []


def test_nothing_stays_open_between_polls(path: Path):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    append(path, b"one\n")
    before = open_files()
    followers = [LineFollower(path) for _ in range(50)]
    assert all(lines.poll() == [b"one"] for lines in followers)
    assert open_files() == before


def test_a_folder_in_its_place_is_as_good_as_nothing(tmp_path: Path):
    assert LineFollower(tmp_path).poll() == []


def test_the_pieces_stay_light():
    code = (
        "import sys, ddp_core.telemetry.jsonl, ddp_core.telemetry.rank_log, ddp_core.telemetry.follower\n"
        "import ddp_core.telemetry.nvml, ddp_core.telemetry.host\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'streamlit') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
