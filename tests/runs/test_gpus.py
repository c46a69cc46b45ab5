"""What the config asks for against what the machine has, with simulated GPUs, through the ``ddp`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ddp_core.runs import Store
from ddp_core.runs.evidence import tail_records
from ddp_core.telemetry import jsonl
from tests.conftest import wait_for
from tests.fake_nvml import FakeNvml, uuid
from tests.runs import live

CPU = ("--set", "device=cpu", "--set", "epochs=100000")


class Machine:
    """A machine with simulated GPUs, seen through the ``ddp`` command."""

    def __init__(self, folder, gpus: int) -> None:
        self.fake = FakeNvml(folder / "nvml", gpus=gpus)
        self.store = Store(folder / "store")
        self.config = folder / "run.yaml"
        self.config.write_text("name: gpu\n")

    def ddp(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddp_core.cli", *arguments]
        env = os.environ | {"DDP_STORE": str(self.store.root)} | (self.fake.env() if env is None else env)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)

    def launch(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        return self.ddp("launch", str(self.config), "--json", *overrides)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("machine"), 4)
    yield machine
    live.cleared(machine.store)


def test_the_gpus_document(machine):
    machine.fake.set(2, busy=55, power_w=321.5, temperature_c=66)
    document = json.loads(machine.ddp("gpus", "--json").stdout)
    assert document["error"] is None
    assert "simulated" in document["driver"]
    assert [gpu["uuid"] for gpu in document["gpus"]] == [uuid(n) for n in range(4)]
    third = document["gpus"][2]
    assert (third["busy"], third["power_w"], third["temperature_c"], third["run"]) == (55, 321.5, 66, None)


def test_no_driver_is_a_reason_in_words_and_no_failure(machine):
    process = machine.ddp("gpus", "--json", env={})
    assert process.returncode == 0
    assert "no NVIDIA driver" in json.loads(process.stdout)["error"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["gpus=9"], "launch.gpus: there is no GPU 9; this machine has GPUs 0 to 3"),
        (["gpus=GPU-nothing"], "there is no GPU GPU-nothing"),
        ([f"gpus=0,{uuid(0)}"], "GPU 0, which is listed already"),
        (["device=cuda", "nproc_per_node=1"], "launch.device: CUDA was asked for, but torch"),
        (["gpus=0,0"], "launch.gpus: GPU 0 is listed twice"),
        (["nproc_per_node=2", "gpus=1", "device=auto"], "2 processes on 1 GPU: NCCL needs one GPU per process"),
    ],
)
def test_gpus_that_cannot_be_had_are_refused_in_one_line(machine, overrides, words):
    device = [] if any(o.startswith("device") for o in overrides) else ["device=cpu"]
    process = machine.launch(*(part for o in [*overrides, *device] for part in ("--set", o)))
    assert process.returncode == 2
    assert words in process.stderr
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""
    assert machine.store.runs() == []


def test_cuda_without_a_driver_is_refused(machine):
    process = machine.ddp("launch", str(machine.config), "--set", "device=cuda", env={})
    assert (process.returncode, process.stdout) == (2, "")
    assert "no NVIDIA driver" in process.stderr


def test_a_lost_gpu_is_refused_by_name(machine):
    machine.fake.lose(3)
    try:
        process = machine.launch("--set", "gpus=3", *CPU)
        # A process that has never seen the GPU knows no more of it than that it is not there.
        assert process.returncode == 2
        assert "GPU 3" in process.stderr
    finally:
        machine.fake.restore(3)


def test_two_runs_never_share_a_gpu_and_the_second_waits(machine):
    first = machine.store.run(
        json.loads(machine.launch("--set", "gpus=0,1", "--set", "nproc_per_node=1", *CPU).stdout)["id"]
    )
    second = machine.store.run(
        json.loads(machine.launch("--set", "gpus=1", "--set", "nproc_per_node=1", *CPU).stdout)["id"]
    )
    third = machine.store.run(
        json.loads(machine.launch("--set", f"gpus={uuid(1)}", "--set", "nproc_per_node=1", *CPU).stdout)["id"]
    )
    wait_for(lambda: first.state().gpus == (uuid(0), uuid(1)), "the first holds its GPUs")
    waiting = wait_for(
        lambda: (s := second.state()).stage.startswith("waiting") and s, "the second says what it waits for"
    )
    assert (waiting.state, waiting.stage) == ("queued", f"waiting for GPU 1, held by {first.id}")
    gpus = json.loads(machine.ddp("gpus", "--json").stdout)["gpus"]
    assert [gpu["run"] for gpu in gpus] == [first.id, first.id, None, None]

    cancelled = json.loads(machine.ddp("stop", third.id, "--json").stdout)
    assert (cancelled["state"], cancelled["reason"]) == ("stopped", "cancelled before it started")

    wait_for(lambda: first.state().agent, "the first has started")
    stopped = json.loads(machine.ddp("stop", first.id, "--json").stdout)
    assert stopped["stop"]["gpu_memory_released"] is True
    assert "GPU memory released" in stopped["reason"]
    wait_for(lambda: second.state().state != "queued", "the second starts")
    wait_for(lambda: tail_records(second.hardware_file), "the second is sampled")
    assert {gpu["uuid"] for gpu in tail_records(second.hardware_file)[-1]["gpus"]} == {uuid(1)}
    machine.ddp("stop", second.id)
    gpus = json.loads(machine.ddp("gpus", "--json").stdout)["gpus"]
    assert [gpu["run"] for gpu in gpus] == [None] * 4


def test_memory_that_stays_on_the_gpu_after_a_stop_is_said(machine):
    run = machine.store.run(
        json.loads(machine.launch("--set", "gpus=2", "--set", "nproc_per_node=1", *CPU).stdout)["id"]
    )
    document = wait_for(
        lambda: (d := json.loads(machine.ddp("show", run.id, "--json").stdout))["pids"]["ranks"] and d,
        "the rank is known",
    )
    machine.fake.processes(2, {document["pids"]["ranks"]["0"]: 1 << 30})
    stopped = json.loads(machine.ddp("stop", run.id, "--json").stdout)
    machine.fake.processes(2, {})
    assert stopped["stop"]["gpu_memory_released"] is False
    assert "GPU memory not released yet" in stopped["reason"]


def test_the_samples_of_a_run_follow_the_driver_and_keep_what_is_missing(machine):
    run = machine.store.run(
        json.loads(machine.launch("--set", "gpus=0,3", "--set", "nproc_per_node=1", *CPU).stdout)["id"]
    )
    machine.fake.set(0, busy=17)
    machine.fake.fail(3, "nvmlDeviceGetPowerUsage", 3)

    def sample() -> dict[int, dict] | None:
        records = tail_records(run.hardware_file)
        found = {gpu["index"]: gpu for gpu in records[-1]["gpus"]} if records else {}
        return (
            found if found.get(0, {}).get("busy") == 17 and "power_w" in found.get(3, {}).get("missing", {}) else None
        )

    found = wait_for(sample, "the sample follows the driver")
    assert found[3]["power_w"] is None
    assert "not supported" in found[3]["missing"]["power_w"]
    assert jsonl.number(found[0]["power_w"]) is not None
    machine.fake.restore(3)
    machine.ddp("stop", run.id)


def test_a_driver_that_hangs_does_not_keep_a_stop_waiting(machine):
    launched = machine.launch("--set", "gpus=2", "--set", "nproc_per_node=1", *CPU)
    run = machine.store.run(json.loads(launched.stdout)["id"])
    wait_for(lambda: tail_records(run.hardware_file), "the run is sampled")
    machine.fake.delay(None, "*", 60_000)
    try:
        document = json.loads(machine.ddp("stop", run.id, "--json").stdout)
    finally:
        machine.fake.delay(None, "*", 0)
    assert document["state"] == "stopped"
    assert document["stop"]["seconds"] < 15
    assert document["stop"]["left_alive"] == 0


def test_a_queued_run_waits_for_a_gpu_that_got_lost_and_can_be_stopped_while_the_driver_hangs(machine):
    def launched(*sets: str):
        arguments = [part for one in ("nproc_per_node=1", *sets) for part in ("--set", one)]
        return machine.store.run(json.loads(machine.launch(*arguments, *CPU).stdout)["id"])

    def stage(run, words: str) -> None:
        wait_for(lambda: words in run.state().stage, f"{run.id}: {words}")

    sharing = launched("gpus=0", "share_gpus=true")
    wait_for(lambda: sharing.state().gpus, "it has its GPU")
    waiting = launched("gpus=0,1")
    stage(waiting, f"waiting for GPU 0, held by {sharing.id}")  # sharing is asked for by one, but not by the other
    machine.fake.lose(1)
    stage(waiting, "waiting: GPU 1")
    machine.fake.restore(1)
    stage(waiting, "waiting for GPU 0")
    machine.fake.delay(None, "*", 60_000)
    try:
        cancelled = json.loads(machine.ddp("stop", waiting.id, "--json").stdout)
    finally:
        machine.fake.delay(None, "*", 0)
    assert (cancelled["state"], cancelled["reason"]) == ("stopped", "cancelled before it started")
    machine.ddp("stop", sharing.id)
