"""Whether torch can use the GPUs that NVML sees, found out without importing torch here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import subprocess
import sys
import threading
from typing import Any

import orjson

from ddp_core.runs import leases
from ddp_core.runs.processes import boot_id
from ddp_core.runs.state import write_json

# Whoever asks while torch is being asked already waits for that answer.
_ONE_AT_A_TIME = threading.Lock()

_SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    usable = torch.cuda.is_available()
    count = torch.cuda.device_count() if usable else 0
why = "" if usable else (str(caught[-1].message).split(" (Triggered")[0] if caught else "")
if not usable and torch.version.cuda is None:
    why = "this torch was built without CUDA"
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "count": count, "why": why}))
"""


def probe(driver: str) -> dict[str, Any]:
    """Ask torch, in a process of its own, whether it can use CUDA; remembered until the next boot.

    Args:
        driver: The driver's version, since a new driver may change the answer.

    Returns:
        ``{"torch": version, "cuda": version or None, "count": usable GPUs, "why": str}``.
    """
    with _ONE_AT_A_TIME:
        return _probe(driver)


def _probe(driver: str) -> dict[str, Any]:
    facts = (sys.executable, importlib.metadata.version("torch"), driver, boot_id())
    remembered = leases.folder() / f"torch-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    try:
        found: dict[str, Any] = orjson.loads(remembered.read_bytes())
        return found
    except (OSError, orjson.JSONDecodeError):
        pass
    try:
        output = subprocess.run(
            [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
        )
        found = orjson.loads(output.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, orjson.JSONDecodeError, IndexError):
        return {"torch": facts[1], "cuda": None, "count": 0, "why": "torch could not be imported"}
    with contextlib.suppress(OSError):  # only a memory; the next launch asks again
        write_json(remembered, found)
    return found
