"""Full disks, removed directories, signals from outside, moved clocks: what a run meets and must survive."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from ddp_core import cli_output
from ddp_core.config import from_dict
from ddp_core.errors import UserError
from ddp_core.runs import RunDir, Store, actions, gpus, launch, leases, processes, show, state, stop
from ddp_core.runs.recorder import Recorder
from ddp_core.runs.state import RunState, RunStatus, read_state, write_state
from ddp_core.runs.stopping import stop_request
from tests.conftest import wait_for
from tests.runs import live


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    yield store
    live.cleared(store)


@pytest.fixture
def full_disk(monkeypatch):
    """No new file gets any content, as on a full disk."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (actions, state):
        monkeypatch.setattr(module, "write_json", refuse)


def adopted(run: RunDir, monkeypatch) -> None:
    """Kill the run's supervisor and wait for the next one."""
    monkeypatch.setattr(actions, "_STARTING_S", 1.0)
    first = run.state().supervisor
    assert first is not None
    live.kill(first.pid)
    wait_for(lambda: show(run)["pids"]["supervisor"] != first.pid, "another supervisor took over")


def test_ranks_that_somebody_else_ended_have_not_finished(store):
    run = live.start(store, nproc=1)
    live.kill(live.training(run)["pids"]["ranks"]["0"], signal.SIGTERM)
    document = live.ended(run)
    assert (document["state"], document["reason"]) == ("stopped", "stopped by a signal from outside")


def test_a_rank_killed_after_a_change_of_supervisor_is_named(store, monkeypatch):
    run = live.start(store, nproc=1)
    document = live.training(run)
    adopted(run, monkeypatch)
    live.kill(document["pids"]["ranks"]["0"])
    document = live.ended(run)
    assert document["state"] == "failed"
    assert (document["failure"]["rank"], document["failure"]["kind"]) == (0, "signal")


def test_a_run_whose_config_cannot_be_read_any_more_can_be_stopped(store, monkeypatch):
    run = live.start(store, nproc=1)
    live.training(run)
    run.config_file.write_text("launch: {of_tomorrow: 1}\n")
    adopted(run, monkeypatch)
    stop(run, wait=True)
    assert (show(run)["state"], live.marked(run)) == ("stopped", [])


def test_what_the_kernel_refuses_to_start_is_said(store):
    run = live.start(store, nproc=1, env={"LARGE": "x" * 200_000})
    document = live.ended(run)
    assert (document["state"], document["failure"]["rank"]) == ("failed", None)
    assert document["reason"] == "torchrun could not be started: Argument list too long"


def test_the_id_of_a_removed_run_is_not_given_again_while_it_lives(tmp_path):
    store = Store(tmp_path)
    environment = os.environ | {processes.RUN_DIR_VARIABLE: str(tmp_path / "x-4")}
    alive = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        assert (store.next_id("x"), store.next_id("y")) == ("x-5", "y-1")
    finally:
        alive.kill()
        alive.wait()
    assert store.next_id("x") == "x-1"


def test_a_launch_that_fails_leaves_nothing_behind(store, full_disk):
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        launch(from_dict({"launch": {"device": "cpu"}}), store)
    assert [path.name for path in store.root.iterdir()] == [".lock"]


def test_a_stop_and_its_outcome_reach_a_full_disk(tmp_path, full_disk):
    run = RunDir(tmp_path)
    before = RunState(id="x-1", since=0, created=time.time(), nproc_per_node=1, mark="m")
    run.state_file.write_bytes(before.model_dump_json().encode())
    assert stop_request(run) is None
    stop(run, 5)
    assert stop_request(run) == {}
    write_state(run.state_file, before.model_copy(update={"state": RunStatus.STOPPED}))
    assert read_state(run.state_file).state is RunStatus.STOPPED
    longer = before.model_copy(update={"stage": "x" * 100_000})
    with pytest.raises(OSError, match="No space left"):
        write_state(run.state_file, longer)
    assert read_state(run.state_file).state is RunStatus.STOPPED


