"""A process of its own that asks the simulated driver: which library is loaded is decided when a process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import FakeNvml

# Evaluates one Python expression a line, so that a test can steer the state and the sampler step by step.
_WORKER = """
import json, os, sys
from ddp_core.telemetry.nvml import Nvml
import pynvml
scope = {"Nvml": Nvml, "os": os, "pynvml": pynvml, "sys": sys}
for line in sys.stdin:
    try:
        exec("result = " + line, scope)
        print(json.dumps({"result": scope["result"]}, default=repr), flush=True)
    except Exception as error:
        print(json.dumps({"raised": repr(error)}), flush=True)
"""


class Driver:
    """A process that was started with the simulated driver, or with none."""

    def __init__(self, env: dict[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FAKE_NVML")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean | env,
        )

    def send(self, expression: str) -> None:
        assert self.process.stdin
        print(expression, file=self.process.stdin, flush=True)

    def receive(self) -> Any:
        assert self.process.stdout
        answer = json.loads(self.process.stdout.readline())
        assert "raised" not in answer, answer["raised"]
        return answer["result"]

    def eval(self, expression: str) -> Any:
        self.send(expression)
        return self.receive()

    def define(self, code: str) -> None:
        self.eval(f"exec({code!r}, globals())")

    def attach(self, fake: FakeNvml, **options: float) -> None:
        """Have a new Nvml look at these GPUs."""
        env = {k: v for k, v in fake.env().items() if k.startswith("FAKE_NVML")}
        self.eval("[os.environ.pop(key) for key in list(os.environ) if key.startswith('FAKE_NVML')]")
        self.eval(f"os.environ.update({env!r})")
        self.eval("globals().get('nvml') and nvml.close()")
        arguments = ", ".join(f"{name}={value}" for name, value in options.items())
        self.eval(f"globals().update(nvml=Nvml({arguments}))")

    def sample(self) -> Any:
        return self.eval("nvml.sample()")

    def sample_until(self, wanted: Callable[[Any], bool], seconds: float = 10) -> Any:
        """Sample until the report is as wanted; fails with the last one."""
        deadline = time.monotonic() + seconds
        while not wanted(report := self.sample()):
            assert time.monotonic() < deadline, report
            time.sleep(0.01)
        return report

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def driver_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    fake = FakeNvml(tmp_path_factory.mktemp("nvml"), gpus=1)
    driver = Driver(fake.env())
    yield driver
    driver.close()


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    """Four simulated GPUs, traced."""
    return FakeNvml(tmp_path / "gpus", gpus=4, trace=True)


@pytest.fixture
def driver(driver_process: Driver, fake: FakeNvml) -> Driver:
    """A sampler in another process that sees the GPUs of ``fake`` and tries again quickly."""
    driver_process.attach(fake, retry_s=0.02, retry_most_s=0.1)
    return driver_process
