"""The sampler against a simulated driver; see conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddp_core.telemetry.nvml import FIELDS
from tests.fake_nvml import DRIVER, GIB, FakeNvml, uuid
from tests.telemetry.conftest import Driver

# Which NVML function each value comes from.
SOURCES = {
    "nvmlDeviceGetUtilizationRates": ["busy"],
    "nvmlDeviceGetMemoryInfo_v2": ["memory_used", "memory_total"],
    "nvmlDeviceGetPowerUsage": ["power_w"],
    "nvmlDeviceGetEnforcedPowerLimit": ["power_limit_w"],
    "nvmlDeviceGetTemperature": ["temperature_c"],
    "nvmlDeviceGetClockInfo": ["sm_clock_mhz"],
}
LOST = "GPU is lost (fell off the bus)"


def healthy(report: Any) -> bool:
    return report["error"] is None and all(gpu["status"] == "ok" and not gpu["missing"] for gpu in report["gpus"])


def test_eight_gpus_show_what_the_driver_says(driver: Driver, tmp_path: Path):
    fake = FakeNvml(tmp_path / "eight", gpus=8)
    for n in range(8):
        fake.set(
            n,
            name=f"GPU type {n}",
            busy=10 * n,
            memory_used=n * GIB,
            memory_total=(n + 1) * 10 * GIB,
            memory_reserved=GIB // 2,
            power_w=100.5 + n,
            power_limit_w=300 + n,
            temperature_c=40 + n,
            sm_clock_mhz=1000 + n,
        )
    driver.attach(fake)
    report = driver.sample()
    assert (report["driver"], report["error"]) == (DRIVER, None)
    assert report["gpus"] == [
        {
            "index": n,
            "uuid": uuid(n),
            "name": f"GPU type {n}",
            "status": "ok",
            "busy": 10 * n,
            "memory_used": n * GIB,
            "memory_total": (n + 1) * 10 * GIB,
            "power_w": 100.5 + n,
            "power_limit_w": 300.0 + n,
            "temperature_c": 40 + n,
            "sm_clock_mhz": 1000 + n,
            "missing": {},
        }
        for n in range(8)
    ]
    fake.set(3, busy=99, power_w=7)
    gpu = driver.sample()["gpus"][3]
    assert (gpu["busy"], gpu["power_w"]) == (99, 7.0)
    assert driver.eval("[nvml.driver, nvml.cuda]") == [DRIVER, "13.0"]


def test_a_sample_costs_few_calls_and_the_slow_ones_never(driver: Driver, fake: FakeNvml):
    driver.sample()
    first = Counter(gpu for _, gpu in fake.calls())
    assert max(first[n] for n in range(4)) <= 9
    fake.forget_calls()
    for _ in range(10):
        driver.sample()
    calls = fake.calls()
    assert set(Counter(gpu for _, gpu in calls).items()) == {(n, 60) for n in range(4)}
    assert {function for function, _ in calls} == set(SOURCES)


def test_the_driver_is_started_once_a_process(driver: Driver, fake: FakeNvml):
    for _ in range(5):
        driver.sample()
        driver.eval("nvml.processes()")
        driver.eval("nvml.indices()")
    counts = Counter(function for function, _ in fake.calls())
    assert (counts["nvmlInitWithFlags"], counts["nvmlDeviceGetName"]) == (1, 4)
    driver.eval("nvml.close()")
    assert fake.calls()[-1][0] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, "uninitialized (NVML error 1)"),
        (2, "invalid argument (NVML error 2)"),
        (3, "not supported by this GPU"),
        (4, "no permission"),
        (10, "the driver did not answer in time"),
        (16, "the GPU must be reset first"),
        (17, "the operating system has blocked the request (NVML error 17)"),
        (21, "the driver has no value yet"),
        (999, "the driver failed with an unknown error"),
    ],
)
def test_each_field_of_each_gpu_fails_alone_and_says_why(driver: Driver, fake: FakeNvml, code: int, reason: str):
    for n in range(4):
        fake.set(n, busy=50 + n)
    for n in range(4):
        for function, fields in SOURCES.items():
            fake.fail(n, function, code)
            gpus = driver.sample()["gpus"]
            assert gpus[n]["missing"] == dict.fromkeys(fields, reason)
            assert {f for f in FIELDS if gpus[n][f] is None} == set(fields)
            assert all(gpu["status"] == "ok" for gpu in gpus)
            assert all(not gpu["missing"] for gpu in gpus if gpu["index"] != n)
            fake.fail(n, function, 0)
    assert healthy(driver.sample())


@pytest.mark.parametrize("function", SOURCES)
def test_a_lost_gpu_keeps_its_row_costs_no_other_a_sample_and_comes_back(driver: Driver, fake: FakeNvml, function: str):
    assert healthy(driver.sample())
    fake.fail(2, function, 15)
    fake.set(1, busy=77)
    gpus = driver.sample()["gpus"]
    assert [gpu["status"] for gpu in gpus] == ["ok", "ok", "lost", "ok"]
    assert (gpus[2]["index"], gpus[2]["uuid"], gpus[2]["name"]) == (2, uuid(2), "NVIDIA S100 (simulated)")
    assert gpus[2]["missing"] == dict.fromkeys(FIELDS, LOST)
    assert all(gpus[2][field] is None for field in FIELDS)
    assert gpus[1]["busy"] == 77
    assert not any(gpus[n]["missing"] for n in (0, 1, 3))
    fake.restore(2)
    driver.sample_until(healthy)


def test_a_gpu_that_is_gone_from_the_bus_is_asked_ever_less_often(driver: Driver, fake: FakeNvml):
    driver.sample()
    fake.lose(1)
    driver.sample()
    fake.forget_calls()
    deadline = time.monotonic() + 0.6
    samples = 0
    while time.monotonic() < deadline:
        gpus = driver.sample()["gpus"]
        assert [gpu["status"] for gpu in gpus] == ["ok", "lost", "ok", "ok"]
        samples += 1
    asked = [gpu for _, gpu in fake.calls()].count(1)
    assert samples > 20
    assert 1 <= asked <= 7  # after 0.02, 0.04, 0.08 … s
    fake.restore(1)
    driver.sample_until(healthy)
    assert driver.eval("nvml._lost_s") == 0.02  # the next one is looked for soon again


def test_a_lost_gpu_is_also_looked_for_by_a_new_start_of_nvml(driver: Driver, fake: FakeNvml):
    module = "sys.modules['ddp_core.telemetry.nvml']"
    driver.sample()
    fake.lose(1)
    driver.eval(f"setattr({module}, '_REINIT_S', 0)")
    try:
        driver.sample_until(lambda _: [function for function, _ in fake.calls()].count("nvmlInitWithFlags") >= 2)
        assert [gpu["status"] for gpu in driver.sample()["gpus"]] == ["ok", "lost", "ok", "ok"]
    finally:
        driver.eval(f"setattr({module}, '_REINIT_S', 60)")


def test_the_others_keep_their_numbers_when_the_driver_counts_anew_without_a_gpu(driver: Driver, fake: FakeNvml):
    driver.sample()
    fake.hide(1)
    driver.eval("nvml.indices()")
    gpus = driver.sample()["gpus"]
    assert [(gpu["index"], gpu["uuid"], gpu["status"]) for gpu in gpus] == [
        (0, uuid(0), "ok"),
        (1, uuid(1), "lost"),
        (2, uuid(2), "ok"),
        (3, uuid(3), "ok"),
    ]
    fake.restore(1)
    assert [gpu["index"] for gpu in driver.sample_until(healthy)["gpus"]] == [0, 1, 2, 3]


def test_values_follow_the_uuid_when_the_order_changes(driver: Driver, fake: FakeNvml):
    for n in range(4):
        fake.set(n, busy=10 + n)
    driver.sample()
    fake.reorder([3, 0, 2, 1])
    assert {gpu["uuid"]: gpu["busy"] for gpu in driver.sample()["gpus"]} == {uuid(n): 10 + n for n in range(4)}
    assert driver.eval("nvml.indices()") == {uuid(3): 0, uuid(0): 1, uuid(2): 2, uuid(1): 3}
    gpus = driver.sample()["gpus"]
    assert [(gpu["index"], gpu["uuid"], gpu["busy"]) for gpu in gpus] == [
        (0, uuid(3), 13),
        (1, uuid(0), 10),
        (2, uuid(2), 12),
        (3, uuid(1), 11),
    ]


def test_a_gpu_that_was_lost_from_the_start_has_a_row_and_turns_up_later(driver: Driver, fake: FakeNvml):
    fake.lose(0)
    gpus = driver.sample()["gpus"]
    assert [(gpu["index"], gpu["uuid"], gpu["status"]) for gpu in gpus][:2] == [
        (0, "unknown-0", "lost"),
        (1, uuid(1), "ok"),
    ]
    assert gpus[0]["missing"]["name"] == LOST
    fake.restore(0)
    gpus = driver.sample_until(healthy)["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == [uuid(n) for n in range(4)]


def test_used_memory_is_without_the_drivers_reserve(driver: Driver, fake: FakeNvml):
    fake.set(0, memory_used=3 * GIB, memory_reserved=GIB)
    assert driver.sample()["gpus"][0]["memory_used"] == 3 * GIB
    assert driver.eval("pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used") == 4 * GIB


@pytest.mark.parametrize("code", [13, 25])
def test_a_driver_that_cannot_tell_its_reserve_apart_gives_no_used_memory(driver: Driver, fake: FakeNvml, code: int):
    fake.fail(0, "nvmlDeviceGetMemoryInfo_v2", code)
    gpu = driver.sample()["gpus"][0]
    assert (gpu["memory_used"], gpu["memory_total"]) == (None, 80 * GIB)
    assert set(gpu["missing"]) == {"memory_used"}
    assert "reserve" in gpu["missing"]["memory_used"]


def test_busy_under_mig_is_a_gap_with_its_reason(driver: Driver, fake: FakeNvml):
    fake.set(1, mig=1, busy=0)
    gpu = driver.sample()["gpus"][1]
    assert gpu["busy"] is None
    assert gpu["missing"] == {"busy": "not available while MIG is on"}


def test_a_made_up_figure_is_no_value(driver: Driver, fake: FakeNvml):
    fake.set(0, busy=2**32 - 1, power_mw=2**32 - 1, power_limit_mw=2**32 - 1)
    gpu = driver.sample()["gpus"][0]
    assert [gpu["busy"], gpu["power_w"], gpu["power_limit_w"]] == [None] * 3
    assert gpu["missing"] == dict.fromkeys(("busy", "power_w", "power_limit_w"), "the driver gives no value")


def test_the_newer_temperature_call_is_used_where_the_older_one_is_gone(driver: Driver, fake: FakeNvml):
    fake.fail(None, "nvmlDeviceGetTemperature", 13)
    assert [gpu["temperature_c"] for gpu in driver.sample()["gpus"]] == [35, 36, 37, 38]


@pytest.mark.parametrize(
    ("name", "shown"), [(b"Quadro \xe9t\xe9", "Quadro \ufffdt\ufffd"), ("Carte n° 1", "Carte n° 1"), ("", "")]
)
def test_any_name_can_be_shown(driver: Driver, fake: FakeNvml, name: Any, shown: str):
    fake.set(0, name=name)
    assert driver.sample()["gpus"][0]["name"] == shown


def test_a_name_that_cannot_be_read_has_its_reason(driver: Driver, fake: FakeNvml):
    fake.fail(0, "nvmlDeviceGetName", 3)
    gpu = driver.sample()["gpus"][0]
    assert (gpu["name"], gpu["missing"]) == (None, {"name": "the driver gives no name"})


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "not loaded"), (18, "different versions"), (4, "no permission"), (999, "unknown error"), (5, "NVML error 5")],
)
def test_a_driver_that_cannot_be_used_is_one_state_in_words_and_comes_back(
    driver: Driver, fake: FakeNvml, code: int, words: str
):
    fake.fail(None, "nvmlInitWithFlags", code)
    reports = [driver.sample() for _ in range(20)]
    assert words in reports[0]["error"]
    assert all(report == {"driver": None, "error": reports[0]["error"], "gpus": []} for report in reports)
    fake.driver_back()
    fake.fail(None, "nvmlInitWithFlags", 0)
    assert len(driver.sample_until(healthy)["gpus"]) == 4


def test_a_dead_driver_is_tried_ever_less_often(driver: Driver, fake: FakeNvml):
    fake.driver_gone()
    driver.sample()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        driver.sample()
    assert 2 <= [function for function, _ in fake.calls()].count("nvmlInitWithFlags") <= 8
    fake.driver_back()
    driver.sample_until(healthy)
    assert driver.eval("nvml._retry_s") == 0.02  # the next trouble is tried soon again


@pytest.mark.parametrize("code", [1, 9, 18, 999])
def test_a_driver_that_goes_away_leaves_the_rows_and_comes_back(driver: Driver, fake: FakeNvml, code: int):
    assert healthy(driver.sample())
    fake.driver_gone(code)
    report = driver.sample()
    assert report["driver"] is None
    assert report["error"]
    assert [(gpu["index"], gpu["uuid"], gpu["status"]) for gpu in report["gpus"]] == [
        (n, uuid(n), "lost") for n in range(4)
    ]
    assert report["gpus"][0]["missing"]["busy"] == "the NVIDIA driver cannot be reached"
    assert driver.eval("nvml.processes()") == {}
    fake.driver_back()
    assert driver.sample_until(healthy)["driver"] == DRIVER


def test_a_container_that_lost_its_rights_to_the_devices_is_told(driver: Driver, fake: FakeNvml):
    driver.sample()
    for n in range(4):
        fake.fail(n, "*", 999)
    fake.fail(None, "nvmlInitWithFlags", 999)
    assert "container" in driver.sample()["error"]


@pytest.mark.parametrize("code", [1, 3, 4, 9, 16, 999])
def test_a_gpu_that_answers_nothing_at_all_costs_no_other_a_sample(driver: Driver, fake: FakeNvml, code: int):
    driver.sample()
    for function in SOURCES:
        fake.fail(2, function, code)
    for _ in range(5):
        report = driver.sample()
        assert report["error"] is None
        assert set(report["gpus"][2]["missing"]) == set(FIELDS)
        assert not any(report["gpus"][n]["missing"] for n in (0, 1, 3))


def test_a_mismatch_of_nvidia_ml_py_and_driver_is_no_crash(driver: Driver, fake: FakeNvml):
    driver.eval(
        "[setattr(pynvml, 'saved', pynvml.nvmlDeviceGetClockInfo), setattr(pynvml, 'saved_init', pynvml.nvmlInit)]"
    )
    raising = "lambda *a: (_ for _ in ()).throw(pynvml.NVMLLibraryMismatchError('mismatch'))"
    try:
        driver.eval(f"setattr(pynvml, 'nvmlDeviceGetClockInfo', {raising})")
        gpu = driver.sample()["gpus"][0]
        assert gpu["missing"] == {"sm_clock_mhz": "not offered by this version of the driver"}
        driver.attach(fake)
        driver.eval(f"setattr(pynvml, 'nvmlInit', {raising})")
        assert "too old" in driver.sample()["error"]
    finally:
        driver.eval(
            "[setattr(pynvml, 'nvmlDeviceGetClockInfo', pynvml.saved), setattr(pynvml, 'nvmlInit', pynvml.saved_init)]"
        )


def test_a_machine_without_the_library_is_told_what_to_do(tmp_path: Path):
    code = (
        "from ddp_core.telemetry.nvml import Nvml\nnvml = Nvml()\n"
        "print(nvml.sample()['error'], nvml.processes(), nvml.indices())"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "FAKE_NVML_STATE")}
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("no NVIDIA driver found (libnvidia-ml.so.1 is missing); install")
    assert out.stdout.endswith("{} {}\n")
    assert out.stderr == ""


def test_processes_come_with_their_memory_by_uuid(driver: Driver, fake: FakeNvml):
    many = {1000 + n: n << 20 for n in range(40)}
    fake.processes(0, {101: 5 * GIB, 102: GIB})
    fake.processes(2, many)
    driver.sample()
    assert driver.eval("nvml.processes()") == {
        uuid(0): [{"pid": 101, "memory_used": 5 * GIB}, {"pid": 102, "memory_used": GIB}],
        uuid(1): [],
        uuid(2): [{"pid": pid, "memory_used": memory} for pid, memory in many.items()],
        uuid(3): [],
    }


@pytest.mark.parametrize(
    ("huge", "sampled"), [(2**64 - 1, True), (2**64 - 4096, True), (17 << 40, True), (2**64 - 1, False), (2**60, False)]
)
def test_memory_of_a_process_that_nobody_knows_is_unknown(driver: Driver, fake: FakeNvml, huge: int, sampled: bool):
    fake.processes(0, {7: huge, 8: GIB})
    if sampled:
        driver.sample()
    assert driver.eval("nvml.processes()")[uuid(0)] == [{"pid": 7, "memory_used": None}, {"pid": 8, "memory_used": GIB}]


def test_a_gpu_whose_processes_cannot_be_listed_is_left_out(driver: Driver, fake: FakeNvml):
    driver.sample()
    fake.fail(1, "nvmlDeviceGetComputeRunningProcesses_v3", 4)
    fake.lose(2)
    driver.sample()
    fake.forget_calls()
    assert set(driver.eval("nvml.processes()")) == {uuid(0), uuid(3)}
    assert ("nvmlDeviceGetComputeRunningProcesses_v3", 2) not in fake.calls()  # it could block


def test_an_older_process_list_is_used_where_the_newer_one_is_missing(driver: Driver, fake: FakeNvml):
    fake.processes(0, {7: GIB})
    fake.fail(None, "nvmlDeviceGetComputeRunningProcesses_v3", 13)
    assert driver.eval("nvml.processes()")[uuid(0)] == [{"pid": 7, "memory_used": GIB}]


def test_a_machine_whose_driver_has_no_gpu_is_no_error(driver: Driver, tmp_path: Path):
    driver.attach(FakeNvml(tmp_path / "none", gpus=0))
    assert driver.sample() == {"driver": DRIVER, "error": None, "gpus": []}
