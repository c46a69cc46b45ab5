"""What all tests share: nothing they start touches this machine's own store, leases or GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a real GPU where there is none: deselected, so never a silent skip."""
    if Path("/dev/nvidiactl").exists():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(scope="session", autouse=True)
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lease files of these tests' simulated GPUs, apart from the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_LEASES", str(tmp_path_factory.mktemp("leases")))
        patch.delenv("DDP_STORE", raising=False)
        yield


def wait_for(condition: Callable[[], T], what: str, timeout: float = 30.0) -> T:
    """Wait until ``condition()`` is true and return it; fail with ``what`` when time is up."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout:g} s: {what}")
