"""The simulated driver itself: that it behaves as nvml.h says, so that tests against it mean something."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.fake_nvml import DRIVER, GIB, FakeNvml, build, uuid
from tests.telemetry.conftest import Driver

_HAMMER = """
def hammer():
    from concurrent.futures import ThreadPoolExecutor
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(4)]
    def ask(n):
        pynvml.nvmlDeviceGetPowerUsage(handles[n % 4])
        return n % 4, pynvml.nvmlDeviceGetUUID(handles[n % 4])
    with ThreadPoolExecutor(8) as pool:
        return sorted(set(pool.map(ask, range(400))))
"""
_HANDLE = "pynvml.nvmlDeviceGetHandleByIndex"


def test_the_library_has_the_drivers_name_and_symbols(tmp_path: Path):
    library = build(tmp_path / "lib")
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "[libnvidia-ml.so.1]" in dynamic
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout.split()
    for name in (
        "nvmlInitWithFlags",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    ):
        assert name in symbols


def test_what_is_read_only_sometimes_is_there_too(driver: Driver, fake: FakeNvml):
    fake.set(1, memory_busy=30, fan=45, throttle_reasons=4, pcie_tx_kb=11, pcie_rx_kb=12, memory_clock_mhz=2000, mig=0)
    driver.eval("pynvml.nvmlInit()")
    try:
        handle = f"{_HANDLE}(1)"
        assert driver.eval(f"pynvml.nvmlDeviceGetUtilizationRates({handle}).memory") == 30
        assert driver.eval(f"pynvml.nvmlDeviceGetFanSpeed({handle})") == 45
        assert driver.eval(f"pynvml.nvmlDeviceGetCurrentClocksEventReasons({handle})") == 4
        assert driver.eval(f"[pynvml.nvmlDeviceGetPcieThroughput({handle}, n) for n in (0, 1)]") == [11, 12]
        assert driver.eval(f"pynvml.nvmlDeviceGetClockInfo({handle}, pynvml.NVML_CLOCK_MEM)") == 2000
        assert driver.eval(f"pynvml.nvmlDeviceGetMaxClockInfo({handle}, pynvml.NVML_CLOCK_SM)") == 1980
        assert driver.eval(f"pynvml.nvmlDeviceGetMigMode({handle})") == [0, 0]
        assert driver.eval(f"pynvml.nvmlDeviceGetCudaComputeCapability({handle})") == [9, 0]
        assert driver.eval(f"pynvml.nvmlDeviceGetIndex({handle})") == 1
        by_uuid = f"pynvml.nvmlDeviceGetHandleByUUID({uuid(2)!r})"
        assert driver.eval(f"pynvml.nvmlDeviceGetIndex({by_uuid})") == 2
        assert driver.eval(f"pynvml.nvmlDeviceGetPciInfo({handle}).busId") == "00000000:02:00.0"
        assert driver.eval("[pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()]") == [
            DRIVER,
            13000,
        ]
        assert driver.eval(f"pynvml.nvmlDeviceGetGraphicsRunningProcesses({handle})") == []
        assert driver.eval("pynvml.nvmlErrorString(15)") == "GPU is lost"
    finally:
        driver.eval("pynvml.nvmlShutdown()")


def test_codes_are_those_of_the_real_thing(driver: Driver, fake: FakeNvml):
    driver.define(
        "def code(call):\n try:\n  call()\n  return 0\n except pynvml.NVMLError as error:\n  return error.value"
    )
    assert driver.eval("code(pynvml.nvmlDeviceGetCount)") == 1  # not started
    driver.eval("pynvml.nvmlInit()")
    try:
        assert driver.eval("code(pynvml.nvmlDeviceGetCount)") == 0
        assert driver.eval(f"code(lambda: {_HANDLE}(4))") == 2
        assert driver.eval("code(lambda: pynvml.nvmlDeviceGetHandleByUUID('GPU-0'))") == 6
        fake.processes(0, {7: GIB, 8: GIB})
        raw = "pynvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3"
        driver.eval("globals().update(count=pynvml.c_uint(0))")
        assert driver.eval(f"{raw}({_HANDLE}(0), pynvml.byref(count), None)") == 7
        assert driver.eval("count.value") == 2
        assert driver.eval(f"code(lambda: pynvml.nvmlDeviceGetMemoryInfo({_HANDLE}(0), version=0x2000029))") == 25
        fake.hide(3)
        assert driver.eval(f"code(lambda: {_HANDLE}(3))") == 2
        os.unlink(fake.state)  # noqa: PTH108
        assert driver.eval("code(pynvml.nvmlDeviceGetCount)") == 9
    finally:
        driver.eval("code(pynvml.nvmlShutdown)")


def test_a_handle_stays_with_its_gpu(driver: Driver, fake: FakeNvml):
    driver.eval("pynvml.nvmlInit()")
    try:
        driver.eval(f"globals().update(handle={_HANDLE}(0))")
        fake.reorder([1, 2, 3, 0])
        assert driver.eval("pynvml.nvmlDeviceGetUUID(handle)") == uuid(0)
        assert driver.eval(f"pynvml.nvmlDeviceGetUUID({_HANDLE}(3))") == uuid(0)
        assert driver.eval("pynvml.nvmlDeviceGetIndex(handle)") == 3
    finally:
        driver.eval("pynvml.nvmlShutdown()")


def test_a_slow_gpu_is_slow_alone(driver: Driver, fake: FakeNvml):
    fake.delay(1, "nvmlDeviceGetPowerUsage", 80)
    driver.eval("pynvml.nvmlInit()")
    try:
        seconds = {}
        for n in (0, 1):
            start = time.monotonic()
            driver.eval(f"pynvml.nvmlDeviceGetPowerUsage({_HANDLE}({n}))")
            seconds[n] = time.monotonic() - start
        assert seconds[1] >= 0.08 > seconds[0]
    finally:
        driver.eval("pynvml.nvmlShutdown()")


def test_threads_may_ask_at_once_while_the_state_changes(driver: Driver, fake: FakeNvml):
    fake.delay(None, "nvmlDeviceGetPowerUsage", 1)
    driver.eval("pynvml.nvmlInit()")
    try:
        driver.define(_HAMMER)
        driver.send("hammer()")
        for watts in range(50):
            fake.set(watts % 4, power_w=watts)
        assert driver.receive() == [[n, uuid(n)] for n in range(4)]
    finally:
        driver.eval("pynvml.nvmlShutdown()")


def test_a_command_can_be_run_with_moving_gpus():
    code = (
        "import time\nfrom ddp_core.telemetry.nvml import Nvml\nnvml = Nvml()\nseen = set()\n"
        "while len(seen) < 2:\n    seen.add(nvml.sample()['gpus'][2]['power_w'])\n    time.sleep(0.02)\n"
        "print(len(nvml.sample()['gpus']), nvml.driver)\nraise SystemExit(7)"
    )
    command = [sys.executable, "-m", "tests.fake_nvml", "--gpus", "3", "--animate", "--", sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert (result.returncode, result.stdout) == (7, f"3 {DRIVER}\n"), result.stderr


def test_moving_gpus_stay_plausible(tmp_path: Path):
    fake = FakeNvml(tmp_path, gpus=8)
    for second in range(0, 600, 7):
        fake.animate(second)
        for n in range(8):
            assert 0 <= fake.get(n, "busy") <= 100
            assert 0 < fake.get(n, "memory_used") < fake.get(n, "memory_total")
            assert 0 < fake.get(n, "power_mw") < fake.get(n, "power_limit_mw")
