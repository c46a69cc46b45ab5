"""Real 4-rank runs through the ``ddp`` command, and two at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest

from ddp_core.runs import RunDir, Store, ls, processes, show, stop
from ddp_core.runs.evidence import tail_records
from tests.runs import live


def ddp(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    live.cleared(store)


@pytest.fixture(scope="module")
def finished(store, tmp_path_factory):
    """A whole 4-rank run followed from the command line: ``(process, JSON documents, run)``."""
    config = tmp_path_factory.mktemp("config") / "run.yaml"
    config.write_text("name: whole\nlaunch: {nproc_per_node: 4, device: cpu}\ntraining: {epochs: 4}\n")
    process = ddp("launch", str(config), "--follow", "--json", "--store", str(store.root))
    return process, [json.loads(line) for line in process.stdout.splitlines()], store.run("whole-1")


def test_follow_prints_launch_then_progress_then_the_show_document(finished):
    process, documents, run = finished
    assert process.returncode == 0, process.stderr
    assert documents[0] == {"id": "whole-1", "dir": str(run.path), "state": "queued"}
    states = [document["state"] for document in documents]
    assert list(dict.fromkeys(states)) == ["queued", "starting", "running", "finished"]
    progress = [d for d in documents[1:-1] if d["state"] == "running" and d["step"]]
    assert set(progress[-1]["loss"]) == {"0", "1", "2", "3"}
    assert documents[-1]["id"] == "whole-1"


def test_the_finished_run_has_its_figures_and_checkpoints(finished):
    *_, run = finished
    document = show(run)
    assert (document["step"], document["steps_total"], document["epoch"]) == (92, 92, 4)
    assert document["final"]["val_accuracy"] > 0.8
    losses = [tail_records(run.rank_log(0, rank)) for rank in range(4)]
    last = [next(r["loss"] for r in reversed(records) if "loss" in r) for records in losses]
    assert document["final"]["loss"] == pytest.approx(sum(last) / 4)
    assert Path(document["checkpoints"][-1]["path"]).name == "model_epoch4.pth"
    assert document["checkpoints"][-1]["step"] == 92
    assert document["failure"] is None
    assert document["stop"] is None


def test_the_ranks_are_sampled_and_none_is_left(finished):
    *_, run = finished
    samples = [orjson.loads(line) for line in run.hardware_file.read_bytes().splitlines()]
    full = [sample for sample in samples if len(sample["ranks"]) == 4]
    assert full
    assert all(rank["memory"] > 50_000_000 for rank in full[-1]["ranks"].values())
    assert live.marked(run) == []


def test_the_config_in_the_run_directory_is_what_was_launched(finished):
    *_, run = finished
    assert run.config().training.epochs == 4
    assert run.config().name == "whole"


def test_logs_of_one_rank_and_of_all(finished, store):
    *_, run = finished
    everything = ddp("logs", run.id, "--store", str(store.root), "--json")
    one = ddp("logs", run.id, "--rank", "2", "--store", str(store.root), "--json")
    assert {json.loads(line)["rank"] for line in one.stdout.splitlines()} <= {2}
    assert everything.returncode == one.returncode == 0
    refused = ddp("logs", run.id, "--rank", "4", "--store", str(store.root))
    assert (refused.returncode, refused.stderr) == (2, "ddp: whole-1 has ranks 0 to 3, no rank 4\n")


def test_two_runs_of_one_name_at_once_then_stop_one(store):
    first, second = live.start(store, nproc=4), live.start(store)
    assert (first.id, second.id) == ("digits-1", "digits-2")
    live.training(first)
    live.training(second)
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, "DDP_RUN_MARK": "not this run's"})
    try:
        mine = live.marked(first)
        assert len(mine) >= 5  # torchrun and four ranks
        stopped = ddp("stop", first.id, "--store", str(store.root), "--json")
        document = json.loads(stopped.stdout)
        assert document["state"] == "stopped"
        assert document["stop"]["left_alive"] == 0
        assert document["stop"]["escalated"] is False
        assert document["reason"].startswith("stopped in ")
        assert "no process left" in document["reason"]
        assert live.marked(first) == []
        assert not any(psutil.pid_exists(pid) for pid in mine)
        assert bystander.poll() is None
        assert show(second)["state"] == "running"
        row = next(row for row in ls(store) if row["id"] == second.id)
        assert (row["final"]["loss"], row["latest"]["loss"] is None) == (None, False)
        # The whole checkpoint that the ranks agreed on before they left.
        assert document["checkpoints"][-1]["step"] >= document["step"] > 0
    finally:
        bystander.kill()
        bystander.wait()
        stop(second, wait=True)
    again = ddp("stop", first.id, "--store", str(store.root), "--json")
    assert json.loads(again.stdout)["stop"] == document["stop"]


def test_ls_lists_the_newest_first(finished, store):
    rows = json.loads(ddp("ls", "--json", "--store", str(store.root)).stdout)
    assert rows[-1]["id"] == "whole-1"
    assert [row["created"] for row in rows] == sorted((row["created"] for row in rows), reverse=True)
    assert rows[-1]["final"]["val_accuracy"] > 0.8


def test_a_supervisor_that_died_is_replaced_and_the_training_goes_on(store):
    run = live.start(store)
    live.training(run)
    before = run.state()
    assert before.supervisor is not None
    live.kill(before.supervisor.pid)
    live.wait_for(lambda: not processes.alive(run.state().supervisor), "the supervisor is dead")
    adopted = live.wait_for(
        lambda: show(run)["pids"]["supervisor"] != before.supervisor.pid and run.state(), "another took over"
    )
    assert adopted.agent == before.agent
    assert processes.alive(adopted.ranks[0])
    stop(run, wait=True)
    document = show(run)
    assert (document["state"], document["stop"]["left_alive"], live.marked(run)) == ("stopped", 0, [])


def test_the_supervisor_is_light(store):
    """Its own code only: torch, numpy, pandas and streamlit would cost hundreds of megabytes a run."""
    code = "import sys, ddp_core.runs.supervisor; print({'torch', 'numpy', 'pandas', 'streamlit'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_run_directory_without_supervisor_and_processes_is_lost(store):
    run = live.start(store)
    live.training(run)
    state = run.state()
    assert state.supervisor is not None
    live.kill(state.supervisor.pid)
    for pid in live.marked(run):
        live.kill(pid)
    document = live.ended(run)
    assert document["state"] == "lost"
    assert "no rank recorded an outcome" in document["reason"]


def test_unknown_runs_are_refused_in_one_line(store):
    for name in ("nothing-1", "../x", "..", ""):
        refused = ddp("show", name, "--store", str(store.root))
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert "there is no run" in refused.stderr


def test_a_damaged_state_file_is_said_and_the_rest_still_shown(finished, store):
    *_, run = finished
    whole = run.state_file.read_bytes()
    try:
        run.state_file.write_bytes(whole[: len(whole) // 2])
        document = show(RunDir(run.path))
        assert document["state"] == "lost"
        assert "damaged" in document["problem"]
        assert document["checkpoints"]
        assert ddp("ls", "--store", str(store.root)).returncode == 0
        assert ddp("stop", run.id, "--store", str(store.root)).returncode == 2
    finally:
        run.state_file.write_bytes(whole)
