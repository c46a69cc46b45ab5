from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from ddp_core.config import RunConfig, to_yaml


def ddp(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_core.cli", *arguments]
    env = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=env)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch"], "CONFIG.yaml"),
        (["launch", "nothing.yaml"], "there is no config file nothing.yaml"),
        (["launch", "typo.yaml"], "training.learning_rte: unknown field"),
        (["launch", "broken.yaml"], "broken.yaml, line 2"),
        (["launch", "binary.yaml"], "cannot read binary.yaml"),
        (["launch", "good.yaml", "--set", "epochs"], "--set wants key=value"),
        (["launch", "good.yaml", "--set", "epochs=0"], "training.epochs: should be greater than or equal to 1"),
        (["launch", "good.yaml", "--set", "name=a/b"], "name: 'a/b' cannot name a run"),
        (["launch", "good.yaml", "--store", "good.yaml"], "cannot be written"),
        (["launch", "good.yaml", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["show"], "RUN"),
        (["stop", "nothing-1"], "there is no run 'nothing-1'"),
        (["stop", "nothing-1", "--grace", "-1"], "--grace"),
        (["logs", "nothing-1", "--rank", "x"], "--rank"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "good.yaml").write_text(to_yaml(RunConfig()))
    (tmp_path / "typo.yaml").write_text("training: {learning_rte: 1}\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    process = ddp(*arguments, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("ddp: ")
    assert process.stderr.count("\n") == 1
    assert words in process.stderr
    assert not (tmp_path / "experiments").exists()


def test_an_empty_store_lists_nothing(tmp_path):
    assert json.loads(ddp("ls", "--json", cwd=tmp_path).stdout) == []
    assert ddp("ls", cwd=tmp_path).stdout == "no runs yet\n"
    assert list(tmp_path.iterdir()) == []


def test_the_help_of_launch_describes_every_field():
    text = ddp("launch", "--help").stdout
    assert "training.batch_size [16]" in text
    assert "Samples per process and backward." in text
    assert "launch.stop_grace_s [10.0]" in text


def test_without_arguments_the_help_is_shown():
    process = ddp()
    assert "launch" in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path):
    command = [sys.executable, "-m", "ddp_core.cli", "ls", "--store", str(tmp_path)]
    for extra in ([], ["--json"]):
        process = subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)


def test_ctrl_c_says_that_a_run_goes_on_by_itself():
    command = [sys.executable, "-m", "ddp_core.cli", "gpus", "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "a launched run goes on by itself" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
