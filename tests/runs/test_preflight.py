"""What is said about a config before it is launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.config import RunConfig, from_dict
from ddp_core.runs import preflight, split_preview
from ddp_core.runs.preflight import scaled_lr
from ddp_core.training import schedule

NO_GPU = {"driver": None, "error": "no driver", "gpus": []}


def config(**sections: dict[str, object]) -> RunConfig:
    return from_dict({"name": "x", **sections})


def findings(checked: RunConfig) -> dict[str | None, tuple[str, str]]:
    return {f["field"]: (f["level"], f["message"]) for f in preflight(checked, NO_GPU)}


def images(folder: Path, count: int) -> str:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for n in range(count // 2):
                (folder / part / name / f"{n}.png").touch()
    return str(folder)


def test_the_preview_counts_accumulation_and_what_is_padded_or_dropped():
    launch, training = {"nproc_per_node": 4}, {"batch_size": 16, "accumulation": 5, "epochs": 3}
    preview = split_preview(config(launch=launch, training=training))
    assert (preview["effective_batch"], preview["padded"], preview["dropped"]) == (320, 3, 0)
    assert (preview["per_rank"], preview["steps_per_epoch"], preview["steps_total"]) == (360, 5, 15)
    preview = split_preview(config(launch=launch, training={**training, "drop_last": True}))
    assert (preview["per_rank"], preview["padded"], preview["dropped"]) == (359, 0, 1)


@pytest.mark.parametrize(
    ("training", "lr"),
    [
        ({"lr_scaling": "none"}, 0.1),
        ({"lr_scaling": "linear"}, 0.8),
        ({"lr_scaling": "linear", "lr_batch": 64}, 0.2),
        ({"lr_scaling": "sqrt", "lr_batch": 512}, 0.05),
    ],
)
def test_the_learning_rate_is_scaled_as_the_training_does_it(training: dict[str, object], lr: float):
    checked = config(
        launch={"nproc_per_node": 4}, training={"lr": 0.1, "batch_size": 16, "accumulation": 2, **training}
    )
    assert scaled_lr(checked) == pytest.approx(lr)
    assert scaled_lr(checked) == schedule.scaled_lr(checked, 4)
    assert split_preview(checked)["lr"] == scaled_lr(checked)


def test_what_only_cuda_can_do_is_refused_with_the_reason_it_will_be_the_cpu():
    found = findings(config(training={"precision": "fp16"}, ddp={"sync_batchnorm": True}))
    for field in ("training.precision", "ddp.sync_batchnorm"):
        level, message = found[field]
        assert level == "error"
        assert "on the CPU (no driver)" in message


def test_what_does_not_fit_a_folder_of_images_is_found_by_counting(tmp_path: Path):
    training = {"dataset": "image_folder", "data_dir": images(tmp_path, 20), "batch_size": 2}
    launch = {"nproc_per_node": 2}
    assert "training.accumulation" not in findings(config(launch=launch, training={**training, "accumulation": 5}))
    level, message = findings(config(launch=launch, training={**training, "accumulation": 6}))["training.accumulation"]
    assert (level, "only 5 batches" in message) == ("error", True)
    launch = {"nproc_per_node": 21}
    assert findings(config(launch=launch, training={**training, "drop_last": True}))["training.drop_last"][0] == "error"


def test_a_checkpoint_to_resume_from_must_be_there(tmp_path: Path):
    def level(path: Path) -> str | None:
        return findings(config(checkpoints={"resume_from": str(path)})).get("checkpoints.resume_from", (None, ""))[0]

    assert level(tmp_path / "nowhere.pth") == "error"
    assert level(tmp_path) == "error"
    (tmp_path / "model_epoch3.pth").touch()
    assert level(tmp_path) is None
    assert level(tmp_path / "model_epoch3.pth") is None


def test_automatic_loader_workers_never_crowd_the_machine_and_chosen_ones_may():
    launch = {"nproc_per_node": 1}
    assert "training.num_workers" not in findings(config(launch=launch, training={"num_workers": "auto"}))
    assert findings(config(launch=launch, training={"num_workers": 256}))["training.num_workers"][0] == "warning"


def test_compiling_without_a_compiler_is_refused_and_what_can_compile_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled = config(launch={"device": "cpu"}, training={"compile": True})
    assert "training.compile" not in findings(compiled)
    monkeypatch.setenv("DDP_LEASES", str(tmp_path))  # where it is remembered that it can
    monkeypatch.setenv("PATH", str(tmp_path))
    level, message = findings(compiled)["training.compile"]
    assert level == "error"
    assert "C++ compiler" in message


def test_no_check_imports_torch():
    code = """
import sys
from ddp_core.config import RunConfig
from ddp_core.runs import preflight, split_preview
preflight(RunConfig()), split_preview(RunConfig())
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
