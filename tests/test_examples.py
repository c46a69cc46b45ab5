"""The two example scripts as a reader runs them, and the guide that quotes them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from ddp_core import cli, config
from ddp_core.config import is_torchrun_variable
from tests.conftest import wait_for

ROOT = Path(__file__).parent.parent
SINGLE, DDP, GUIDE = ROOT / "examples" / "single_gpu.py", ROOT / "examples" / "four_gpus.py", ROOT / "docs/migrating.md"
EPOCHS = 5
VALIDATION = 355  # on four ranks a padding sampler would make it 356


class Script:
    """An example script that runs, with its output in a file."""

    def __init__(self, out: Path, *command: str) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if not is_torchrun_variable(k)}
        with (out / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--out", str(out)],
                env=environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return (self.out / "output.txt").read_text()

    def wait(self) -> int:
        return self.process.wait(120)

    def checkpoint(self) -> dict:
        return torch.load(self.out / "checkpoint.pth", weights_only=True)

    def ranks(self) -> dict[int, psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}

    def reports(self) -> dict[int, tuple[float, int]]:
        """Accuracy and samples counted, by epoch; an epoch that is reported twice is a failure."""
        found = re.findall(r"^epoch (\d+): loss [\d.]+, accuracy ([\d.]+) of (\d+) samples$", self.output(), re.M)
        reports = {int(epoch): (float(accuracy), int(count)) for epoch, accuracy, count in found}
        assert len(reports) == len(found)
        return reports

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Start an example on digits of which the validation set does not divide by four."""
    folder = tmp_path_factory.mktemp("examples")
    with np.load(ROOT / "ddp_core" / "data" / "digits.npz") as file:
        np.savez(folder / "digits.npz", **{k: v[:VALIDATION] if k.startswith("val") else v for k, v in file.items()})
    started = []

    def start(name: str, script: Path, *options: str, torchrun: tuple[str, ...] = ()) -> Script:
        command = [str(script), "--data", str(folder / "digits.npz"), "--epochs", str(EPOCHS), *options]
        if script == DDP:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *torchrun]
            command = [*launcher, *command]
        started.append(Script(folder / name, *command))
        return started[-1]

    yield start
    for script in started:
        script.close()


@pytest.fixture(scope="module")
def single(start) -> Script:
    script = start("single", SINGLE, "--batch-size", "64")
    assert script.wait() == 0, script.output()
    return script


def assert_same_training(script: Script, single: Script) -> None:
    """Steps of the same samples from the same weights differ by rounding only, which grows from step to step."""
    state, expected = script.checkpoint(), single.checkpoint()
    assert state["epoch"] == expected["epoch"] == EPOCHS
    assert state["model"].keys() == expected["model"].keys()
    for name, values in expected["model"].items():
        torch.testing.assert_close(state["model"][name], values, rtol=0, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
    accuracy, ours = single.reports()[EPOCHS][0], script.reports()[EPOCHS][0]
    assert accuracy > 0.93
    assert ours == pytest.approx(accuracy, abs=0.01)


def test_four_ranks_train_as_one_does_and_count_each_sample_once(start, single):
    # Without accumulation they are seen to do so below.
    script = start("ddp", DDP, "--batch-size", "8", "--accumulation", "2")
    assert script.wait() == 0, script.output()
    assert_same_training(script, single)
    assert {count for _, count in script.reports().values()} == {VALIDATION}
    assert list(script.reports()) == list(range(1, EPOCHS + 1))


def test_after_a_killed_rank_it_goes_on_from_its_checkpoint(start, single):
    script = start("killed", DDP, torchrun=("--max-restarts", "1"))
    wait_for(lambda: "epoch 2:" in script.output(), "the second epoch")
    wait_for(lambda: script.ranks().get(2), "rank 2").kill()
    assert script.wait() == 0, script.output()
    assert re.search(r"^continuing after [234] epochs", script.output(), re.M), script.output()
    assert list(script.reports()) == list(range(1, EPOCHS + 1))
    assert_same_training(script, single)


def test_sigterm_leaves_a_whole_checkpoint_from_which_it_goes_on(start, single):
    """First one rank is asked to end, then torchrun, then nobody."""
    said = []
    # torchrun says 1 for any signal it gets itself; a rank that ended in any other way than by itself makes it 1 too.
    for whom, expected in (("rank 3", 0), ("torchrun", 1)):
        script = start("stopped", DDP, "--epochs", str(EPOCHS + 20))
        epoch = len(script.reports()) + 1
        wait_for(lambda s=script, e=epoch: f"epoch {e}:" in s.output(), f"epoch {epoch}")
        ranks = script.ranks()
        assert len(ranks) == 4
        target = ranks[3] if whom == "rank 3" else psutil.Process(script.process.pid)
        target.send_signal(signal.SIGTERM)
        assert script.wait() == expected, script.output()
        assert "exitcode" not in script.output()
        state = script.checkpoint()
        assert epoch <= state["epoch"] < EPOCHS
        assert not list(script.out.glob("*.tmp"))
        said.append(f"continuing after {state['epoch']} epochs and {state['step']} steps")
    last = start("stopped", DDP)
    assert last.wait() == 0, last.output()
    assert [line.split(",")[0] for line in last.output().splitlines() if line.startswith("continuing")] == said
    assert_same_training(last, single)


def test_the_ddp_script_says_how_it_is_started(start, tmp_path):
    script = Script(tmp_path, str(DDP))
    assert script.wait() == 1
    assert script.output().startswith("start it with: torchrun")


def quotes() -> list[tuple[str | None, str]]:
    """Each Python block of the guide, with the file it says it is from."""
    block = r"(?:^<!-- (\S+) -->\n)?^```python\n(.*?)^```$"
    return [(file or None, text) for file, text in re.findall(block, GUIDE.read_text(), re.M | re.S)]


def lines_without_indent(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_the_guide_quotes_both_scripts_to_the_letter():
    found = quotes()
    assert len(found) >= 10
    for file, text in found:
        assert file in ("examples/single_gpu.py", "examples/four_gpus.py"), text
        assert f"\n{lines_without_indent(text)}\n" in lines_without_indent((ROOT / file).read_text()), (file, text)


def test_the_guide_has_the_five_steps_of_the_ddp_script():
    headings = re.findall(r"^## Step (\d): ", GUIDE.read_text(), re.M)
    assert headings == ["1", "2", "3", "4", "5"]
    assert sorted(set(re.findall(r"Step (\d) of 5", DDP.read_text()))) == headings


def test_what_the_guide_names_is_there():
    guide = GUIDE.read_text()
    sections = config.sections()
    named = set(re.findall(rf"`({'|'.join(sections)})\.(\w+)[`:]", guide))
    assert len(named) > 5
    for section, field in named:
        assert field in sections[section].model_fields, f"{section}.{field}"
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for name in re.findall(r"(?:^|`)ddp (\w+)", guide + (ROOT / "README.md").read_text(), re.M):
        assert name in commands, f"ddp {name}"
    for path in set(re.findall(r"\b(?:examples|tests)/\w+\.\w+", guide)):
        assert (ROOT / path).exists(), path
    for row in re.findall(r"^\|.*\|$", guide, re.M):
        assert len(re.findall(r"(?<!\\)\|", row)) == 5, f"not four cells: {row}"
