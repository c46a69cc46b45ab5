"""When checkpoints are written, which stay, and which one a run goes on from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.checkpoint_files import checkpoint_files
from ddp_core.config import apply_overrides, from_dict
from ddp_core.errors import UserError
from ddp_core.telemetry.rank_log import RankLog
from ddp_core.training import checkpoint
from ddp_core.training.checkpoint import Checkpoints, Position, read
from ddp_core.training.distributed import World
from tests.training.conftest import events

ALONE = World(0, 0, 1, torch.device("cpu"), None)


class Training:
    """As much of a training as its checkpoints see: a model whose one weight says how far it is."""

    def __init__(self, run_dir: Path, *overrides: str, attempt: int = 0, width: int = 1) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.model = nn.Linear(width, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpoints = Checkpoints(
            run_dir,
            from_dict(apply_overrides({}, overrides)),
            parts={"model": self.model, "optimizer": self.optimizer},
            world=ALONE,
            log=RankLog(run_dir / "metrics" / f"attempt_{attempt}" / "rank_0.jsonl"),
        )

    def at(self, weight: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(weight)

    def epoch(self, number: int, *, always: bool = True, loss: float | None = None) -> None:
        self.at(number)
        self.checkpoints.save(Position(number, number * 10, epoch_done=True), always=always, loss=loss)

    def restore(self) -> Position | None:
        return self.checkpoints.restore(self.attempt)

    def warnings(self) -> list[str]:
        return [event["message"] for event in events(self.run_dir, 0, "warning", self.attempt)]


@pytest.fixture
def train(tmp_path):
    """Make a training of the run in tmp_path; what it saves is written at the end at the latest."""
    made = []

    def train(*overrides: str, **options) -> Training:
        made.append(Training(tmp_path, *overrides, **options))
        return made[-1]

    yield train
    for training in made:
        training.checkpoints.close()


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing waits until it is set."""
    go = threading.Event()
    write = checkpoint.write_atomically

    def wait_and_write(path, state):
        assert go.wait(30)
        write(path, state)

    monkeypatch.setattr(checkpoint, "write_atomically", wait_and_write)
    yield go
    go.set()


def names(folder: Path) -> list[str]:
    return [file.path.name for file in checkpoint_files(folder)]


def weight(path: Path) -> float:
    return read(path)["model"]["weight"].item()


# --- when, and which stay ---


def test_the_best_stays_besides_the_newest(train, tmp_path):
    training = train("checkpoints.keep=1")
    for number, loss in ((1, 0.5), (2, 0.3), (3, 0.4), (4, float("nan"))):
        training.epoch(number, loss=loss)
    training.checkpoints.close()
    assert names(tmp_path) == ["model_epoch2.pth", "model_epoch4.pth"]
    assert (tmp_path / "best").readlink().name == "model_epoch2.pth"
    assert (tmp_path / "latest").readlink().name == "model_epoch4.pth"


def test_a_continued_run_knows_what_was_best(train, tmp_path):
    first = train("checkpoints.keep=1")
    first.epoch(1, loss=0.3)
    first.checkpoints.close()
    again = train("checkpoints.keep=1", attempt=1)
    again.restore()
    again.epoch(2, loss=0.4)
    again.checkpoints.close()
    assert (tmp_path / "best").readlink().name == "model_epoch1.pth"
    assert names(tmp_path) == ["model_epoch1.pth", "model_epoch2.pth"]


def test_without_keep_best_only_the_newest_stay(train, tmp_path):
    training = train("checkpoints.keep=1", "checkpoints.keep_best=false")
    training.epoch(1, loss=0.3)
    training.epoch(2, loss=0.4)
    training.checkpoints.close()
    assert names(tmp_path) == ["model_epoch2.pth"]
    assert not (tmp_path / "best").is_symlink()


def test_within_an_epoch_they_come_every_so_many_steps_of_the_run(train, tmp_path):
    training = train("checkpoints.every_steps=4", "checkpoints.keep=10")
    at = Position(epoch=3, step=6)
    for _ in range(7):
        at = at.advanced(32)
        training.checkpoints.step(at)
    training.checkpoints.close()
    assert names(tmp_path) == ["model_epoch3_step8.pth", "model_epoch3_step12.pth"]
    state = read(tmp_path / "model_epoch3_step12.pth")
    assert (state["samples_consumed"], state["epoch_done"]) == (6 * 32, False)


@pytest.mark.parametrize(("minutes", "expected"), [(1e-9, 3), (60, 0)])
def test_within_an_epoch_they_come_after_so_many_minutes(train, tmp_path, minutes, expected):
    training = train(f"checkpoints.every_minutes={minutes}", "checkpoints.keep=10")
    at = Position()
    for _ in range(3):
        at = at.advanced(32)
        training.checkpoints.step(at)
    training.checkpoints.close()
    assert len(names(tmp_path)) == expected


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(train, slow_disk, tmp_path):
    training = train()
    training.epoch(1)
    training.at(99)
    assert names(tmp_path) == []
    slow_disk.set()
    training.checkpoints.close()
    assert weight(tmp_path / "model_epoch1.pth") == 1
    (event,) = events(tmp_path, 0, "checkpoint")
    assert (event["path"], event["epoch"], event["step"]) == ("model_epoch1.pth", 1, 10)
    assert event["stall_s"] < event["seconds"]


