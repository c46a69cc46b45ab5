"""Runs: their directories, their supervisors, and what can be asked of and done to them."""

from ddp_core.runs.actions import ensure_supervised, launch, stop
from ddp_core.runs.command import torchrun_command
from ddp_core.runs.documents import ls, show
from ddp_core.runs.gpus import document as gpus_document
from ddp_core.runs.preflight import Finding, demo_config, preflight, split_preview
from ddp_core.runs.resuming import resume
from ddp_core.runs.state import RunStatus
from ddp_core.runs.store import RunDir, Store

__all__ = [
    "Finding",
    "RunDir",
    "RunStatus",
    "Store",
    "demo_config",
    "ensure_supervised",
    "gpus_document",
    "launch",
    "ls",
    "preflight",
    "resume",
    "show",
    "split_preview",
    "stop",
    "torchrun_command",
]
