import os

import pytest
import torch

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.training.checkpoint import Position, damage, read, write_atomically
from tests.training import ranks
from tests.training.conftest import events, make_run

STATE = {
    "model": {"weight": torch.arange(2000.0)},
    "optimizer": {},
    "epoch": 1,
    "step": 5,
    "samples_consumed": 20,
    "epoch_done": True,
    "rng": [],
}


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "model_epoch1.pth"
    write_atomically(path, STATE)
    return path


def test_a_whole_checkpoint_is_read_back_as_plain_data(whole):
    assert damage(whole) is None
    assert torch.equal(read(whole)["model"]["weight"], STATE["model"]["weight"])


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "broken_in"),))

    path = tmp_path / "model_epoch1.pth"
    torch.save(STATE | {"model": Evil()}, path)
    assert "UnpicklingError" in damage(path)
    assert not (tmp_path / "broken_in").exists()


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_checkpoint_is_seen(whole, cut):
    content = whole.read_bytes()
    whole.write_bytes(content[: int(cut * len(content)) if isinstance(cut, float) else cut])
    assert damage(whole)


def test_a_flipped_bit_in_a_weight_is_seen(whole):
    content = bytearray(whole.read_bytes())
    at = content.index(torch.arange(1000.0, 1010.0).numpy().tobytes())
    content[at] ^= 1
    whole.write_bytes(content)
    assert "checksum" in damage(whole)


def test_a_file_of_something_else_is_seen(tmp_path):
    path = tmp_path / "model_epoch1.pth"
    torch.save({"model": {}}, path)
    assert "lacks" in damage(path)
    assert damage(tmp_path / "missing.pth")


def test_a_write_that_fails_leaves_the_old_checkpoint_and_nothing_else(whole):
    with pytest.raises(Exception, match="pickle"):
        write_atomically(whole, STATE | {"model": lambda: None})
    assert damage(whole) is None
    assert list(whole.parent.iterdir()) == [whole]


def test_checkpoints_are_ordered_by_progress_not_by_name(tmp_path):
    names = ["model_epoch10.pth", "model_epoch2.pth", "model_epoch2_step9.pth", "model_epoch2_step11.pth"]
    for name in [*names, "model_epochX.pth", ".model_epoch3.pth.tmp"]:
        (tmp_path / name).touch()
    assert [file.path.name for file in checkpoint_files(tmp_path)] == [names[2], names[3], names[1], names[0]]


def test_only_the_newest_checkpoints_are_kept(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "checkpoints.keep=2")
    in_ranks(ranks.save_epochs, 2, run_dir, 4)
    assert [file.path.name for file in checkpoint_files(run_dir)] == ["model_epoch3.pth", "model_epoch4.pth"]
    assert (run_dir / "latest").readlink().name == "model_epoch4.pth"
    assert [c["epoch"] for c in events(run_dir, 0, "checkpoint")] == [1, 2, 3, 4]


def test_positions_count_steps_over_the_run_and_samples_over_the_epoch():
    at = Position().advanced(64).advanced(32)
    assert at == Position(epoch=1, step=2, samples_consumed=96)
    assert at.finished_epoch().next_epoch() == Position(epoch=2, step=2)


def test_a_full_disk_is_said_and_training_goes_on(in_ranks, tmp_path):
    run_dir = make_run(tmp_path / "run", "epochs=1", "synthetic_samples=32", "dataset=synthetic")
    assert in_ranks(ranks.train_main_with_little_disk, 1, run_dir, 100_000) == [0]
    (warning,) = events(run_dir, 0, "warning")
    assert "could not write the checkpoint model_epoch1.pth" in warning["message"]
    assert events(run_dir, 0, "end")[0]["outcome"] == "finished"
    assert not list(run_dir.glob("*.pth*")) + list(run_dir.glob(".*"))
