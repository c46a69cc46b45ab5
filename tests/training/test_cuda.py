"""What only a GPU can show. One GPU is enough: NCCL takes one rank a GPU, so these runs have one rank."""

import pytest
import torch

from ddp_core.training.checkpoint import read
from ddp_core.training.distributed import choose_device
from tests.training import ranks
from tests.training.conftest import events, make_run, steps

pytestmark = pytest.mark.gpu


def test_cuda_is_chosen_where_each_rank_has_a_gpu():
    assert choose_device("auto", 0, 1) == (torch.device("cuda", 0), None)
    assert choose_device("cuda", 0, 1) == (torch.device("cuda", 0), None)


def test_a_run_on_a_gpu_joins_nccl_and_logs_its_gpu_and_memory(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "device=cuda", "epochs=2", "nproc_per_node=1")
    assert in_ranks(ranks.train_main, 1, run_dir, 0) == [0]
    (joined,) = events(run_dir, 0, "joined")
    assert (joined["device"], joined["backend"]) == ("cuda:0", "nccl")
    assert joined["gpu"].startswith("GPU-")
    log = steps(run_dir, 0)
    assert [line["step"] for line in log] == list(range(1, joined["steps_total"] + 1))
    for line in log:
        assert 0 < line["memory_allocated"] <= line["memory_reserved"]
        parts = [line[p] for p in ("data_s", "forward_s", "backward_s", "optimizer_s")]
        assert min(parts) > 0
        assert line["samples_per_s"] * sum(parts) <= 16 * 1.001
    assert log[-1]["loss"] < log[0]["loss"]


def test_a_step_is_logged_without_waiting_for_the_one_after_it(in_ranks):
    waited, behind = in_ranks(ranks.log_a_slow_gpu, 1)[0]
    assert waited < 0.2, "end() waited for the work it had just been given"
    assert behind == [1], "step 1 is read when step 2 is enqueued"


def test_a_run_on_a_gpu_is_continued_with_its_random_numbers(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "device=cuda", "epochs=1", "nproc_per_node=1")
    assert in_ranks(ranks.train_main, 1, run_dir, 0) == [0]
    state = read(run_dir / "model_epoch1.pth")
    assert all(tensor.device.type == "cpu" for tensor in state["model"].values())
    assert "cuda" in state["rng"][0]
    make_run(run_dir, "device=cuda", "epochs=2", "nproc_per_node=1")
    assert in_ranks(ranks.train_main, 1, run_dir, 1) == [0]
    assert events(run_dir, 0, "resumed", attempt=1)[0]["checkpoint"] == "model_epoch1.pth"
