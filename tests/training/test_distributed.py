import pytest
import torch

from ddp_core.errors import UserError
from ddp_core.training.distributed import choose_device
from tests.training import ranks


def test_four_ranks_get_the_gradients_and_parameters_of_one_process(in_ranks):
    results = in_ranks(ranks.step_like_one_process, 4, 4, 4)
    for result in results:
        assert len(result["gradients"]) == 4
        assert max(result["gradients"]) < 1e-5
        assert result["parameters"] < 1e-5
        assert result["hash"] == results[0]["hash"], "ranks ended with different parameters"


def test_two_ranks_get_the_gradients_and_parameters_of_one_process(in_ranks):
    for result in in_ranks(ranks.step_like_one_process, 2, 8, 4):
        assert max(result["gradients"]) < 1e-5
        assert result["parameters"] < 1e-5


def test_validation_counts_each_sample_once_on_any_size(in_ranks):
    sizes = [1, 7, 997, 1000]
    for counts in in_ranks(ranks.count_validation, 4, sizes):
        for size in sizes:
            loss, accuracy, counted = counts[size]["result"]
            assert counted == size
            assert loss == pytest.approx(counts[size]["loss"], rel=1e-5)
            assert accuracy == pytest.approx(counts[size]["accuracy"], abs=1e-9)


def test_validation_measures_rank_zeros_model_on_every_rank(in_ranks):
    for measured, alone in in_ranks(ranks.validate_with_statistics_of_its_own, 2):
        assert measured == pytest.approx(alone, rel=1e-5)


def test_a_stop_on_one_rank_ends_validation_on_all(in_ranks):
    assert in_ranks(ranks.validate_while_stopping, 2) == [None, None]


def test_wrapping_leaves_the_model_as_it_was_and_buffers_become_rank_zeros(in_ranks):
    for untouched, same_rng, clean, running_mean in in_ranks(ranks.wrap_batchnorm_and_dropout, 2):
        assert untouched
        assert same_rng
        assert clean
        assert running_mean == [1.0, 1.0]


def test_a_failed_preparation_is_the_same_error_on_every_rank(in_ranks):
    results = in_ranks(ranks.prepare_and_fail, 3)
    assert [message for message, _, _ in results] == ["training.dataset: no network"] * 3
    assert [calls for _, calls, _ in results] == [[True], [], []]
    assert all(total == [3.0] for _, _, total in results)


def test_others_wait_for_what_rank_zero_prepares(in_ranks, tmp_path):
    assert in_ranks(ranks.prepare_a_file, 3, str(tmp_path)) == ["whole"] * 3


def test_all_ranks_stop_after_the_same_step(in_ranks):
    assert in_ranks(ranks.vote, 4, 5) == [5] * 4


def test_a_rank_that_raises_leaves_at_once_and_does_not_let_others_hang(in_ranks):
    results = in_ranks(ranks.leave_by_exception, 3)
    assert results[1][0] == "ValueError"
    for _, seconds, initialized in results:
        assert seconds < 20
        assert not initialized


def test_a_rank_that_left_during_a_stop_is_not_a_failure_of_the_others(in_ranks):
    assert in_ranks(ranks.late_to_be_ready, 3, 1, missing=1) == [False, None, False]


def test_a_new_attempt_does_not_look_for_the_ranks_of_the_last_one(in_ranks):
    """torchrun serves one store for all attempts; in it are the addresses of ranks that are gone."""
    agents = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in ("0", "1"):
        results = in_ranks(ranks.join_late, 2, 1, environ_of_all=environ | {"TORCHELASTIC_RESTART_COUNT": attempt})
        assert results == [[2.0], [2.0]]


def test_device_cpu_is_cpu():
    assert choose_device("cpu", 0, 1) == (torch.device("cpu"), None)


def test_device_cuda_that_cannot_be_used_says_why(monkeypatch):
    with pytest.raises(UserError) as caught:
        choose_device("cuda", 0, torch.cuda.device_count() + 1)
    assert caught.value.field == "launch.device"
    assert any(why in str(caught.value) for why in ("without CUDA", "finds no GPU", "need one each"))


def test_training_on_the_cpu_while_holding_gpus_is_said(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    device, warning = choose_device("auto", 0, 1000)
    assert device.type == "cpu"
    assert "although the run holds GPUs" in warning
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto", 0, 1000) == (torch.device("cpu"), None)
