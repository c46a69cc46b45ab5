"""Leases on GPUs: one locked file per GPU, so that two runs never share one by accident.

A lease is an flock(2) on a file named by the GPU's UUID. The supervisor takes it and torchrun
inherits the open file, so a lease lives exactly as long as the processes that hold it and a crash
cannot leave a stale one. The folder is one for the whole machine, not one per store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddp_core.errors import UserError


def folder() -> Path:
    """Where the lease files are: ``$DDP_LEASES``, else a folder in the machine's temporary folder."""
    path = Path(os.environ.get("DDP_LEASES") or Path(tempfile.gettempdir()) / "ddp-gpu-leases")
    if not path.is_dir():
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Shared between users as /tmp is: everyone may lock, nobody may remove another's file.
            path.chmod(0o1777)
        except OSError as error:
            raise UserError(
                f"the folder of the GPU leases {path} cannot be made ({error.strerror}); set DDP_LEASES to another"
            ) from None
    return path


class Leases:
    """The GPUs one run holds. Closing releases them."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    @property
    def descriptors(self) -> list[int]:
        """Open files for torchrun to inherit, so that its life keeps the lease too."""
        return list(self._files.values())

    def try_take(self, uuids: Sequence[str], run: Path | str) -> str | None:
        """Take all of the GPUs or none.

        Args:
            uuids: The GPUs.
            run: Who takes them: the run's directory.

        Returns:
            None on success, else the UUID of the first GPU that another run holds.
        """
        taken: dict[str, int] = {}
        for uuid in sorted(uuids):  # one order for everyone, so that two runs cannot wait for each other
            descriptor = _open(uuid)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                for held in taken.values():
                    os.close(held)
                return uuid
            taken[uuid] = descriptor
        for uuid, descriptor in taken.items():
            self._files[uuid] = descriptor
            with contextlib.suppress(OSError):  # the lock counts; on a full disk its holder stays unnamed
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, os.fsencode(run), 0)
        return None

    def take_free(self, uuids: Iterable[str], run: Path | str) -> None:
        """Take those of the GPUs that nobody holds, for a run that shares the others."""
        for uuid in uuids:
            if uuid not in self._files:
                self.try_take([uuid], run)

    def close(self) -> None:
        """Release everything this process holds; torchrun's copies end with torchrun."""
        for descriptor in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files.clear()


def holder(uuid: str, store: Path | None = None) -> str | None:
    """Id of the run that holds a GPU, or None if it is free.

    Args:
        uuid: The GPU.
        store: The reader's own store, if the store of a run that is in another one is to be named as well.
    """
    found = _holder(uuid)
    if found is None:
        return None
    foreign = store is not None and found.is_absolute() and found.parent != store
    return f"{found.name} of {found.parent}" if foreign else found.name


def _holder(uuid: str) -> Path | None:
    path = folder() / f"{uuid}.lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock is enough to find out, and two that ask at once do not disturb each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Path(os.fsdecode(os.pread(descriptor, 5000, 0)) or "another run")
    finally:
        os.close(descriptor)
    return None


def _open(uuid: str) -> int:
    path = folder() / f"{uuid}.lock"
    # Without O_CREAT first: in a folder like /tmp the kernel refuses O_CREAT on another user's file.
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, 0o666)
    return descriptor