def test_a_recorder_survives_that_even_its_complaint_cannot_be_written(tmp_path, monkeypatch):
    recorder = Recorder(RunDir(tmp_path / "gone"), RunState(id="x-1", since=0, created=0, nproc_per_node=1, mark="m"))

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.stderr, "write", refuse)
    recorder.event("warning", "nobody will read this")
    recorder.update(stage="training")


@pytest.mark.parametrize("grace", [float("nan"), float("inf"), -1.0])
def test_a_grace_that_is_no_time_is_refused(tmp_path, grace):
    with pytest.raises(UserError, match="the grace must be a number of seconds"):
        stop(RunDir(tmp_path), grace)


def test_a_process_is_known_by_its_start_after_the_boot_whatever_the_clock_says():
    me = processes.identify(os.getpid())
    assert me is not None
    assert 0 < me.create_time < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_supervisor_is_replaced_though_the_clock_was_set_back(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    later = time.time() + 3600
    write_state(run.state_file, RunState(id="x-1", since=later, created=later, nproc_per_node=1, mark="m"))
    started: list[RunDir] = []
    monkeypatch.setattr(actions, "start_supervisor", started.append)
    actions.ensure_supervised(run)
    actions.ensure_supervised(run)
    assert started == [run]


def test_the_logs_go_on_with_the_next_attempt_and_end_with_half_a_line(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    monkeypatch.setattr(actions, "start_supervisor", lambda _: None)

    def attempt(number: int, text: str, status: RunStatus) -> None:
        file = tmp_path / "logs" / "x" / f"attempt_{number}" / "0" / "stdout.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        now = time.time()
        write_state(
            run.state_file,
            RunState(id="x-1", since=now, created=now, nproc_per_node=1, mark="m", attempt=number, state=status),
        )

    attempt(0, "first\n", RunStatus.RUNNING)
    lines = cli_output.log_lines(run, [0], follow=True)
    assert next(lines) == (0, "stdout", "first")
    attempt(1, "second\n10 %\r100 %", RunStatus.FAILED)
    assert list(lines) == [(0, "stdout", "second"), (0, "stdout", "100 %")]


def test_a_lease_names_the_store_of_a_run_in_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_LEASES", str(tmp_path / "leases"))
    held = leases.Leases()
    assert held.try_take(["GPU-a"], tmp_path / "one" / "x-1") is None
    assert leases.holder("GPU-a") == leases.holder("GPU-a", tmp_path / "one") == "x-1"
    assert leases.holder("GPU-a", tmp_path / "two") == f"x-1 of {tmp_path / 'one'}"
    sharing = leases.Leases()
    sharing.take_free(["GPU-a", "GPU-b"], tmp_path / "two" / "y-1")
    assert (leases.holder("GPU-a"), leases.holder("GPU-b")) == ("x-1", "y-1")
    held.close()
    sharing.take_free(["GPU-a", "GPU-b"], tmp_path / "two" / "y-1")
    assert leases.holder("GPU-a") == "y-1"
    sharing.close()


def test_a_run_that_shares_takes_gpus_in_use_only_when_too_few_are_free(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_LEASES", str(tmp_path))
    rows = [{"index": n, "uuid": f"GPU-{n}", "status": "ok", "memory_used": 10 - n} for n in range(3)]
    found = {"driver": "570", "error": None, "gpus": rows}
    on_gpu = {"GPU-1": [{"pid": 1, "name": None, "memory_used": None}], "GPU-2": [{"pid": 1, "name": None}]}
    assert gpus.pick(found, on_gpu, 2)[0] is None
    assert gpus.pick(found, on_gpu, 2, share=True)[0] == ["GPU-0", "GPU-2"]
    assert gpus.pick(found, on_gpu, 1, share=True)[0] == ["GPU-0"]


def test_a_folder_that_is_no_run_is_not_shown_as_one(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / ".intents").mkdir()
    for name in ("plain", ".intents"):
        with pytest.raises(UserError, match="there is no run"):
            Store(tmp_path).run(name)
    assert Store(tmp_path).runs() == []
