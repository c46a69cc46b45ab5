"""What only a GPU can show. One GPU is enough: NCCL takes one rank a GPU, so these runs have one rank."""

import pytest
import torch

from ddp_core.training.checkpoint import _on_cpu, read
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
        assert 0 < line["memory_allocated"] <= line["memory_peak"] <= line["memory_reserved"]
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


def test_fp16_scales_its_loss_and_goes_on_with_the_scale(in_ranks, tmp_path):
    options = ("device=cuda", "nproc_per_node=1", "precision=fp16", "clip_grad_norm=1.0", "ema_decay=0.9")
    run_dir = make_run(tmp_path / "run", *options, "epochs=2")
    assert in_ranks(ranks.train_main, 1, run_dir, 0) == [0]
    losses = [line["loss"] for line in steps(run_dir, 0)]
    assert sum(losses[-20:]) < sum(losses[:20])
    scale = read(run_dir / "model_epoch2.pth")["scaler"]["scale"]
    assert scale > 1
    make_run(run_dir, *options, "epochs=3")
    assert in_ranks(ranks.train_main, 1, run_dir, 1) == [0]
    assert read(run_dir / "model_epoch3.pth")["scaler"]["scale"] == scale


@pytest.mark.parametrize(
    "options",
    [
        ("model=mobilenet_v3_small", "ddp.sync_batchnorm=true", "precision=bf16", "channels_last=true"),
        ("ddp.gradient_compression=fp16", "accumulation=2", "optimizer=adamw", "num_workers=2"),
    ],
    ids=lambda options: options[1].partition("=")[0],
)
def test_options_train_on_a_gpu(in_ranks, tmp_path, options):
    small = ("dataset=synthetic", "synthetic_samples=128", "batch_size=8", "epochs=10", "watch.every_steps=1")
    run_dir = make_run(tmp_path / "run", "device=cuda", "nproc_per_node=1", *small, *options)
    assert in_ranks(ranks.train_main, 1, run_dir, 0) == [0]
    losses = [line["loss"] for line in steps(run_dir, 0)]
    epoch = len(losses) // 10
    assert sum(losses[-epoch:]) < 0.9 * sum(losses[:epoch])
    assert not events(run_dir, 0, "watch")


def test_a_copy_for_a_checkpoint_is_pinned_and_stays_as_it_is_while_training_goes_on():
    weight = torch.arange(1_000_000.0, device="cuda")
    copied = _on_cpu({"model": {"weight": weight}, "step": 3})
    weight.zero_()
    assert copied["step"] == 3
    assert copied["model"]["weight"].is_pinned()
    assert torch.equal(copied["model"]["weight"], torch.arange(1_000_000.0))
