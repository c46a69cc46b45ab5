"""NVML's return codes in words: why one value is missing, why the driver cannot be used.

Source of the codes: NVML API reference, ``nvmlReturn_t``.
"""

from __future__ import annotations

import pynvml

# A mismatch of nvidia-ml-py and the driver is deliberately no NVMLError in nvidia-ml-py.
ERRORS: tuple[type[Exception], ...] = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
NO_FUNCTION: int = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
LOST = "GPU is lost (fell off the bus)"

_FIELD_REASONS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not supported by this GPU",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission",
    pynvml.NVML_ERROR_TIMEOUT: "the driver did not answer in time",
    NO_FUNCTION: "not offered by this version of the driver",
    pynvml.NVML_ERROR_GPU_IS_LOST: LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU must be reset first",
    pynvml.NVML_ERROR_IN_USE: "the GPU is held by another program",
    pynvml.NVML_ERROR_NO_DATA: "the driver has no value yet",
    pynvml.NVML_ERROR_NOT_READY: "the driver has no value yet",
    pynvml.NVML_ERROR_UNKNOWN: "the driver failed with an unknown error",
}
_DRIVER_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver found (libnvidia-ml.so.1 is missing); "
    "install the driver, or give the container access to the GPUs",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; load it (modprobe nvidia) or reboot",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library are of different versions, "
    "as after an update; reboot, or reload the driver and start this program again",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to use the NVIDIA driver; check the rights of /dev/nvidia*",
    NO_FUNCTION: "the NVIDIA driver is too old for nvidia-ml-py; update the driver",
    pynvml.NVML_ERROR_UNINITIALIZED: "the connection to the NVIDIA driver was lost",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the NVIDIA driver has lost its GPUs; reboot, and look for Xid in dmesg",
    pynvml.NVML_ERROR_UNKNOWN: "the NVIDIA driver fails with an unknown error; look for Xid in dmesg, "
    "and start the container again if this is one",
}
# Codes that may mean that the driver is gone rather than that one value is.
MAYBE_DRIVER = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    pynvml.NVML_ERROR_UNKNOWN,
}


def error_code(error: Exception) -> int:
    """Give the return code behind an exception."""
    return int(getattr(error, "value", NO_FUNCTION))  # the mismatch error has no code; it is about a function


def field_reason(error: Exception) -> str:
    """Say why a value of one GPU is missing."""
    code = error_code(error)
    return _FIELD_REASONS.get(code) or f"{str(error).rstrip('.').lower()} (NVML error {code})"


def driver_reason(error: Exception) -> str:
    """Say why NVML cannot be used at all, and what to do."""
    code = error_code(error)
    return _DRIVER_REASONS.get(code) or f"the NVIDIA driver cannot be used: {error} (NVML error {code})"
