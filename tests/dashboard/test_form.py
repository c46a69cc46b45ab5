"""The launch form and the config, each in terms of the other."""

from __future__ import annotations

import pytest

from dashboard import form
from ddp_core.config import LaunchConfig, RunConfig, TrainingConfig, from_yaml
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
        omp_num_threads=7,
        env={"A": "1", "EMPTY": "", "EQ": "a=b", "TWO": "x\ny", "SPACED": " z ", "QUOTED": '"q', "U": "ü "},
    ),
    training=TrainingConfig(
        model="resnet18",
        dataset="image_folder",
        data_dir="/data/my images",
        epochs=7,
        batch_size=3,
        optimizer="adamw",
        lr=1e-05,
        weight_decay=0.0,
        seed=2**32 - 1,
        num_workers=2,
        image_size=64,
        synthetic_samples=11,
        keep_checkpoints=9,
    ),
)


def flat(config: RunConfig) -> dict[str, object]:
    found = {}
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            found[key] = value
    return found


def test_every_config_field_is_in_the_form_once():
    shown = [*form.RUN_FIELDS, *form.PROCESS_FIELDS, *form.ADVANCED_FIELDS]
    assert sorted(shown) == sorted(flat(RunConfig()))
    assert all(field.help and field.label for field in form.FIELDS.values())


def test_sample_config_differs_from_the_default_in_every_field():
    default, changed = flat(RunConfig()), flat(EVERYTHING_CHANGED)
    assert [name for name in default if default[name] == changed[name]] == []


@pytest.mark.parametrize("config", [RunConfig(), EVERYTHING_CHANGED, RunConfig(launch=LaunchConfig(gpus="none"))])
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
        ({"launch.device": "cuda", "launch.gpus": "none"}, "launch.device", "gpus is none"),
        ({"launch.gpus": "choose"}, "launch.gpus", "choose at least one"),
        ({"launch.gpus": "choose", form.GPU_LIST: ["0", "1"]}, "launch.nproc_per_node", "one GPU per process"),
        ({"launch.env": "NOVALUE"}, "launch.env", "NAME=value"),
        ({"launch.env": 'A="open'}, "launch.env", "not closed"),
        ({"launch.env": "RANK=1"}, "launch.env", "set by the launcher"),
        ({"training.dataset": "image_folder"}, "training.data_dir", "needs data_dir"),
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