def test_epochs_that_end_while_one_is_written_get_none_but_the_best_of_them(train, slow_disk, tmp_path):
    training = train("checkpoints.keep=10")
    training.epoch(1, loss=0.5)
    training.epoch(2, always=False, loss=0.2)
    training.epoch(3, always=False, loss=0.3)
    training.at(99)
    slow_disk.set()
    training.checkpoints.close()
    assert names(tmp_path) == ["model_epoch1.pth", "model_epoch2.pth"]
    assert weight(tmp_path / "best") == 2


# --- which one to go on from ---


@pytest.fixture
def three(train, tmp_path):
    """Checkpoints of three epochs of a first attempt, the first the best."""
    training = train()
    for number, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
        training.epoch(number, loss=loss)
    training.checkpoints.close()
    return tmp_path


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_a_further_attempt_passes_over_damaged_ones_and_says_so(train, three):
    (three / ".model_epoch4.pth.tmp").touch()
    damaged(three / "model_epoch3.pth")
    training = train(attempt=1)
    assert training.restore() == Position(epoch=3, step=20)
    assert training.model.weight.item() == 2
    (warning,) = training.warnings()
    assert warning.startswith("model_epoch3.pth is damaged")
    assert (three / "latest").readlink().name == "model_epoch2.pth"
    assert not (three / ".model_epoch4.pth.tmp").exists()


def test_with_all_of_them_damaged_it_begins_anew_and_says_so(train, three):
    for file in checkpoint_files(three):
        damaged(file.path)
    training = train(attempt=1)
    assert training.restore() is None
    assert len(training.warnings()) == 4
    assert training.warnings()[-1] == "there is no whole checkpoint to continue from: starting anew"


def test_an_older_one_that_was_asked_for_replaces_those_after_it(train, three, monkeypatch):
    monkeypatch.setenv("DDP_RESUME_FROM", str(three / "model_epoch2.pth"))
    training = train(attempt=1)
    assert training.restore() == Position(epoch=3, step=20)
    assert names(three) == ["model_epoch1.pth", "model_epoch2.pth"]
    assert names(three / "superseded" / "attempt_1") == ["model_epoch3.pth"]
    assert [(three / link).readlink().name for link in ("latest", "best")] == ["model_epoch2.pth", "model_epoch1.pth"]
    # When torchrun starts these ranks again they go on from what they have written since.
    training.epoch(4)
    training.checkpoints.close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(attempt=2).restore() == Position(epoch=5, step=40)


def test_the_best_goes_with_those_that_are_replaced(train, tmp_path, monkeypatch):
    training = train()
    for number, loss in ((1, 0.3), (2, 0.1)):
        training.epoch(number, loss=loss)
    training.checkpoints.close()
    monkeypatch.setenv("DDP_RESUME_FROM", str(tmp_path / "model_epoch1.pth"))
    train(attempt=1).restore()
    assert not (tmp_path / "best").is_symlink()


def test_another_runs_checkpoint_or_folder_is_gone_on_from(train, three, tmp_path_factory):
    for asked in (three / "model_epoch3.pth", three / "latest", three):
        other = Training(tmp_path_factory.mktemp("other"), f"checkpoints.resume_from={asked}")
        assert other.restore() == Position(epoch=4, step=30)
        assert other.model.weight.item() == 3
        other.checkpoints.close()
    assert names(three) == ["model_epoch1.pth", "model_epoch2.pth", "model_epoch3.pth"]


def test_what_cannot_be_gone_on_from_is_refused_with_its_name_and_the_reason(train, three, tmp_path_factory):
    damaged(three / "model_epoch1.pth")
    empty = tmp_path_factory.mktemp("empty")
    for asked, width, words in (
        (three / "no.pth", 1, "there is no checkpoint .*no.pth"),
        (empty, 1, "empty.* has no whole checkpoint"),
        (three / "model_epoch1.pth", 1, "model_epoch1.pth cannot be continued from: BadZipFile"),
        (three / "model_epoch3.pth", 2, "model_epoch3.pth is not a checkpoint of this model: .*size mismatch"),
    ):
        other = Training(empty, f"checkpoints.resume_from={asked}", width=width)
        with pytest.raises(UserError, match=words) as caught:
            other.restore()
        assert caught.value.field == "checkpoints.resume_from"
        other.checkpoints.close()


def test_an_optimizer_of_another_kind_begins_anew_and_is_said(train, three, tmp_path_factory):
    other = Training(
        tmp_path_factory.mktemp("other"), f"checkpoints.resume_from={three / 'latest'}", "training.optimizer=adamw"
    )
    other.restore()
    assert other.model.weight.item() == 3
    (warning,) = other.warnings()
    assert "optimizer (adamw instead of sgd)" in warning
    other.checkpoints.close()
