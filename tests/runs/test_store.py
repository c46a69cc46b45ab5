from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ddp_core.config import RunConfig, from_dict
from ddp_core.errors import UserError
from ddp_core.runs import (
    RunDir,
    Store,
    demo_config,
    gpus,
    launch,
    leases,
    preflight,
    processes,
    show,
    split_preview,
    stop,
)
from ddp_core.runs.command import torchrun_command, torchrun_environment
from ddp_core.runs.evidence import exit_words, find_failure
from ddp_core.runs.state import TRANSITIONS, RunState, RunStatus, moved, read_state, write_state

CPU = from_dict({"name": "x", "launch": {"nproc_per_node": 1, "device": "cpu"}})


def state(**changes) -> RunState:
    return RunState(id="x-1", since=0, created=0, nproc_per_node=1, mark="m", **changes)


def test_run_numbers_go_on_from_the_highest(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "x-7").mkdir()
    (tmp_path / "x-y-9").mkdir()
    (tmp_path / "x-0").mkdir()
    with store.locked():
        assert [store.create("x").id, store.create("x").id, store.create("x-y").id] == ["x-8", "x-9", "x-y-10"]


def test_the_store_is_found_by_option_environment_then_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Store().root == tmp_path / "experiments"
    monkeypatch.setenv("DDP_STORE", str(tmp_path / "env"))
    assert Store().root == tmp_path / "env"
    assert Store(tmp_path / "option").root == tmp_path / "option"


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x-1", "x-1/..", "/etc", "nothing-1", "x" * 300, "a\0b"])
def test_an_id_never_leads_out_of_the_store(tmp_path, run_id):
    (tmp_path / "store" / "x-1").mkdir(parents=True)
    with pytest.raises(UserError, match="there is no run"):
        Store(tmp_path / "store").run(run_id)


def test_a_store_that_cannot_be_written_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot be written .* choose another with --store"):
        launch(CPU, Store(tmp_path / "file" / "store"))


def test_one_intent_is_one_run_however_many_launch_it_at_once(tmp_path):
    store = Store(tmp_path)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(launch(CPU, store, intent="t1").id)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = launch(CPU, store, intent="t2")
    assert found == ["x-1"] * 5
    assert [other.id, len(store.runs())] == ["x-2", 2]
    assert launch(CPU, store, intent="t1").id == "x-1"
    with pytest.raises(UserError, match="launch token"):
        launch(CPU, store, intent="../x")
    for run in store.runs():
        stop(run, 0, wait=True)
        assert processes.marked(run.state().mark) == []


def test_the_transitions_are_the_tables():
    assert {status for status in RunStatus if status.ended} == {"stopped", "finished", "failed", "lost"}
    for source, targets in TRANSITIONS.items():
        for target in RunStatus:
            if target in targets:
                assert moved(state(state=source), target).state == target
            else:
                with pytest.raises(ValueError, match="cannot go from"):
                    moved(state(state=source), target)
        assert source.ended == (targets == {"queued"})
    assert moved(state(state="running"), RunStatus.FAILED).ended == pytest.approx(time.time(), abs=5)
    assert moved(state(state="failed"), RunStatus.QUEUED).ended is None


def test_a_state_file_survives_the_round_trip_and_newer_fields(tmp_path):
    path = tmp_path / "state.json"
    before = state(final={"loss": float("nan")}, ranks={0: processes.identify(1)})
    write_state(path, before)
    assert read_state(path).final == {"loss": "NaN"}
    assert read_state(path).ranks == before.ranks
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2,"of_tomorrow":[]'))
    assert read_state(path).id == "x-1"
    path.write_bytes(b'{"id": "x-1", ')
    with pytest.raises(UserError, match="damaged"):
        read_state(path)


def test_a_process_is_known_by_more_than_its_number():
    me = processes.identify(threading.get_native_id())
    assert me is not None
    assert processes.alive(me)
    assert not processes.alive(me.model_copy(update={"create_time": me.create_time - 60}))
    assert not processes.alive(me.model_copy(update={"boot_id": "an earlier boot"}))


