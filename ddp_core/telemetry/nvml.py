"""What NVIDIA's driver says about the GPUs, through NVML: cheap, complete, and honest about what it lacks.

Every value stands for itself: one that cannot be had is null with its reason, one GPU that fails
costs no other GPU a sample, and a driver that cannot be used is one state in words that is tried again slowly.
GPUs are known by UUID; NVML's order may change from one start of the driver to the next.

Sources: NVML API reference (return codes, ``nvmlMemory_v2_t``), and nvidia-ml-py, which loads the
driver's ``libnvidia-ml.so.1``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import pynvml

from ddp_core.telemetry.nvml_errors import (
    ERRORS,
    LOST,
    MAYBE_DRIVER,
    NO_FUNCTION,
    driver_reason,
    error_code,
    field_reason,
)

_lib: Any = pynvml  # it carries no annotations

FIELDS = ("busy", "memory_used", "memory_total", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz")
"""The measured fields of a :class:`GpuSample`."""

_NO_VALUE = "the driver gives no value"

_SCAN_S = 10.0  # how often to look for other GPUs and another order
_REINIT_S = 60.0  # how often to start NVML anew while a GPU is lost: a reset GPU is only seen by a new start
_NO_UINT = 2**32 - 1  # NVML_VALUE_NOT_AVAILABLE
_ABSURD_BYTES = 2**50


class GpuSample(TypedDict):
    """One GPU at one moment: bytes, watts, °C, MHz, ``busy`` in percent of time with a kernel running.

    ``missing`` has the reason for each value that is None. A GPU that could not be read even once has no
    UUID yet: its row is lost and named ``unknown-<index>``.
    """

    index: int
    uuid: str
    name: str | None
    status: Literal["ok", "lost"]
    busy: int | None
    memory_used: int | None
    memory_total: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    missing: dict[str, str]


class Report(TypedDict):
    """All GPUs at one moment; ``error`` says in words why NVML cannot be used, if it cannot."""

    driver: str | None
    error: str | None
    gpus: list[GpuSample]


class GpuProcess(TypedDict):
    """A process that computes on a GPU; its memory in bytes, or None where the driver does not tell (WSL2)."""

    pid: int
    memory_used: int | None


class _Gpu:
    """What is remembered of one GPU between samples."""

    def __init__(self, index: int, uuid: str) -> None:
        self.index = index
        self.uuid = uuid
        self.name: str | None = None
        self.handle: Any = None
        self.lost: str | None = None  # why, if it is
        self.memory_total: int | None = None
        self.mig: bool | None = None


class Nvml:
    """The driver's view of all GPUs of this machine, read on demand.

    Make one per process and use it from one thread at a time. Nothing here raises for a driver or a GPU that fails.

    Args:
        retry_s: Seconds until a failed driver or a lost GPU is tried again; doubles with each failure.
        retry_most_s: The longest such wait.
    """

    def __init__(self, retry_s: float = 1.0, retry_most_s: float = 60.0) -> None:
        self.driver: str | None = None
        self.cuda: str | None = None
        self._retry_first, self._retry_most = retry_s, retry_most_s
        self._retry_s = self._lost_s = retry_s
        self._retry_at = 0.0
        self._error: str | None = None
        self._ready = False
        self._gpus: dict[str, _Gpu] = {}
        self._scan_at = 0.0
        self._started_at = 0.0

    def sample(self) -> Report:
        """Read every GPU once: 6 NVML calls a GPU, 9 where it is seen for the first time.

        Returns:
            One row per GPU known, in the order of their indices; a lost one, or one whose driver went away,
            keeps its row with status ``lost``, its name, UUID and index. Without a driver, ``error`` says why.
        """
        if not self._connect():
            return self._without_driver()
        try:
            rows = [self._read(gpu) for gpu in self._gpus.values()]
            _check_rights(rows)
        except _DriverGone as gone:
            self._disconnect(gone.error)
            return self._without_driver()
        self._retry_s = self._retry_first
        if all(row["status"] == "ok" for row in rows):
            self._lost_s = self._retry_first
        return {"driver": self.driver, "error": None, "gpus": sorted(rows, key=_index)}

    def indices(self) -> dict[str, int]:
        """Read which index (nvidia-smi's numbers) each GPU has, by UUID; empty without a driver."""
        self._scan_at = 0.0
        self._connect()
        return {gpu.uuid: gpu.index for gpu in sorted(self._gpus.values(), key=lambda gpu: gpu.index)}

    def processes(self) -> dict[str, list[GpuProcess]]:
        """List the processes that compute on each GPU, by UUID. Takes milliseconds a GPU: not for every second.

        Returns:
            A GPU whose processes cannot be listed is left out: unknown is not the same as none.
        """
        if not self._connect():
            return {}
        found: dict[str, list[GpuProcess]] = {}
        for gpu in self._gpus.values():
            if gpu.lost:
                continue
            with contextlib.suppress(*ERRORS):
                entries = _running_processes(gpu.handle)
                found[gpu.uuid] = [
                    {"pid": entry.pid, "memory_used": _plausible(entry.usedGpuMemory, gpu.memory_total)}
                    for entry in entries
                ]
        return found

    def close(self) -> None:
        """Let go of the driver. A later call would connect again."""
        if self._ready:
            self._ready = False
            with contextlib.suppress(*ERRORS):
                _lib.nvmlShutdown()

    def _connect(self) -> bool:
        """Be connected and know the GPUs, if that is possible and it is time to try."""
        now = time.monotonic()
        if self._ready and now < self._scan_at:
            return True
        if not self._ready and now < self._retry_at:
            return False
        try:
            lost = any(gpu.lost for gpu in self._gpus.values())
            if self._ready and lost and now >= self._started_at + _REINIT_S:
                self.close()
            if not self._ready:
                _lib.nvmlInit()
                self._ready = True
                self._started_at = now
                self.driver = _text(_lib.nvmlSystemGetDriverVersion)
                self.cuda = _cuda_version()
            self._scan()
        except ERRORS as error:
            self._disconnect(error)
            return False
        self._scan_at = now + _SCAN_S
        if any(gpu.lost for gpu in self._gpus.values()):
            self._scan_sooner()
        return True

    def _scan_sooner(self) -> None:
        """Look for a lost GPU again soon, and less often the longer it stays away."""
        self._scan_at = min(self._scan_at, time.monotonic() + self._lost_s)
        self._lost_s = min(self._lost_s * 2, _SCAN_S)

    def _disconnect(self, error: Exception) -> None:
        self.close()
        self.driver = None
        self._error = driver_reason(error)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(self._retry_s * 2, self._retry_most)
        self._scan_at = 0.0

    def _scan(self) -> None:
        """Look which GPUs there are, under which index, and what of them seldom changes."""
        present: dict[str, tuple[int, Any]] = {}
        unreadable: dict[int, str] = {}
        for index in range(_lib.nvmlDeviceGetCount()):
            try:
                handle = _lib.nvmlDeviceGetHandleByIndex(index)
                present[_text(_lib.nvmlDeviceGetUUID, handle)] = index, handle
            except ERRORS as error:
                unreadable[index] = field_reason(error)
        self._forget_placeholders()
        # With a GPU gone, NVML counts the rest anew. Keep the known numbers then: a row is not to change its number
        # because another one was lost. With all of them there, NVML's order is the truth.
        gone = [gpu for uuid, gpu in self._gpus.items() if uuid not in present]
        for gpu in gone:
            gpu.lost = unreadable.pop(gpu.index if gpu.index in unreadable else min(unreadable, default=-1), LOST)
        for uuid, (index, handle) in present.items():
            gpu = self._gpus.get(uuid) or _Gpu(index, uuid)
            if not gone:
                gpu.index = index
            elif uuid not in self._gpus:
                gpu.index = self._free_index(index)
            gpu.handle = handle
            gpu.lost = gpu.mig = None
            self._gpus[uuid] = gpu
            if gpu.name is None:
                with contextlib.suppress(*ERRORS):
                    gpu.name = _text(_lib.nvmlDeviceGetName, handle)
        for index, reason in unreadable.items():
            gpu = _Gpu(self._free_index(index), f"unknown-{index}")
            gpu.lost = reason
            self._gpus[gpu.uuid] = gpu

    def _forget_placeholders(self) -> None:
        """Drop the rows of GPUs that were never readable: they are found again, or turn up under their UUID."""
        self._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if not uuid.startswith("unknown-")}

    def _free_index(self, wanted: int) -> int:
        taken = {gpu.index for gpu in self._gpus.values()}
        return wanted if wanted not in taken else max(taken) + 1

    def _read(self, gpu: _Gpu) -> GpuSample:
        if gpu.lost:
            return _row(gpu, gpu.lost)
        row = _row(gpu)
        failures = []
        for fields, read in _READS:
            try:
                read(gpu.handle, row)
            except ERRORS as error:
                code = error_code(error)
                if code in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_GPU_NOT_FOUND):
                    return self._lose(gpu)
                failures.append(error)
                reason = field_reason(error)
                if fields[0] == "busy" and code == pynvml.NVML_ERROR_NOT_SUPPORTED and self._is_mig(gpu):
                    reason = "not available while MIG is on"
                for field in fields:
                    row["missing"].setdefault(field, reason)
        if failures:
            _check_driver(failures)
        if row["memory_total"] is not None:
            gpu.memory_total = row["memory_total"]
        return row

    def _lose(self, gpu: _Gpu) -> GpuSample:
        gpu.lost = LOST  # asking a lost GPU can block for long, so it is left alone until the next scan
        self._scan_sooner()
        return _row(gpu, LOST)

    def _is_mig(self, gpu: _Gpu) -> bool:
        if gpu.mig is None:
            try:
                gpu.mig = _lib.nvmlDeviceGetMigMode(gpu.handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
            except ERRORS:
                gpu.mig = False
        return gpu.mig

    def _without_driver(self) -> Report:
        rows = [_row(gpu, "the NVIDIA driver cannot be reached") for gpu in self._gpus.values()]
        return {"driver": None, "error": self._error, "gpus": sorted(rows, key=_index)}


class _DriverGone(Exception):  # noqa: N818  it is caught here and never shown
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _check_driver(failures: list[Exception]) -> None:
    """Raise if these failures of one GPU are really the driver's: then a question about no GPU fails as well."""
    codes = {error_code(error) for error in failures}
    if not codes & MAYBE_DRIVER:
        return
    try:
        _lib.nvmlDeviceGetCount()
    except ERRORS as error:
        raise _DriverGone(error) from None


def _check_rights(rows: list[GpuSample]) -> None:
    """Raise if no GPU gives anything: a container that lost its rights gets "unknown error" for all but the count."""
    unknown = dict.fromkeys(FIELDS, field_reason(_lib.NVMLError(pynvml.NVML_ERROR_UNKNOWN)))
    if rows and all(row["missing"] == unknown for row in rows):
        raise _DriverGone(_lib.NVMLError(pynvml.NVML_ERROR_UNKNOWN))


def _read_busy(handle: Any, row: GpuSample) -> None:
    busy = _lib.nvmlDeviceGetUtilizationRates(handle).gpu
    if busy <= 100:
        row["busy"] = busy
    else:
        row["missing"]["busy"] = _NO_VALUE


def _read_memory(handle: Any, row: GpuSample) -> None:
    try:
        # The second version counts the driver's own reserve apart; the first one counts it as used.
        memory = _lib.nvmlDeviceGetMemoryInfo(handle, version=_lib.nvmlMemory_v2)
        row["memory_used"] = memory.used
    except ERRORS as error:
        if error_code(error) not in (NO_FUNCTION, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        memory = _lib.nvmlDeviceGetMemoryInfo(handle)
        row["missing"]["memory_used"] = "this driver counts its own reserve as used; drivers from 510 on do not"
    row["memory_total"] = memory.total


def _read_power(handle: Any, row: GpuSample) -> None:
    _put_watts(row, "power_w", _lib.nvmlDeviceGetPowerUsage(handle))


def _read_power_limit(handle: Any, row: GpuSample) -> None:
    _put_watts(row, "power_limit_w", _lib.nvmlDeviceGetEnforcedPowerLimit(handle))


def _put_watts(row: GpuSample, field: Literal["power_w", "power_limit_w"], milliwatts: int) -> None:
    if milliwatts != _NO_UINT:
        row[field] = milliwatts / 1000
    else:
        row["missing"][field] = _NO_VALUE


def _read_temperature(handle: Any, row: GpuSample) -> None:
    try:
        row["temperature_c"] = _lib.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except ERRORS as error:
        # NVIDIA announced the removal of the first call with CUDA 14; its successor needs a driver from 2025.
        if error_code(error) != NO_FUNCTION:
            raise
        row["temperature_c"] = _lib.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)


def _read_clock(handle: Any, row: GpuSample) -> None:
    row["sm_clock_mhz"] = _lib.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)


