"""What one look at the GPUs and the machine costs: ``python -m benchmarks.sampler``.

Eight simulated GPUs whose state is read once, so that what is measured is this project and
nvidia-ml-py, not the simulation. Each line is set against a bare loop over the same driver calls, and
both are measured in turn in one process, so that a noisy machine disturbs them alike.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fake_nvml import FakeNvml

GPUS = 8
ROUNDS = 40
CALLS = 50
LIMIT_US = 200.0
PACE_S = 20.0


def measure(**functions: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """Give each function's median and best time a call in µs, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def bare_pynvml() -> Callable[[], object]:
    """A loop over the sampler's six calls a GPU that keeps nothing."""
    import pynvml

    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(GPUS)]

    def read() -> None:
        for handle in handles:
            pynvml.nvmlDeviceGetUtilizationRates(handle)
            pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            pynvml.nvmlDeviceGetPowerUsage(handle)
            pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)

    return read


def bare_ctypes() -> Callable[[], object]:
    """The same calls without nvidia-ml-py's wrappers: the least Python can do."""
    import pynvml

    library = pynvml.nvmlLib
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(GPUS)]
    number = pynvml.c_uint()
    rates = pynvml.c_nvmlUtilization_t()
    memory = pynvml.c_nvmlMemory_v2_t()
    memory.version = pynvml.nvmlMemory_v2
    ref, ref_rates, ref_memory = pynvml.byref(number), pynvml.byref(rates), pynvml.byref(memory)

    def read() -> None:
        for handle in handles:
            library.nvmlDeviceGetUtilizationRates(handle, ref_rates)
            library.nvmlDeviceGetMemoryInfo_v2(handle, ref_memory)
            library.nvmlDeviceGetPowerUsage(handle, ref)
            library.nvmlDeviceGetEnforcedPowerLimit(handle, ref)
            library.nvmlDeviceGetTemperature(handle, 0, ref)
            library.nvmlDeviceGetClockInfo(handle, 1, ref)

    return read


def child() -> int:
    """Measure in a process that sees the simulated driver."""
    from ddp_core.telemetry.host import HostSampler
    from ddp_core.telemetry.jsonl import dumps
    from ddp_core.telemetry.nvml import Nvml

    nvml, host = Nvml(), HostSampler()
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(4)]
    pids = {rank: process.pid for rank, process in enumerate(ranks)}
    report = nvml.sample()
    assert [gpu["missing"] for gpu in report["gpus"]] == [{}] * GPUS, report

    def whole() -> bytes:
        report = nvml.sample()
        record = {"ts": time.time(), "gpus": report["gpus"], "driver_error": report["error"], **host.sample(pids)}
        return dumps(record)

    times = measure(
        sample=nvml.sample,
        bare_pynvml=bare_pynvml(),
        bare_ctypes=bare_ctypes(),
        host=lambda: host.sample(pids),
        whole=whole,
    )
    sample, pynvml_us, ctypes_us = (times[name] for name in ("sample", "bare_pynvml", "bare_ctypes"))
    print(f"{'what':<58}{'median':>10}{'best':>10}")
    for name, label in (
        ("sample", f"one sample of {GPUS} GPUs (Nvml.sample)"),
        ("bare_pynvml", "  the same 48 calls by nvidia-ml-py, results dropped"),
        ("bare_ctypes", "  the same 48 calls by bare ctypes, results dropped"),
        ("host", "one sample of the machine and 4 ranks (HostSampler)"),
        ("whole", "a whole line of hardware.jsonl, as written"),
    ):
        print(f"{label:<58}{times[name][0]:>7.1f} µs{times[name][1]:>7.1f} µs")
    print(f"Nvml.sample / nvidia-ml-py: {sample[0] / pynvml_us[0]:.2f}   / bare ctypes: {sample[0] / ctypes_us[0]:.2f}")

    before, start, lines = time.process_time(), time.monotonic(), 0
    with Path(os.devnull).open("wb", buffering=0) as file:
        while time.monotonic() < start + PACE_S:
            file.write(whole())
            lines += 1
            time.sleep(max(0.0, start + lines - time.monotonic()))
    share = 100 * (time.process_time() - before) / (time.monotonic() - start)
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    print(f"at one line a second for {PACE_S:.0f} s: {share:.2f} % of a core, {rss:.0f} MB resident")
    for process in ranks:
        process.communicate(b"\n")
    ok = sample[1] <= LIMIT_US and share < 1
    print(f"goal: a sample ≤ {LIMIT_US:.0f} µs, < 1 % of a core: {'met' if ok else 'MISSED'}")
    return 0 if ok else 1


def main() -> int:
    if "--child" in sys.argv:
        return child()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | FakeNvml(Path(folder), gpus=GPUS).env() | {"FAKE_NVML_STATE_ONCE": "1"}
        return subprocess.run([sys.executable, "-m", "benchmarks.sampler", "--child"], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
