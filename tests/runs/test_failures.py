"""Real runs with real faults: which rank failed, why, and that nothing is left."""

from __future__ import annotations

import signal

import pytest

from ddp_core.runs import Store, show, stop
from tests.runs import live


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    live.cleared(store)


def test_a_rank_that_raises_is_named_with_its_traceback(store):
    run = live.start(store, nproc=4, fault="raise", fault_rank=2)
    document = live.training(run)
    live.kill(document["pids"]["ranks"]["2"], signal.SIGUSR1)
    document = live.ended(run)
    assert document["state"] == "failed"
    failure = document["failure"]
    assert (failure["rank"], failure["kind"]) == (2, "exception")
    assert "the injected fault" in failure["message"]
    assert "Traceback" in failure["traceback"]
    assert 2 not in failure["victims"]
    assert live.marked(run) == []


def test_a_rank_killed_by_a_signal_is_the_culprit_and_the_others_victims(store):
    run = live.start(store, nproc=4)
    document = live.training(run)
    live.kill(document["pids"]["ranks"]["1"])
    document = live.ended(run)
    assert document["state"] == "failed"
    assert (document["failure"]["rank"], document["failure"]["kind"]) == (1, "signal")
    assert "SIGKILL" in document["failure"]["message"]
    assert 1 not in document["failure"]["victims"]
    assert live.marked(run) == []


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(store):
    run = live.start(store, fault="ignore_term", fault_rank=1)
    live.training(run)
    stop(run, 1.0, wait=True)
    document = show(run)
    assert document["state"] == "stopped"
    assert document["stop"]["escalated"] is True
    assert document["stop"]["left_alive"] == 0
    assert 1.0 <= document["stop"]["seconds"] < 8
    assert "killed after the grace" in document["reason"]
    assert live.marked(run) == []


def test_a_second_stop_shortens_the_grace_and_never_prolongs_it(store):
    run = live.start(store, fault="ignore_term", fault_rank=0)
    live.training(run)
    stop(run, 600)
    live.wait_for(lambda: show(run)["state"] == "stopping", "it is stopping")
    stop(run, 0.5, wait=True)
    assert show(run)["stop"]["seconds"] < 20


def test_a_dead_agent_is_a_failure_and_its_ranks_are_ended(store):
    run = live.start(store, stop_grace_s=3)
    document = live.training(run)
    live.kill(document["pids"]["agent"])
    document = live.ended(run)
    assert document["state"] == "failed"
    assert "SIGKILL" in document["failure"]["message"]
    assert document["failure"]["rank"] is None
    assert live.marked(run) == []


def test_a_process_left_in_its_own_session_is_ended_with_the_run(store):
    run = live.start(store, epochs=1, fault="grandchild", fault_rank=1)
    document = live.ended(run, 90)
    assert document["state"] == "finished"
    assert live.marked(run) == []


def test_stopped_before_the_ranks_have_joined(store):
    run = live.start(store)
    stop(run, wait=True)
    document = show(run)
    assert (document["state"], document["stop"]["left_alive"], live.marked(run)) == ("stopped", 0, [])


def test_a_restarted_run_goes_on_as_the_next_attempt(store):
    run = live.start(store, max_restarts=1)
    before = live.training(run)
    live.kill(before["pids"]["ranks"]["1"])

    def again() -> dict | None:
        document = show(run)
        assert document["state"] == "running", document
        return document if document["attempt"] == 1 and document["joined"] == 2 and document["step"] else None

    after = live.wait_for(again, "the ranks train again", 90)
    assert after["stage"] == "training"
    assert set(after["pids"]["ranks"].values()).isdisjoint(before["pids"]["ranks"].values())
    stop(run, wait=True)
    assert (show(run)["state"], live.marked(run)) == ("stopped", [])
