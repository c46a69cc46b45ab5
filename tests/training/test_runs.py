"""Whole runs in real ranks: under torchrun, and, where only the training counts, in ranks that start quicker."""

import json
import os
import shutil
import signal

import pytest
import torch

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.config import load
from ddp_core.training.checkpoint import damage, read
from tests.conftest import wait_for
from tests.training import ranks
from tests.training.conftest import events, make_run, read_log, steps
from tests.training.test_data import image_folder

# BatchNorm, dropout and a last batch that is smaller: what a continued run could get wrong.
HARD = ("model=mobilenet_v3_small", "dataset=synthetic", "synthetic_samples=92", "batch_size=8", "epochs=4")


def same(a, b):
    """Compare two checkpoints bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def outcomes(run_dir, nproc, attempt=0):
    return [e["outcome"] for rank in range(nproc) for e in events(run_dir, rank, "end", attempt)]


@pytest.fixture(scope="module")
def finished(torchrun, tmp_path_factory):
    """A run of 4 ranks on digits that ended by itself."""
    run_dir = make_run(tmp_path_factory.mktemp("finished"), "epochs=3", "lr=0.02")
    run = torchrun(run_dir, 4)
    assert run.wait() == 0, run.logs("stderr.log")
    return run_dir


@pytest.fixture(scope="module")
def unbroken(in_ranks, tmp_path_factory):
    """The run of 2 ranks that the broken ones must equal in the end."""
    run_dir = make_run(tmp_path_factory.mktemp("unbroken"), *HARD)
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    return run_dir


def test_each_rank_logs_its_start_joining_and_end(finished):
    pids = set()
    for rank in range(4):
        first, *_, last = read_log(finished, rank)
        assert first["event"] == "start"
        assert (first["rank"], first["local_rank"], first["world_size"], first["attempt"]) == (rank, rank, 4, 0)
        assert first["version"] == 1
        pids.add(first["pid"])
        (joined,) = events(finished, rank, "joined")
        del joined["ts"]
        assert joined == {
            "event": "joined",
            "device": "cpu",
            "backend": "gloo",
            "gpu": None,
            "steps_per_epoch": 23,
            "epochs": 3,
            "steps_total": 69,
            "train_samples": 1437,
            "val_samples": 360,
            "parameters": 151_306,
            "batch_size": 16,
            "accumulation": 1,
            "effective_batch": 64,
            "lr": 0.02,
            "precision": "fp32",
        }
        assert (last["event"], last["outcome"]) == ("end", "finished")
    assert len(pids) == 4


def test_each_rank_logs_every_step_with_its_own_numbers(finished):
    logs = [steps(finished, rank) for rank in range(4)]
    for log in logs:
        assert [line["step"] for line in log] == list(range(1, 70))
        assert [line["epoch"] for line in log] == [1] * 23 + [2] * 23 + [3] * 23
        for line in log:
            assert set(line) - {"comm_s", "overlap_s"} == {
                "ts", "step", "epoch", "loss", "accuracy", "lr", "samples_per_s", "grad_norm", "rank_grad_norm",
                "data_s", "forward_s", "backward_s", "optimizer_s",
            }  # fmt: skip
            assert 0 <= line["accuracy"] <= 1
            assert line["lr"] == 0.02
            parts = [line[p] for p in ("data_s", "forward_s", "backward_s", "optimizer_s")]
            assert min(parts) > 0
            samples = 8 if line["step"] % 23 == 0 else 16
            # The parts are of one clock, and the step lasts at least as long as they do together.
            assert sum(parts) <= samples / line["samples_per_s"] * 1.001
    assert len({log[0]["loss"] for log in logs}) == 4, "each rank has samples of its own"


def test_validation_is_the_same_on_every_rank(finished):
    lines = [
        [(v["step"], v["epoch"], v["val_loss"], v["val_accuracy"]) for v in read_log(finished, rank) if "val_loss" in v]
        for rank in range(4)
    ]
    assert lines[0] == lines[1] == lines[2] == lines[3]
    assert [line[:2] for line in lines[0]] == [(23, 1), (46, 2), (69, 3)]
    right = lines[0][-1][3] * 360
    assert right == pytest.approx(round(right), abs=1e-6)
    assert lines[0][-1][3] > 0.9


def test_checkpoints_are_whole_and_the_newest_is_linked(finished):
    written = events(finished, 0, "checkpoint")
    assert [(c["path"], c["epoch"], c["step"]) for c in (written[0], written[-1])] == [
        ("model_epoch1.pth", 1, 23),
        ("model_epoch3.pth", 3, 69),
    ]
    assert (finished / "latest").readlink().name == "model_epoch3.pth"
    assert not [p for p in finished.iterdir() if p.name.endswith(".tmp")]
    state = read(finished / "latest")
    assert not [name for name in state["model"] if name.startswith("module.")]
    assert (state["epoch"], state["step"], state["samples_consumed"], state["epoch_done"]) == (3, 69, 1440, True)
    assert len(state["rng"]) == state["world_size"] == 4
    assert state["config"] == load(finished / "config.yaml").model_dump(mode="json")
    assert state["torch"] == torch.__version__
    for rank in (1, 2, 3):
        assert not events(finished, rank, "checkpoint")


def test_quick_epochs_do_not_write_a_checkpoint_each(in_ranks, tmp_path):
    quick = ("dataset=synthetic", "synthetic_samples=8", "image_size=4", "epochs=30")
    run_dir = make_run(tmp_path / "run", *quick)
    assert in_ranks(ranks.train_main, 1, run_dir, 0) == [0]
    written = [c["path"] for c in events(run_dir, 0, "checkpoint")]
    assert (written[0], written[-1]) == ("model_epoch1.pth", "model_epoch30.pth")
    assert len(written) < 15


def test_a_new_attempt_continues_from_the_newest_whole_checkpoint_bit_for_bit(finished, in_ranks, tmp_path):
    run_dir = tmp_path / "continued"
    run_dir.mkdir()
    shutil.copy(finished / "config.yaml", run_dir)
    shutil.copy(finished / "model_epoch1.pth", run_dir)
    (run_dir / "model_epoch2.pth").write_bytes((finished / "model_epoch1.pth").read_bytes()[:-1000])
    assert in_ranks(ranks.train_main, 4, run_dir, 1) == [0] * 4
    (warning,) = events(run_dir, 0, "warning", attempt=1)
    assert "model_epoch2.pth is damaged" in warning["message"]
    for rank in range(4):
        (resumed,) = events(run_dir, rank, "resumed", attempt=1)
        assert (resumed["checkpoint"], resumed["epoch"], resumed["step"]) == ("model_epoch1.pth", 1, 23)
        assert [line["step"] for line in steps(run_dir, rank, attempt=1)] == list(range(24, 70))
    assert same(read(run_dir / "model_epoch3.pth"), read(finished / "model_epoch3.pth"))


def test_an_attempt_without_any_checkpoint_starts_anew_and_says_so(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "dataset=synthetic", "synthetic_samples=8", "image_size=4", "epochs=1")
    assert in_ranks(ranks.train_main, 2, run_dir, 3) == [0, 0]
    assert "starting anew" in events(run_dir, 0, "warning", attempt=3)[0]["message"]
    assert steps(run_dir, 1, attempt=3)[0]["step"] == 1


def test_a_stop_leaves_a_whole_checkpoint_from_which_the_run_ends_as_if_unbroken(
    torchrun, in_ranks, unbroken, tmp_path
):
    run_dir = make_run(tmp_path / "stopped", *HARD, "num_workers=1")
    run = torchrun(run_dir, 2)
    # In the second epoch: 6 steps an epoch.
    wait_for(lambda: len(steps(run_dir, 1)) >= 8, "step 8", timeout=100)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert outcomes(run_dir, 2) == ["stopped", "stopped"]
    last = [steps(run_dir, rank)[-1]["step"] for rank in range(2)]
    assert last[0] == last[1] < 24, "the run had ended before it was stopped"
    newest = checkpoint_files(run_dir)[-1].path
    assert damage(newest) is None
    assert (run_dir / "latest").readlink().name == newest.name
    assert read(newest)["step"] == last[0]
    assert not run.logs("stderr.log").strip(), "a stop is no error"

    assert in_ranks(ranks.train_main, 2, run_dir, 1) == [0, 0]
    assert steps(run_dir, 0, attempt=1)[0]["step"] == last[0] + 1
    continued, whole = read(run_dir / "latest"), read(unbroken / "latest")
    continued["config"] = whole["config"]  # the stopped one had loader workers
    assert same(continued, whole)


def test_a_run_whose_rank_was_killed_is_continued_by_torchrun_and_ends_as_if_unbroken(torchrun, unbroken, tmp_path):
    run_dir = make_run(tmp_path / "killed", *HARD)
    run = torchrun(run_dir, 2, "--max-restarts", "1")
    wait_for(lambda: events(run_dir, 0, "checkpoint"), "a checkpoint", timeout=100)
    os.kill(events(run_dir, 1, "start")[0]["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.logs("stderr.log")
    assert events(run_dir, 0, "resumed", attempt=1)[0]["checkpoint"].startswith("model_epoch")
    assert outcomes(run_dir, 2, attempt=1) == ["finished", "finished"]
    assert same(read(run_dir / "latest"), read(unbroken / "latest"))


def test_a_rank_that_raises_ends_the_run_with_its_message_and_traceback(torchrun, tmp_path):
    images = image_folder(tmp_path / "images", count=8)
    broken = images / "train" / "ant" / "3.png"
    broken.write_bytes(b"no image")
    run_dir = make_run(
        tmp_path / "run", "dataset=image_folder", f"data_dir={images}", "image_size=16", "batch_size=2", "num_workers=1"
    )
    run = torchrun(run_dir, 2)
    assert run.wait() != 0
    assert outcomes(run_dir, 2) == ["failed", "failed"]
    messages = [events(run_dir, rank, "end")[0]["message"] for rank in range(2)]
    (culprit,) = [rank for rank, message in enumerate(messages) if str(broken) in message]
    assert "\n" not in messages[culprit]
    assert "UnidentifiedImageError" in run.logs("stderr.log")
    assert "Traceback" in run.logs("stderr.log")
    error = json.loads(next((run_dir / "logs").glob(f"*/attempt_0/{culprit}/error.json")).read_text())
    assert str(broken) in error["message"]["message"]


def test_what_the_user_got_wrong_is_one_line_without_a_traceback(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "dataset=image_folder", f"data_dir={tmp_path}/nowhere")
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [1, 1]
    assert outcomes(run_dir, 2) == ["failed", "failed"]
    assert "no folder" in events(run_dir, 1, "end")[0]["message"]
    said = (run_dir / "stderr_1").read_text()
    assert said.startswith("training.data_dir: there is no folder")
    assert said.count("\n") == 1


def test_a_diverged_loss_is_logged_as_it_is_and_can_be_skipped(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "model=mlp", "lr=100", "epochs=3", "nonfinite=skip")
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    assert "NaN" in {line["loss"] for line in steps(run_dir, 0)}
    assert outcomes(run_dir, 2) == ["finished", "finished"]
