"""Which GPUs a run gets: what the config asks for against what the machine has."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_core.config import RunConfig
from ddp_core.errors import UserError
from ddp_core.runs import leases
from ddp_core.runs.torch_probe import probe
from ddp_core.telemetry.nvml import GpuSample, Nvml, Report

_LOCK = threading.Lock()


@functools.cache
def _nvml() -> Nvml:
    return Nvml()


def report() -> Report:
    """One look at every GPU of the machine; one NVML session per process, shared by its threads."""
    with _LOCK:
        return _nvml().sample()


def processes() -> dict[str, list[dict[str, Any]]]:
    """Processes on each GPU, by UUID; a GPU whose list cannot be had is left out. About 4 ms a GPU on real drivers.

    Returns:
        ``{uuid: [{"pid", "name", "memory_used"}]}``: name is None for a process that cannot be seen from
        here (another container's), memory is in bytes or None.
    """
    with _LOCK:
        found = _nvml().processes()
    return {uuid: [{**process, "name": _name(process["pid"])} for process in on] for uuid, on in found.items()}


def resolve(wanted: Sequence[int | str], found: Report) -> list[str]:
    """Turn indices and UUIDs into UUIDs.

    Raises:
        UserError: Naming the GPU that does not exist, is lost, or is listed twice.
    """
    if found["error"]:
        raise UserError(f"GPUs {_listed(wanted)} cannot be looked up: {found['error']}", field="launch.gpus")
    by_key: dict[int | str, GpuSample] = {
        **{g["index"]: g for g in found["gpus"]},
        **{g["uuid"]: g for g in found["gpus"]},
    }
    uuids: list[str] = []
    for key in wanted:
        gpu = by_key.get(key)
        if gpu is None:
            raise UserError(f"there is no GPU {key}; this machine has {_machine(found)}", field="launch.gpus")
        if gpu["status"] == "lost":
            raise UserError(f"GPU {key} ({gpu['name']}) is lost: it fell off the bus", field="launch.gpus")
        if gpu["uuid"] in uuids:
            raise UserError(f"GPU {key} is GPU {gpu['index']}, which is listed already", field="launch.gpus")
        uuids.append(gpu["uuid"])
    return uuids


def trains_on_gpus(config: RunConfig, found: Report) -> tuple[bool, str]:
    """Tell whether the ranks will train on CUDA, and why not if they will not.

    Asks torch itself (in a process of its own, remembered) when the config leaves it open.
    """
    if config.launch.device == "cpu":
        return False, "the config says cpu"
    if config.launch.gpus == "none":
        return False, "the config holds no GPU"
    if not found["gpus"]:
        return False, found["error"] or "this machine has no NVIDIA GPU"
    facts = probe(found["driver"] or "")
    if facts["count"] == 0:
        why = f": {facts['why']}" if facts["why"] else ""
        return False, f"torch {facts['torch']} cannot use the {len(found['gpus'])} GPUs that NVML sees{why}"
    return True, ""


def pick(
    found: Report, on_gpu: Mapping[str, Sequence[Any]], count: int, *, store: Path | None = None, share: bool = False
) -> tuple[list[str] | None, str]:
    """Pick the emptiest GPUs that neither a run nor another process uses.

    Args:
        found: A look at the GPUs.
        on_gpu: The processes on them, by UUID.
        count: How many are wanted.
        store: The store of the run they are for.
        share: Take GPUs that are in use as well, if too few are free.

    Returns:
        UUIDs, or None and what the run is waiting for, in words.
    """
    free: list[GpuSample] = []
    in_use: list[GpuSample] = []
    taken: list[str] = []
    for gpu in found["gpus"]:
        holder = leases.holder(gpu["uuid"], store)
        if gpu["status"] == "lost":
            taken.append(f"GPU {gpu['index']} is lost")
        elif holder is not None:
            taken.append(f"GPU {gpu['index']} is held by {holder}")
            in_use.append(gpu)
        elif on_gpu.get(gpu["uuid"]):
            taken.append(f"GPU {gpu['index']} is used by {_who(on_gpu[gpu['uuid']])}")
            in_use.append(gpu)
        else:
            free.append(gpu)
    if share:
        free += _emptiest(in_use)[: max(0, count - len(free))]
    if len(free) < count:
        return None, f"waiting for {count} free GPU{'s' * (count > 1)}, {len(free)} free now: {', '.join(taken)}"
    return [gpu["uuid"] for gpu in sorted(_emptiest(free)[:count], key=lambda gpu: gpu["index"])], ""


def _emptiest(found: Sequence[GpuSample]) -> list[GpuSample]:
    return sorted(found, key=lambda gpu: (gpu["memory_used"] or 0, gpu["index"]))


def document() -> dict[str, Any]:
    """The ``gpus`` document: every GPU with its load, the run that holds it and who else is on it."""
    found = report()
    on_gpu = processes() if found["gpus"] else {}
    return {
        **found,
        "gpus": [
            {**gpu, "run": leases.holder(gpu["uuid"]), "processes": on_gpu.get(gpu["uuid"], [])}
            for gpu in found["gpus"]
        ],
    }


def describe_process(process: Mapping[str, Any]) -> str:
    """A process on a GPU in words: its name, if it is known, and its pid."""
    return f"{process['name']} (pid {process['pid']})" if process["name"] else f"pid {process['pid']}"


def _name(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _who(found: Sequence[Any]) -> str:
    first = describe_process(found[0])
    return first if len(found) == 1 else f"{first} and {len(found) - 1} more"


def _listed(values: Sequence[int | str]) -> str:
    return ", ".join(str(value) for value in values)


def _machine(found: Report) -> str:
    count = len(found["gpus"])
    if count == 0:
        return "no NVIDIA GPU"
    return "only GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
