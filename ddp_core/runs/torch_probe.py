"""What torch can do on this machine, found out without importing it here: use the GPUs, and compile."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ddp_core.runs import leases
from ddp_core.runs.processes import boot_id
from ddp_core.runs.state import write_json

# Whoever asks while torch is being asked already waits for that answer.
_ONE_AT_A_TIME = threading.Lock()

# Whoever installs what is missing should not have to wait for the next boot.
_ASK_AGAIN_S = 30.0
_cannot_compile: dict[Path, tuple[float, str]] = {}

_CUDA_SCRIPT = """
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

# A trial would take half a minute and, on CUDA, memory of a GPU that somebody may be using.
_COMPILE_SCRIPT = """
import json, os, pathlib, shutil, sys, sysconfig
why = ""
try:
    from torch._dynamo.eval_frame import check_if_dynamo_supported
    check_if_dynamo_supported()
    if sys.argv[1] == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        get_cpp_compiler()
    else:
        import triton
        if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
            why = "Triton needs a C compiler, gcc or clang"
    if not why and not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        why = "the headers of Python are not installed (Python.h)"
except Exception as error:
    why = (str(error).splitlines() or [type(error).__name__])[0]
print(json.dumps({"why": why}))
"""


def probe(driver: str) -> dict[str, Any]:
    """Ask torch, in a process of its own, whether it can use CUDA; remembered until the next boot.

    Args:
        driver: The driver's version, since a new driver may change the answer.

    Returns:
        ``{"torch": version, "cuda": version or None, "count": usable GPUs, "why": str}``.
    """
    with _ONE_AT_A_TIME:
        memory = _memory("torch", driver)
        if found := _recall(memory):
            return found
        if found := _ask(_CUDA_SCRIPT):
            _remember(memory, found)
            return found
        return {
            "torch": importlib.metadata.version("torch"),
            "cuda": None,
            "count": 0,
            "why": "torch could not be imported",
        }


def probe_compile(device: str, env: Mapping[str, str]) -> str:
    """Ask torch, in a process of its own, whether torch.compile has all it needs; a yes is remembered.

    Args:
        device: ``cpu`` or ``cuda``.
        env: Extra environment variables of the training, which may name a compiler.

    Returns:
        Why it cannot work, or an empty string, also if that cannot be found out.
    """
    with _ONE_AT_A_TIME:
        memory = _memory("compile", device, sorted(env.items()))
        when, why = _cannot_compile.get(memory, (0.0, ""))
        if why and time.monotonic() - when < _ASK_AGAIN_S:
            return why
        found = _recall(memory) or _ask(_COMPILE_SCRIPT, device, env=env)
        why = str(found["why"]) if found else ""
        if why:
            _cannot_compile[memory] = (time.monotonic(), why)
        elif found:
            _remember(memory, found)
        return why


def _memory(name: str, *facts: object) -> Path:
    """The file that remembers an answer for as long as these facts, torch and this boot are the same."""
    known = (sys.executable, importlib.metadata.version("torch"), *facts, boot_id())
    return leases.folder() / f"{name}-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.json"


def _recall(memory: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = orjson.loads(memory.read_bytes())
        return found
    except (OSError, orjson.JSONDecodeError):
        return None


def _remember(memory: Path, found: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # only a memory; the next launch asks again
        write_json(memory, found)


def _ask(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Run a script that prints what it found; None if it did not get that far."""
    try:
        output = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **(env or {})},
        )
        found: dict[str, Any] = orjson.loads(output.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, orjson.JSONDecodeError, IndexError):
        return None
    return found
