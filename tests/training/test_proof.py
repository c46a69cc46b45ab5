"""The proofs: ranks do what one process does, a broken run ends as an unbroken one, each watch is seen to fire."""

import os
import random
import subprocess
import sys

import pytest
import torch

from ddp_core.config import is_torchrun_variable
from ddp_core.errors import UserError
from ddp_core.training import spawn
from ddp_core.training.checkpoint import damage, read
from tests.training import proof_ranks, ranks
from tests.training.conftest import events, make_run, steps
from tests.training.test_runs import same

SMALL = ("dataset=synthetic", "image_size=8", "epochs=3", "lr=0.05")
# All that a continued run could get wrong: BatchNorm, dropout, a short last step, and every state that is carried.
CARRIED = (
    "model=mobilenet_v3_small", "dataset=synthetic", "synthetic_samples=92", "image_size=32", "batch_size=4",
    "accumulation=2", "epochs=6", "optimizer=adamw", "lr=0.001", "schedule=cosine", "warmup_epochs=1",
    "ema_decay=0.9", "label_smoothing=0.1", "clip_grad_norm=1.0", "checkpoints.every_steps=2",
)  # fmt: skip
STEPS = 6 * 6  # 92 samples on 2 ranks, 8 of a rank a step: six steps, the last one short


def train_alone(run_dir):
    """Train in one process without torchrun and without a process group."""
    environ = {k: v for k, v in os.environ.items() if not is_torchrun_variable(k)}
    environ |= {"DDP_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddp_core.training"]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    return read(run_dir / "latest")


def difference(a, b):
    return max(float((a["model"][name] - b["model"][name]).abs().max()) for name in a["model"])


# --- the same as one process ---


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The single process of batch 16 that the ranks must equal; its last step has 12 samples."""
    run_dir = make_run(tmp_path_factory.mktemp("alone"), *SMALL, "synthetic_samples=92", "batch_size=16")
    state = train_alone(run_dir)
    (joined,) = events(run_dir, 0, "joined")
    assert (joined["backend"], joined["steps_per_epoch"]) == ("none", 6)
    return state


def train_on_ranks(in_ranks, run_dir, nproc, batch, accumulation):
    make_run(run_dir, *SMALL, "synthetic_samples=92", f"batch_size={batch}", f"accumulation={accumulation}")
    assert in_ranks(ranks.train_main, nproc, run_dir, 0) == [0] * nproc
    return read(run_dir / "latest")


@pytest.mark.parametrize("split", [(1, 16, 1), (2, 8, 1), (4, 4, 1), (4, 2, 2), (1, 4, 4)])
def test_a_whole_run_on_ranks_ends_with_the_parameters_of_one_process(alone, in_ranks, tmp_path, split):
    state = train_on_ranks(in_ranks, tmp_path, *split)
    assert state["step"] == alone["step"] == 18
    assert difference(state, alone) < 1e-5


def test_another_effective_batch_would_be_noticed(alone, in_ranks, tmp_path):
    assert difference(train_on_ranks(in_ranks, tmp_path, 2, 3, 3), alone) > 1e-3


def test_a_step_of_several_batches_exchanges_once_and_clips_the_whole(in_ranks):
    for exchanges, norms, apart in in_ranks(proof_ranks.accumulate, 2):
        assert exchanges == [1, 1]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert norms[0] > 0.01, "nothing to clip"
        assert apart < 1e-7


# --- a broken run ends as an unbroken one ---


@pytest.fixture(scope="module")
def unbroken(in_ranks, tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("carried"), *CARRIED)
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    state = read(run_dir / "latest")
    assert state["step"] == STEPS
    return state


@pytest.mark.parametrize("step", random.Random(20).sample(range(3, STEPS), 5))
def test_a_run_killed_at_a_random_step_and_continued_ends_bit_for_bit_as_if_unbroken(
    unbroken, in_ranks, tmp_path, step
):
    run_dir = make_run(tmp_path, *CARRIED)
    in_ranks(proof_ranks.train_until_killed, 2, run_dir, step, step % 2, missing=1)
    assert in_ranks(ranks.train_main, 2, run_dir, 1) == [0, 0]
    (resumed,) = events(run_dir, 1, "resumed", attempt=1)
    assert 0 < resumed["step"] <= step
    assert same(read(run_dir / "latest"), unbroken)


def test_four_ranks_continue_bit_for_bit_too(in_ranks, tmp_path):
    """Without settling DDP's buckets beforehand they differ in the last bits."""
    config = (*SMALL, "synthetic_samples=60", "batch_size=4", "checkpoints.every_steps=2")
    whole, broken = make_run(tmp_path / "whole", *config), make_run(tmp_path / "broken", *config)
    assert in_ranks(ranks.train_main, 4, whole, 0) == [0] * 4
    in_ranks(proof_ranks.train_until_killed, 4, broken, 7, 2, missing=1)
    assert in_ranks(ranks.train_main, 4, broken, 1) == [0] * 4
    assert events(broken, 0, "resumed", attempt=1)[0]["step"] >= 4
    assert same(read(broken / "latest"), read(whole / "latest"))


