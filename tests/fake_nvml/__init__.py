"""Simulated GPUs: a C library that stands in for the driver's libnvidia-ml.so.1, and its steering wheel.

The unmodified nvidia-ml-py of any process started with :meth:`FakeNvml.env` sees these GPUs. What they
say can be changed while it runs::

    fake = FakeNvml(tmp_path, gpus=4)
    subprocess.Popen(command, env=os.environ | fake.env())
    fake.set(2, busy=55, power_w=180)
    fake.fail(1, "nvmlDeviceGetPowerUsage", 3)  # not supported
    fake.lose(3)

To look at the dashboard with GPUs on a machine without one::

    python -m tests.fake_nvml --gpus 4 --animate -- streamlit run dashboard/app.py
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_nvml.c")
DRIVER = "570.00 (simulated)"
NAME = "NVIDIA S100 (simulated)"
GIB = 1 << 30

_FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]


def build(folder: Path) -> Path:
    """Compile the library into ``folder`` with gcc; gives its path, ``<folder>/libnvidia-ml.so.1``."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", *_FLAGS, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=120)
    return library


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def library_folder() -> Path:
    """Give a folder that holds the library, built at the first call and removed when this process ends."""
    _kept.append(tempfile.TemporaryDirectory(prefix="fake-nvml-"))
    return build(Path(_kept[-1].name)).parent


def uuid(gpu: int) -> str:
    """Give the UUID of the simulated GPU that is made as number ``gpu``."""
    return f"GPU-5f4e3d2c-0000-4000-8000-{gpu:012d}"


