"""The launch form and the config, each in terms of the other."""

from __future__ import annotations

import pytest

from dashboard import form
from ddp_core.config import (
    CheckpointsConfig,
    DdpConfig,
    LaunchConfig,
    RunConfig,
    TrainingConfig,
    WatchConfig,
    from_yaml,
)
from ddp_core.errors import UserError

EVERYTHING_CHANGED = RunConfig(
    name="night.run-2",
    launch=LaunchConfig(
        nproc_per_node=2,
        gpus=(1, "GPU-6f1c0b7e"),
        device="cuda",
        share_gpus=True,
        max_restarts=3,
        stop_grace_s=0.1 + 0.2,
        timeout_s=1800,
        omp_num_threads=7,
        env={"A": "1", "EMPTY": "", "EQ": "a=b", "TWO": "x\ny", "SPACED": " z ", "QUOTED": '"q', "U": "ü "},
    ),
    training=TrainingConfig(
        model="resnet18",
        dataset="image_folder",
        data_dir="/data/my images",
        epochs=7,
        batch_size=3,
        accumulation=4,
        optimizer="adamw",
        lr=1e-05,
        lr_scaling="sqrt",
        lr_batch=256,
        schedule="step",
        warmup_epochs=0.5,
        step_epochs=2,
        step_factor=0.25,
        weight_decay=0.0,
        label_smoothing=0.1,
        clip_grad_norm=1.5,
        ema_decay=0.999,
        nonfinite="skip",
        precision="fp16",
        channels_last=True,
        compile=True,
        early_stopping=5,
        max_minutes=90.5,
        drop_last=True,
        seed=2**32 - 1,
        num_workers="auto",
        image_size=64,
        synthetic_samples=11,
    ),
    ddp=DdpConfig(
        find_unused_parameters=True,
        static_graph=False,
        gradient_as_bucket_view=False,
        bucket_cap_mb=12.5,
        sync_batchnorm=True,
        gradient_compression="bf16",
    ),
    checkpoints=CheckpointsConfig(
        every_steps=100, every_minutes=7.5, keep=9, keep_best=False, resume_from="/runs/digits-1/model_epoch 3.pth"
    ),
    watch=WatchConfig(enabled=False, every_steps=7),
)

STATIC_GRAPH = RunConfig(ddp=DdpConfig(static_graph=True))


def flat(config: RunConfig) -> dict[str, object]:
    found = {}
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            found[key] = value
    return found


def test_every_config_field_is_in_exactly_one_group_with_a_label_of_its_own():
    shown = [name for group in form.GROUPS for name in group.fields]
    assert sorted(shown) == sorted(flat(RunConfig()))
    assert all(field.help and "\n" not in field.help for field in form.FIELDS.values())
    assert len({field.label for field in form.FIELDS.values()}) == len(shown)


def test_sample_configs_differ_from_the_default_in_every_field():
    default, changed = flat(RunConfig()), flat(EVERYTHING_CHANGED)
    # It goes together neither with compile nor with find_unused_parameters.
    assert [name for name in default if default[name] == changed[name]] == ["ddp.static_graph"]
    assert STATIC_GRAPH.ddp.static_graph != default["ddp.static_graph"]


def test_what_differs_from_the_defaults_is_counted_where_it_applies():
    assert form.changed(form.fill(RunConfig())) == set()
    everything = form.changed(form.fill(EVERYTHING_CHANGED))
    # The sample trains on a folder of images and watches nothing.
    assert set(form.FIELDS) - everything == {"ddp.static_graph", "training.synthetic_samples", "watch.every_steps"}
    values = form.fill(RunConfig()) | {
        "training.epochs": " 60 ",
        "training.step_factor": "0.5",
        "launch.env": "NOVALUE",
    }
    assert form.changed(values) == {"launch.env"}
    assert form.changed(values | {"training.schedule": "step"}) == {
        "launch.env",
        "training.schedule",
        "training.step_factor",
    }


@pytest.mark.parametrize(
    "config", [RunConfig(), EVERYTHING_CHANGED, STATIC_GRAPH, RunConfig(launch=LaunchConfig(gpus="none"))]
)
def test_round_trip_is_exact(config):
    assert form.read(form.fill(config)) == (config, {})
    assert from_yaml(form.as_yaml(form.fill(config))) == config


def test_help_is_the_schemas_own_text_with_its_range():
    field = form.FIELDS["training.batch_size"]
    assert TrainingConfig.model_fields["batch_size"].description in field.help
    assert "(1 to 1,000,000)" in field.help
    assert form.FIELDS["training.dataset"].options[0] == "digits"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"training.batch_size": "0"}, "training.batch_size", "greater than or equal to 1"),
        ({"training.lr": "fast"}, "training.lr", "number"),
        ({"training.epochs": ""}, "training.epochs", "empty"),
        ({"training.epochs": "2.5"}, "training.epochs", "whole number"),
        ({"training.model": "resnet-18"}, "training.model", "did you mean resnet18?"),
        ({"name": "../up"}, "name", "cannot name a run"),
        ({"launch.device": "cuda", "launch.gpus": "none"}, "launch.gpus", "gpus is none"),
        ({"launch.gpus": "choose"}, "launch.gpus", "choose at least one"),
        ({"launch.gpus": "choose", form.GPU_LIST: ["0", "1"]}, "launch.nproc_per_node", "one GPU per process"),
        ({"launch.env": "NOVALUE"}, "launch.env", "NAME=value"),
        ({"launch.env": 'A="open'}, "launch.env", "not closed"),
        ({"launch.env": "RANK=1"}, "launch.env", "set by the launcher"),
        ({"training.dataset": "image_folder"}, "training.data_dir", "needs data_dir"),
        ({"launch.device": "cpu", "training.precision": "fp16"}, "training.precision", "needs CUDA"),
        ({"training.accumulation": "24"}, "training.accumulation", "only 23 batches"),
        ({"training.num_workers": "automatic"}, "training.num_workers", "auto"),
        ({"training.lr_batch": ""}, "training.lr_batch", "empty"),
    ],
)
def test_what_is_wrong_is_said_at_its_field_and_stays_as_typed(changes, field, words):
    values = form.fill(RunConfig()) | changes
    config, problems = form.read(values)
    assert config is None
    assert words in problems[field]
    for name, typed in changes.items():
        assert values[name] == typed


def test_an_environment_that_cannot_be_read_hides_no_other_mistake():
    config, problems = form.read(form.fill(RunConfig()) | {"launch.env": "NOVALUE", "training.seed": "x"})
    assert config is None
    assert set(problems) == {"launch.env", "training.seed"}


def test_a_wrong_form_still_has_a_yaml_that_names_the_same_problem():
    text = form.as_yaml(form.fill(RunConfig()) | {"training.batch_size": "0", "training.lr": "1e-3"})
    assert "lr: 0.001" in text
    with pytest.raises(UserError, match=r"training\.batch_size"):
        from_yaml(text)


def test_numbers_are_read_as_people_write_them():
    values = form.fill(RunConfig()) | {"training.epochs": " 1,000 ", "training.lr": "5e-4"}
    config, problems = form.read(values)
    assert not problems
    assert (config.training.epochs, config.training.lr) == (1000, 5e-4)