def test_another_world_size_goes_on_with_the_samples_that_are_left(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=96", "batch_size=4", "epochs=1")
    before = in_ranks(proof_ranks.train_recording, 2, run_dir, 0, 5)
    assert [len(samples) for samples in before] == [20, 20]
    after = in_ranks(proof_ranks.train_recording, 4, run_dir, 1, None)
    assert [len(samples) for samples in after] == [14] * 4
    everything = [sample for samples in (*before, *after) for sample in samples]
    assert sorted(everything) == list(range(96)), "each sample of the epoch exactly once"
    assert read(run_dir / "latest")["world_size"] == 4


# --- the watches ---


def test_a_rank_whose_weights_moved_is_named_with_the_tensor_and_the_step(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=96", "batch_size=4", "watch.every_steps=4", "epochs=2")
    assert in_ranks(proof_ranks.train_perturbed, 4, run_dir, 6, 2) == [0] * 4
    (event,) = events(run_dir, 0, "watch")
    assert (event["check"], event["rank"], event["tensor"], event["step"]) == ("weights", 2, "2.bias", 6)
    assert "rank 2's weights" in event["message"]
    assert not events(run_dir, 2, "watch"), "rank 0 says it, once"


def test_a_forgotten_sampler_is_noticed(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=24", "batch_size=4", "epochs=1")
    assert in_ranks(proof_ranks.train_without_a_sampler, 2, run_dir) == [0, 0]
    (event,) = events(run_dir, 0, "watch")
    assert (event["check"], event["rank"], event["epoch"]) == ("samples", 1, 1)
    assert "train 48 samples, 24 different ones, instead of 24" in event["message"]
    assert "trained by ranks 0, 1" in event["message"]


def test_uneven_ranks_are_refused_before_they_hang(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=96", "batch_size=4")
    assert in_ranks(proof_ranks.train_unevenly, 4, run_dir, 3) == [1] * 4
    (event,) = events(run_dir, 0, "watch")
    assert (event["check"], event["rank"]) == ("batches", 3)
    assert "3 batches" in event["message"]
    assert "6, 6, 6, 3 by rank" in events(run_dir, 1, "end")[0]["message"]


def test_an_undisturbed_run_has_nothing_to_report(alone, in_ranks, tmp_path):
    """BatchNorm's statistics differ between ranks by nature, and padding gives two ranks the same sample."""
    run_dir = make_run(tmp_path, *CARRIED, "synthetic_samples=31", "epochs=2", "watch.every_steps=1")
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    assert not events(run_dir, 0, "watch")
    assert not events(run_dir, 0, "warning")


def test_watches_can_be_turned_off(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=96", "batch_size=4", "watch.enabled=false", "epochs=1")
    assert in_ranks(proof_ranks.train_perturbed, 2, run_dir, 2, 1) == [0, 0]
    assert not events(run_dir, 0, "watch")
    assert "rank_grad_norm" not in steps(run_dir, 0)[0]


# --- losses that are not finite ---

BAD = (*SMALL, "synthetic_samples=96", "batch_size=4", "epochs=1")


def test_a_loss_that_is_not_finite_ends_all_ranks_naming_the_one_and_keeps_the_weights(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *BAD)
    assert in_ranks(proof_ranks.train_with_a_bad_sample, 4, run_dir, 2, 10) == [1] * 4
    for rank in range(4):
        message = events(run_dir, rank, "end")[0]["message"]
        assert "the loss became NaN or infinite on rank 2 in step 3" in message
        assert message.startswith("training.nonfinite")
    assert damage(run_dir / "latest") is None
    state = read(run_dir / "latest")
    assert state["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_loss_that_is_not_finite_is_skipped_by_all_ranks_and_counted(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *BAD, "nonfinite=skip", "watch.every_steps=1")
    assert in_ranks(proof_ranks.train_with_a_bad_sample, 4, run_dir, 1, 6) == [0] * 4
    (skipped,) = events(run_dir, 0, "skipped")
    assert (skipped["step"], skipped["ranks"], skipped["what"], skipped["count"]) == (2, [1], "loss", 1)
    assert not events(run_dir, 0, "watch"), "all ranks left the step out"
    assert all(tensor.isfinite().all() for tensor in read(run_dir / "latest")["model"].values())
    assert steps(run_dir, 0)[1]["loss"] != "NaN", "rank 0's own loss was finite"


# --- endings ---


def test_early_stopping_ends_all_ranks_with_a_reason(in_ranks, tmp_path):
    run_dir = make_run(
        tmp_path, *SMALL, "synthetic_samples=16", "batch_size=8", "lr=1e-12", "epochs=50", "early_stopping=2"
    )
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    for rank in range(2):
        (end,) = events(run_dir, rank, "end")
        assert end["outcome"] == "finished"
        assert "early stopping" in end["reason"]
    assert read(run_dir / "latest")["epoch"] < 50


def test_a_time_limit_ends_the_run_with_a_checkpoint(in_ranks, tmp_path):
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=64", "batch_size=4", "epochs=100000", "max_minutes=0.02")
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    (end,) = events(run_dir, 1, "end")
    assert (end["outcome"], end["reason"]) == ("finished", "time limit of 0.02 minutes")
    assert damage(run_dir / "latest") is None
    assert read(run_dir / "latest")["step"] == steps(run_dir, 0)[-1]["step"] == steps(run_dir, 1)[-1]["step"]


def test_a_rank_waits_for_the_others_as_long_as_it_is_told(in_ranks, tmp_path):
    (waited, message), other = in_ranks(proof_ranks.wait_longer_than_the_timeout, 2, str(tmp_path))
    assert other is None
    assert 0.5 < waited < 20
    assert "1000ms" in message or "timed out" in message.lower()


# --- options ---


@pytest.mark.parametrize(
    "options",
    [
        ("ddp.static_graph=true", "accumulation=2", "ddp.gradient_as_bucket_view=false", "precision=bf16"),
        ("ddp.find_unused_parameters=true", "ddp.bucket_cap_mb=0.01", "channels_last=true", "drop_last=true"),
        ("ddp.gradient_compression=fp16", "optimizer=adamw", "ema_decay=0.5", "clip_grad_norm=0.5"),
        ("ddp.gradient_compression=bf16", "num_workers=auto", "lr_scaling=sqrt", "schedule=step", "step_epochs=5"),
    ],
    ids=lambda options: options[0].partition("=")[0],
)
def test_each_option_trains_and_keeps_the_ranks_equal(in_ranks, tmp_path, options):
    small = (*SMALL, "epochs=10", "synthetic_samples=97", "batch_size=8", "watch.every_steps=1")
    run_dir = make_run(tmp_path, *small, *options)
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    losses = [line["loss"] for line in steps(run_dir, 0)]
    epoch = len(losses) // 10
    assert sum(losses[-epoch:]) < 0.9 * sum(losses[:epoch])
    assert not events(run_dir, 0, "watch")


def test_the_learning_rate_is_scaled_to_the_effective_batch_warms_up_and_falls(in_ranks, tmp_path):
    options = ("lr=0.1", "lr_scaling=linear", "schedule=cosine", "warmup_epochs=1", "epochs=2", "accumulation=2")
    run_dir = make_run(tmp_path, *SMALL, "synthetic_samples=64", "batch_size=4", *options)
    assert in_ranks(ranks.train_main, 2, run_dir, 0) == [0, 0]
    (joined,) = events(run_dir, 0, "joined")
    assert (joined["lr"], joined["effective_batch"], joined["accumulation"]) == (pytest.approx(0.4), 16, 2)
    rates = [line["lr"] for line in steps(run_dir, 1)]
    assert rates[:4] == pytest.approx([0.05, 0.15, 0.25, 0.35])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.4 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * 7 / 8))).item())


@pytest.mark.parametrize("find", [False, True])
def test_unused_parameters_are_named_with_the_option_that_allows_them(in_ranks, find):
    for at_once, later in in_ranks(proof_ranks.wrap_with_unused, 2, find):
        for told in (at_once, later):
            if find:
                assert told is None
            else:
                assert "spare.weight, spare.bias" in told
                assert "ddp.find_unused_parameters" in told


def test_a_model_that_is_wrapped_already_is_refused(in_ranks):
    told = in_ranks(proof_ranks.wrap_twice, 1)[0]
    assert [word for word in ("DataParallel", "DistributedDataParallel") for _ in range(2)] == [
        t.partition("wrapped in ")[2].partition(";")[0] for t in told
    ]


# --- ranks without torchrun ---


def test_spawn_starts_ranks_on_a_free_port_and_gives_their_results():
    assert spawn(proof_ranks.add_up, 3, 10) == [(rank, 33.0, str(rank)) for rank in range(3)]


def test_spawn_ends_the_others_when_a_rank_fails():
    with pytest.raises(Exception, match="rank 1 has had enough"):
        spawn(proof_ranks.fail_on_rank_one, 2)


def test_spawn_refuses_under_torchrun(in_ranks):
    assert "each of them would start 2 more" in in_ranks(proof_ranks.spawn_again, 1)[0]
    with pytest.raises(UserError, match="at least 1"):
        spawn(os.getpid, 0)


def test_spawn_works_from_a_notebook():
    """A function that was typed in: there is no file to import it from."""
    code = (
        "import os\nfrom ddp_core.training import spawn\ndef main():\n    return int(os.environ['RANK'])\n"
        "print(spawn(main, 2))\n"
    )
    process = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout.strip() == "[0, 1]", process.stderr