class FakeNvml:
    """Some simulated GPUs and the file that holds their state. GPUs are addressed by their position, from 0.

    Args:
        folder: Where the state file goes.
        gpus: How many GPUs there are.
        trace: Also record every NVML call; see :meth:`calls`.
    """

    def __init__(self, folder: Path, gpus: int = 4, *, trace: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state = folder / "nvml-state"
        self.trace = folder / "nvml-trace" if trace else None
        self._system: dict[str, Any] = {"driver": DRIVER, "cuda": 13000}
        self._gpus = [self._new_gpu(n) for n in range(gpus)]
        self._absent: set[str] = set()
        self._write()

    def env(self) -> dict[str, str]:
        """Environment variables with which a process sees these GPUs."""
        path = [str(library_folder()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        env = {"LD_LIBRARY_PATH": ":".join(path), "FAKE_NVML_STATE": str(self.state)}
        return env | ({"FAKE_NVML_TRACE": str(self.trace)} if self.trace else {})

    def set(self, gpu: int, **values: Any) -> None:
        """Set values of a GPU, such as ``busy``, ``memory_used``, ``power_w``, ``name``, ``uuid`` or ``mig``."""
        self._gpus[gpu].update(_in_driver_units(values))
        self._write()

    def get(self, gpu: int, field: str) -> Any:
        """Give a value as it was set, in the driver's units (``power_mw``)."""
        return self._gpus[gpu][field]

    def set_system(self, **values: Any) -> None:
        """Set ``driver`` or ``cuda``."""
        self._system.update(values)
        self._write()

    def fail(self, gpu: int | None, function: str, code: int) -> None:
        """Let an NVML function fail with ``code`` for a GPU, or for everything (None). Code 0 heals it."""
        self._rule(gpu, f"error.{function}", code)

    def delay(self, gpu: int | None, function: str, milliseconds: int) -> None:
        """Let an NVML function take this long for a GPU, or for everything (None)."""
        self._rule(gpu, f"delay_ms.{function}", milliseconds)

    def lose(self, gpu: int) -> None:
        """Let a GPU fall off the bus: every question about it gets "GPU is lost"."""
        self.fail(gpu, "*", 15)

    def hide(self, gpu: int) -> None:
        """Take a GPU out of the driver's count, as after a new start without it; the rest move up."""
        self._absent.add(self._gpus[gpu]["uuid"])
        self._write()

    def restore(self, gpu: int) -> None:
        """Heal a GPU: present, no failures, no delays."""
        self._absent.discard(self._gpus[gpu]["uuid"])
        for key in [key for key in self._gpus[gpu] if key.startswith(("error.", "delay_ms."))]:
            del self._gpus[gpu][key]
        self._write()

    def processes(self, gpu: int, processes: dict[int, int]) -> None:
        """Set which processes compute on a GPU: bytes by pid."""
        for key in [key for key in self._gpus[gpu] if key.startswith("process.")]:
            del self._gpus[gpu][key]
        self._gpus[gpu].update({f"process.{pid}": memory for pid, memory in processes.items()})
        self._write()

    def reorder(self, order: list[int]) -> None:
        """Give the GPUs other positions: position ``i`` becomes what was at ``order[i]``."""
        self._gpus = [self._gpus[n] for n in order]
        self._write()

    def driver_gone(self, code: int = 9) -> None:
        """Let every call fail, with "driver not loaded" unless told otherwise."""
        self.fail(None, "*", code)

    def driver_back(self) -> None:
        """Undo :meth:`driver_gone`."""
        self.fail(None, "*", 0)

    def animate(self, seconds: float) -> None:
        """Set plausible values for this moment; called often, they move smoothly, each GPU its own way."""
        for n, gpu in enumerate(self._gpus):
            wave = math.sin(seconds / 3.1 + n) + math.sin(seconds / 7.3 + 2 * n) + 0.6 * math.sin(seconds / 1.3 + 3 * n)
            busy = round(min(100, max(0, 78 + 13 * wave)))
            warmth = 0.5 + 0.5 * math.sin(seconds / 29 + n)
            gpu["busy"], gpu["memory_busy"] = busy, busy * 6 // 10
            gpu["memory_used"] = int((18 + 2 * n + 0.4 * math.sin(seconds / 11 + n)) * GIB)
            gpu["power_mw"] = int(1000 * (70 + 3.1 * busy + 4 * math.sin(seconds + n)))
            gpu["temperature_c"] = round(48 + busy / 6 + 6 * warmth)
            gpu["sm_clock_mhz"] = 1980 - 15 * round(5 * warmth)
        self._write()

    def calls(self) -> list[tuple[str, int]]:
        """Give the NVML calls so far as (function, position of the GPU or -1). Needs ``trace=True``."""
        if self.trace is None or not self.trace.exists():
            return []
        return [(line.split()[0], int(line.split()[1])) for line in self.trace.read_text().splitlines()]

    def forget_calls(self) -> None:
        """Empty the trace."""
        if self.trace is not None and self.trace.exists():
            os.truncate(self.trace, 0)

    def _rule(self, gpu: int | None, key: str, value: int) -> None:
        target = self._system if gpu is None else self._gpus[gpu]
        if value:
            target[key] = value
        else:
            target.pop(key, None)
        self._write()

    @staticmethod
    def _new_gpu(n: int) -> dict[str, Any]:
        return {
            "uuid": uuid(n),
            "name": NAME,
            "busy": 0,
            "memory_busy": 0,
            "memory_total": 80 * GIB,
            "memory_used": GIB // 2,
            "memory_reserved": 600 << 20,
            "power_mw": 70_000,
            "power_limit_mw": 500_000,
            "temperature_c": 35 + n,
            "sm_clock_mhz": 345,
            "memory_clock_mhz": 2619,
            "max_sm_clock_mhz": 1980,
            "max_memory_clock_mhz": 2619,
            "fan": 30,
            "throttle_reasons": 1,
            "pcie_tx_kb": 1000,
            "pcie_rx_kb": 2000,
            "pcie_generation": 5,
            "pcie_width": 16,
            "energy_mj": 1_000_000,
            "compute_major": 9,
        }

    def _write(self) -> None:
        lines = [_line(key, value) for key, value in self._system.items()]
        for n, gpu in enumerate(self._gpus):
            if gpu["uuid"] not in self._absent:
                lines += [_line(f"gpu.{n}.{key}", value) for key, value in gpu.items()]
        new = self.state.with_name(self.state.name + ".new")
        new.write_bytes(b"\n".join(lines) + b"\n")
        new.replace(self.state)


def _line(key: str, value: Any) -> bytes:
    return f"{key} ".encode() + (value if isinstance(value, bytes) else str(value).encode())


def _in_driver_units(values: dict[str, Any]) -> dict[str, Any]:
    milliwatts = {"power_w": "power_mw", "power_limit_w": "power_limit_mw"}
    return {milliwatts.get(k, k): round(v * 1000) if k in milliwatts else v for k, v in values.items()}