def test_the_command_and_environment_are_this_runs_own(tmp_path):
    config = from_dict({"launch": {"nproc_per_node": 3, "max_restarts": 2, "env": {"NCCL_DEBUG": "INFO"}}})
    command = " ".join(torchrun_command(config, tmp_path))
    assert "--standalone --nproc-per-node 3 --max-restarts 2" in command
    outer = {
        "PATH": "/bin",
        "MASTER_PORT": "29500",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "PET_NNODES": "2",
    }
    inherited = outer | {"DDP_RUN_MARK": "outer", "CUDA_VISIBLE_DEVICES": "7"}
    environment = torchrun_environment(config, tmp_path, mark="m", gpus=["GPU-b", "GPU-a"], inherited=inherited)
    assert not {"MASTER_PORT", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_NNODES"} & set(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert (environment["DDP_RUN_MARK"], environment["NCCL_DEBUG"], environment["PATH"]) == ("m", "INFO", "/bin")
    assert int(environment["OMP_NUM_THREADS"]) >= 1


def test_leases_are_all_or_nothing_and_end_with_their_holder(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_LEASES", str(tmp_path))
    first, second = leases.Leases(), leases.Leases()
    assert first.try_take(["GPU-b", "GPU-a"], "one-1") is None
    assert second.try_take(["GPU-c", "GPU-b"], "two-1") == "GPU-b"
    assert [leases.holder(gpu) for gpu in ("GPU-a", "GPU-b", "GPU-c", "GPU-d")] == ["one-1", "one-1", None, None]
    first.close()
    assert second.try_take(["GPU-c", "GPU-b"], "two-1") is None
    assert leases.holder("GPU-b") == "two-1"
    second.close()


def test_the_split_preview_of_the_demo():
    preview = split_preview(RunConfig())
    assert (preview["effective_batch"], preview["train_samples"], preview["val_samples"]) == (64, 1437, 360)
    assert (preview["per_rank"], preview["padded"], preview["steps_per_epoch"]) == (360, 3, 23)
    assert [rank["first"] for rank in preview["ranks"]] == [[r, r + 4, r + 8, r + 12] for r in range(4)]


def test_the_demo_takes_every_gpu_that_torch_can_use(monkeypatch):
    report = {"driver": "570", "error": None, "gpus": [{"status": "ok"}, {"status": "lost"}, {"status": "ok"}]}
    assert demo_config({"driver": None, "error": "none", "gpus": []}) == RunConfig()
    monkeypatch.setattr(gpus, "trains_on_gpus", lambda *_: (True, ""))
    assert demo_config(report).launch.nproc_per_node == 2


def test_a_missing_data_folder_is_an_error_that_names_it(tmp_path):
    config = from_dict(
        {"launch": {"device": "cpu"}, "training": {"dataset": "image_folder", "data_dir": str(tmp_path / "no")}}
    )
    assert [(f["level"], f["field"]) for f in preflight(config)] == [
        ("error", "training.data_dir"),
        ("info", "launch.device"),
    ]
    (tmp_path / "no" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "no" / "train" / "cat" / "1.png").touch()
    messages = [f["message"] for f in preflight(config)]
    assert any("val has no images" in message for message in messages)
    assert any("only one class" in message for message in messages)


def _write_rank(run: RunDir, rank: int, *lines: str) -> None:
    path = run.rank_log(0, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def test_a_rank_that_lost_its_peer_is_a_victim_even_if_it_spoke_first(tmp_path):
    run = RunDir(tmp_path / "x-1")
    _write_rank(
        run, 0, '{"ts": 1.0, "event": "end", "outcome": "failed", "message": "RuntimeError: Connection closed by peer"}'
    )
    _write_rank(run, 1, '{"ts": 2.0, "event": "end", "outcome": "failed", "message": "ValueError: bad sample"}')
    failure = find_failure(run, 0, 2, 1)
    assert (failure["rank"], failure["message"], failure["victims"]) == (1, "ValueError: bad sample", [0])


def test_without_any_evidence_torchrun_itself_is_named(tmp_path):
    run = RunDir(tmp_path)
    Path(run.agent_log).write_text("Traceback\nOSError: no space left\n")
    failure = find_failure(run, 0, 2, 1)
    assert (failure["rank"], failure["kind"]) == (None, "agent")
    assert "no space left" in failure["message"]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-11, "SIGSEGV (signal 11)"), (-9, "out of memory?"), (None, "unknown")]
)
def test_exit_codes_in_words(code, words):
    assert words in exit_words(code)


def test_show_of_a_run_whose_launch_was_interrupted(tmp_path):
    (tmp_path / "x-1").mkdir()
    (tmp_path / "x-1" / "config.yaml").write_text("name: x\n")
    document = show(Store(tmp_path).run("x-1"))
    assert document["state"] == "lost"
    assert "was its launch interrupted?" in document["problem"]