_READS: tuple[tuple[tuple[str, ...], Callable[[Any, GpuSample], None]], ...] = (
    (("busy",), _read_busy),
    (("memory_used", "memory_total"), _read_memory),
    (("power_w",), _read_power),
    (("power_limit_w",), _read_power_limit),
    (("temperature_c",), _read_temperature),
    (("sm_clock_mhz",), _read_clock),
)


def _running_processes(handle: Any) -> list[Any]:
    try:
        return list(_lib.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    except ERRORS as error:
        if error_code(error) != NO_FUNCTION:
            raise
        return list(_lib.nvmlDeviceGetComputeRunningProcesses_v2(handle))


def _plausible(memory: int | None, total: int | None) -> int | None:
    """Give a process's memory, or None for the huge number some systems (WSL2) give for "unknown"."""
    return memory if memory is not None and memory <= (total or _ABSURD_BYTES) else None


def _row(gpu: _Gpu, lost: str | None = None) -> GpuSample:
    """Make a row without values; of a lost GPU, with the reason for each."""
    missing = dict.fromkeys(FIELDS, lost) if lost else {}
    if gpu.name is None:
        missing["name"] = lost or "the driver gives no name"
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "status": "lost" if lost else "ok",
        "busy": None,
        "memory_used": None,
        "memory_total": None,
        "power_w": None,
        "power_limit_w": None,
        "temperature_c": None,
        "sm_clock_mhz": None,
        "missing": missing,
    }


def _index(row: GpuSample) -> int:
    return row["index"]


def _text(read: Callable[..., Any], *args: Any) -> str:
    """Read a text; nvidia-ml-py decodes it as UTF-8, which not every card's name is."""
    try:
        value = read(*args)
    except UnicodeDecodeError as error:
        value = error.object
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _cuda_version() -> str | None:
    """Read the newest CUDA that the driver supports, such as ``13.0``."""
    try:
        version = int(_lib.nvmlSystemGetCudaDriverVersion_v2())
    except ERRORS:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"
