"""Resuming runs that have ended, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.config import RunConfig, from_dict, to_yaml
from ddp_core.errors import UserError
from ddp_core.runs import RunDir, Store, launch, processes, resume, show, stop
from ddp_core.runs.evidence import find_event, tail_records
from ddp_core.runs.state import RunState, write_state
from tests.conftest import wait_for
from tests.runs import live


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    live.cleared(store)


def trains(run: RunDir, attempt: int) -> dict:
    """Wait until an attempt takes steps; its show document."""

    def there() -> dict | None:
        document = show(run)
        assert document["state"] in ("queued", "starting", "running"), document
        return document if document["attempt"] == attempt and document["step"] and document["joined"] == 2 else None

    return wait_for(there, f"attempt {attempt} of {run.id} trains", 90)


def resumed(run: RunDir, attempt: int) -> list[tuple[str, int]]:
    """What each rank went on from in an attempt: checkpoint and step."""
    found = []
    for rank in range(2):
        event = find_event(tail_records(run.rank_log(attempt, rank), 1 << 24), "resumed")
        assert event is not None
        found.append((event["checkpoint"], event["step"]))
    return found


def names(folder: Path) -> list[str]:
    return [file.path.name for file in checkpoint_files(folder)]


def test_a_stopped_run_goes_on_then_from_an_older_checkpoint_and_restarts_from_its_own(store):
    """One run through it all: stopped, resumed, stopped, resumed from an older one, a rank killed, and again."""
    config = from_dict(
        {
            "name": "again",
            "launch": {"nproc_per_node": 2, "device": "cpu", "max_restarts": 1, "stop_grace_s": 20},
            "training": {"epochs": 100_000},
            "checkpoints": {"every_steps": 20, "keep": 1000},
        }
    )
    run = launch(config, store)
    live.training(run)
    with pytest.raises(UserError, match="again-1 is running; only a run that has ended can be resumed"):
        resume(run, store)
    wait_for(lambda: len(names(run.path)) > 3, "checkpoints are there")
    stop(run, wait=True)
    newest = checkpoint_files(run.path)[-1]

    resume(run, store)
    document = trains(run, 1)
    assert (document["stop"], document["reason"], document["ended"], document["exit_code"]) == (None, None, None, None)
    assert resumed(run, 1) == [(newest.path.name, newest.step)] * 2
    stop(run, wait=True)
    document = show(run)
    assert (document["state"], document["attempt"], live.marked(run)) == ("stopped", 1, [])
    output = [run.output_file(attempt, 1, "stdout.log") for attempt in (0, 1, 2)]
    assert all(output[:2])
    assert output[0] != output[1]
    assert output[2] is None

    before = names(run.path)
    chosen = before[1]
    assert (run.path / "latest").resolve().name != chosen
    command = [sys.executable, "-m", "ddp_core.cli", "resume", run.id, "--from", chosen, "--store", str(store.root)]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == {"id": "again-1", "dir": str(run.path), "state": "queued"}
    document = trains(run, 2)
    assert {checkpoint for checkpoint, _ in resumed(run, 2)} == {chosen}
    assert names(run.path / "superseded" / "attempt_2") == before[2:]
    wait_for(lambda: set(names(run.path)) - set(before[:2]), "it writes checkpoints of its own")

    live.kill(document["pids"]["ranks"]["1"])
    document = trains(run, 3)
    (own, step), _ = resumed(run, 3)
    assert own not in before[:2], "a restart goes on from the newest, not from what was once asked for"
    assert run.output_file(3, 0, "stdout.log") is not None
    live.kill(document["pids"]["ranks"]["0"])
    document = live.ended(run)
    assert (document["state"], document["failure"]["rank"]) == ("failed", 0)

    resume(run, store)
    document = trains(run, 4)
    assert document["failure"] is None
    assert resumed(run, 4)[0][1] >= step
    stop(run, 0, wait=True)
    assert live.marked(run) == []


def ended_run(root: Path, *, status: str = "failed", end: str = "", checkpoint: bytes | None = b"whole") -> RunDir:
    run = RunDir(root / "x-1")
    run.path.mkdir(parents=True)
    run.config_file.write_text(to_yaml(RunConfig(name="x")))
    write_state(run.state_file, RunState(id="x-1", since=0, created=0, nproc_per_node=1, mark="m", state=status))
    if end:
        run.rank_log(0, 0).parent.mkdir(parents=True)
        run.rank_log(0, 0).write_text(end + "\n")
    if checkpoint == b"whole":
        torch.save({}, run.path / "model_epoch3.pth")
    elif checkpoint is not None:
        (run.path / "model_epoch3.pth").write_bytes(checkpoint)
    return run


ALL_DONE = '{"event":"end","outcome":"finished","ts":1}'
IN_TIME = '{"event":"end","outcome":"finished","reason":"time limit","ts":1}'


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"checkpoint": None}, None, "x-1 has no whole checkpoint to continue from; launch it again"),
        ({"checkpoint": b"cut off"}, None, "x-1 has no whole checkpoint"),
        ({"checkpoint": b"cut off"}, "model_epoch3.pth", "model_epoch3.pth is not a whole checkpoint: it is cut off"),
        ({}, "model_epoch4.pth", "x-1 has no checkpoint model_epoch4.pth, .* the newest it has are model_epoch3.pth"),
        ({}, "", "x-1 has no checkpoint"),
        ({}, "x" * 5000, "x-1 has no checkpoint"),
        ({}, "a\0b", "x-1 has no checkpoint"),
        ({}, "~nobody-of-that-name/x", "x-1 has no checkpoint"),
        ({"status": "finished", "end": ALL_DONE}, None, "x-1 has trained all its epochs; choose .* --from"),
        ({"status": "finished", "end": IN_TIME, "checkpoint": None}, None, "x-1 has no whole checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(tmp_path, changes, asked, words):
    run = ended_run(tmp_path, **changes)
    before = run.state_file.read_bytes()
    with pytest.raises(UserError, match=words):
        resume(run, Store(tmp_path), from_checkpoint=asked)
    assert run.state_file.read_bytes() == before
    assert not run.lock_file.exists(), "no supervisor was started"


def test_a_run_of_which_a_process_is_left_is_not_resumed(tmp_path):
    run = ended_run(tmp_path)
    left = subprocess.Popen(["sleep", "60"], env={processes.MARK_VARIABLE: "m", "PATH": "/usr/bin:/bin"})
    try:
        wait_for(lambda: left.pid in processes.marked("m"), "it has begun")
        with pytest.raises(UserError, match=f"its process {left.pid} is still alive"):
            resume(run, Store(tmp_path))
    finally:
        left.kill()
        left.wait()


def test_a_run_whose_gpu_is_gone_is_refused(tmp_path):
    run = ended_run(tmp_path)
    run.config_file.write_text("name: x\nlaunch: {device: cuda, gpus: [7]}\n")
    with pytest.raises(UserError, match="GPU"):
        resume(run, Store(tmp_path))
