from __future__ import annotations

import pytest

from ddp_core.config import RunConfig, apply_overrides, describe_fields, from_dict, from_yaml, to_yaml
from ddp_core.errors import UserError


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        from_dict(
            {"name": "été".encode("ascii", "ignore").decode() or "x", "launch": {"gpus": [0, 1], "device": "cpu"}}
        ),
        from_dict({"launch": {"gpus": ["GPU-abc", 3], "device": "cpu", "omp_num_threads": 2, "env": {"A": "ü: #1"}}}),
        from_dict({"training": {"lr": 1e-5, "data_dir": "a b/ç", "model": "resnet18", "image_size": 64}}),
    ],
)
def test_yaml_round_trip_is_exact(config):
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("trainng: {}", "trainng", "did you mean training?"),
        ("launch: {gpu: 1}", "launch.gpu", "did you mean gpus?"),
        ("training: {learning: 1}", "training.learning", "unknown field"),
        ("lr: 0.1", "lr", "lr belongs under training"),
        ("launch: 3", "launch", "must be a section"),
        ("training: {lr: fast}", "training.lr", "must be a number, not 'fast'"),
        ("training: {lr: .nan}", "training.lr", "finite number"),
        ("training: {epochs: 1.5}", "training.epochs", "must be a whole number, not 1.5"),
        ("training: {lr: -1}", "training.lr", "greater than 0"),
        ("training: {epochs: 0}", "training.epochs", "greater than or equal to 1"),
        ("training: {model: resnt18}", "training.model", "did you mean resnet18?"),
        ("training: {dataset: digit}", "training.dataset", "'digits'"),
        ("training: {dataset: image_folder}", "training.data_dir", "data_dir"),
        ("launch: {gpus: [0, 0]}", "launch.gpus", "listed twice"),
        ("launch: {gpus: []}", "launch.gpus", "empty"),
        ("launch: {gpus: [-1]}", "launch.gpus", "cannot exist"),
        ("launch: {gpus: [rtx]}", "launch.gpus", "neither an index nor a UUID"),
        ("launch: {gpus: 1.5}", "launch.gpus", "must be auto, none, or a list"),
        ("launch: {gpus: true}", "launch.gpus", "must be auto"),
        ("launch: {gpus: [true]}", "launch.gpus", "must be auto"),
        ("launch: {gpus: ²}", "launch.gpus", "neither an index nor a UUID"),
        ("training: {epochs: yes}", "training.epochs", "should not be true"),
        ("launch: {omp_num_threads: true}", "launch.omp_num_threads", "should not be true"),
        ("name: no", "name", "needs quotes"),
        ("launch: {gpus: [0, 1], nproc_per_node: 4}", "launch.nproc_per_node", "one GPU per process"),
        ("launch: {gpus: none, device: cuda}", "launch.gpus", "gpus is none"),
        ("launch: {env: {RANK: '1'}}", "launch.env", "set by the launcher"),
        ("launch: {env: {CUDA_VISIBLE_DEVICES: '1'}}", "launch.env", "launch.gpus"),
        ("launch: {env: {'A=B': '1'}}", "launch.env", "cannot be the name"),
        ("name: a/b", "name", "cannot name a run"),
        ("name: ..", "name", "cannot name a run"),
        ("name: .hidden", "name", "cannot name a run"),
        ("name: 'a b'", "name", "cannot name a run"),
        ("name: ''", "name", "cannot name a run"),
        (f"name: {'x' * 300}", "name", "300 characters"),
        ("{launch: {device: cpu}, training: {precision: fp16}}", "training.precision", "fp16 needs CUDA"),
        ("{launch: {device: cpu}, ddp: {sync_batchnorm: true}}", "ddp.sync_batchnorm", "CUDA only"),
        ("ddp: {static_graph: true, find_unused_parameters: true}", "ddp.static_graph", "choose one"),
        ("{ddp: {static_graph: true}, training: {compile: true}}", "ddp.static_graph", "do not go together"),
        ("training: {accumulation: 24}", "training.accumulation", "only 23 batches"),
        ("training: {warmup_epochs: 61}", "training.warmup_epochs", "does not end within 60 epochs"),
        (
            "training: {dataset: synthetic, synthetic_samples: 3, drop_last: true}",
            "training.drop_last",
            "leave nothing",
        ),
        ("training: {num_workers: many}", "training.num_workers", "auto"),
        ("watch: {every_steps: 0}", "watch.every_steps", "greater than or equal to 1"),
        ("checkpoint: {keep: 2}", "checkpoint", "did you mean checkpoints?"),
        ("training: {keep: 2}", "training.keep", "keep belongs under checkpoints"),
    ],
)
def test_bad_config_names_the_field_and_what_to_do(text, field, words):
    with pytest.raises(UserError) as refused:
        from_yaml(text)
    assert refused.value.field == field
    assert words in refused.value.message
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "line 1"),
        ("- 1", "not a list"),
        ("x: 1\n  y: 2", "line 2"),
        ("name: a\nname: b", "line 2, column 1 is not valid YAML: the field name stands twice"),
        ("name: 2026-99-01", "month must be in 1..12"),
        ("[" * 2000, "nested too deeply"),
        ("name: \x00", "is not valid YAML: unacceptable character #x0000: special characters are not allowed$"),
    ],
)
def test_bad_yaml_names_the_place(text, words):
    with pytest.raises(UserError, match=words):
        from_yaml(text, source="run.yaml")


def test_all_bad_fields_are_named_at_once():
    with pytest.raises(UserError) as refused:
        from_dict({"training": {"lr": "x", "epochs": 0}})
    assert "training.lr" in str(refused.value)
    assert "training.epochs" in str(refused.value)


def test_gpus_as_typed_on_a_command_line():
    for text in ("0,1", " 0 , 1 ", [0, "1"]):
        assert from_dict({"launch": {"gpus": text, "device": "cpu"}}).launch.gpus == (0, 1)


def test_overrides_reach_a_section_by_the_fields_own_name():
    values = apply_overrides({"training": {"lr": 1}}, ["lr=0.1", "launch.gpus=none", "env={A: b}", "name=x"])
    config = from_dict(values)
    assert (config.training.lr, config.launch.gpus, config.launch.env, config.name) == (0.1, "none", {"A": "b"}, "x")


@pytest.mark.parametrize("override", ["lr", "=1"])
def test_an_override_without_key_or_value_is_refused(override):
    with pytest.raises(UserError, match="key=value"):
        apply_overrides({}, [override])


def test_every_field_is_described():
    described = "\n".join(describe_fields())
    assert "None" not in described.replace("[None]", "")
    assert "training.batch_size [16]\n  Samples per process" in described


def test_an_override_that_is_no_yaml_is_taken_as_text():
    for text in ("2026-99-01", "[", "[" * 2000):
        assert apply_overrides({}, [f"name={text}"]) == {"name": text}


def test_a_config_of_an_earlier_version_still_opens():
    assert from_yaml("training: {keep_checkpoints: 7}").checkpoints.keep == 7
    with pytest.raises(UserError, match="unknown field"):
        from_yaml("{training: {keep_checkpoints: 7}, checkpoints: {keep: 3}}")
