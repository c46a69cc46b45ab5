"""The rank-aware log: what one training process says about itself, one JSON object a line.

Every line is one ``write`` to a file opened for appending: it is in the kernel's hands when the call
returns, so it is never late, survives ``kill -9``, and lines of forked processes do not mix.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from ddp_core.telemetry.jsonl import dumps


class RankLog:
    """Append metrics and events to one rank's file. Never raises into the training.

    When the file cannot be written (disk full, folder removed) that is said once on stderr, lines
    are left out, and every further call tries again; once it works, a ``warning`` event says how many are missing.

    Args:
        path: The file, ``metrics/attempt_<n>/rank_<r>.jsonl``; its folder is made if need be.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd = -1
        self._closed = False
        self._torn = False  # the file may end in half a line
        self._lost = 0
        self._why_lost = ""
        self._complained: set[str] = set()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._say_lost(error)

    def log(self, step: Any, **values: Any) -> None:
        """Append one metric line.

        Args:
            step: The optimizer step, counted from 1 over the whole run.
            **values: Numbers by name: Python's, NumPy's, or tensors of one element (which waits for the
                device, as ``item()`` does). Anything else is left out, with one warning per name.
        """
        record: dict[str, Any] = {"ts": time.time(), "step": step}
        if type(step) is not int:
            record["step"] = _as_number(step)
            if record["step"] is None:
                self._complain("step", step)
                return
        for name, value in values.items():
            if type(value) is float or type(value) is int:
                item: int | float | None = value
            else:
                item = _as_number(value)
            if item is None or name in ("ts", "event"):
                self._complain(name, value)
            else:
                record[name] = item
        self._write(dumps(record))

    def event(self, name: str, /, **fields: Any) -> None:
        """Append an event line such as ``start``, ``checkpoint`` or ``end``; fields are anything JSON can say."""
        self._write(dumps({"ts": time.time(), "event": name, **fields}))

    def close(self) -> None:
        """Close the file; calls after this do nothing."""
        self._closed = True
        self._close()

    def _complain(self, name: str, value: Any) -> None:
        if name in self._complained:
            return
        self._complained.add(name)
        reason = "its name is taken" if name in ("ts", "event") else f"a {type(value).__name__} is not a number"
        message = f"the rank log leaves out {name!r}: {reason}"
        _to_stderr(message)
        self.event("warning", message=message)

    def _open(self) -> None:
        # Readable too, for a look at the last byte: a file that ends in half a line must not get the next glued on.
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _write(self, line: bytes) -> None:
        if self._closed:
            return
        done = 0
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
                self._close()
                raise FileNotFoundError(2, f"{self.path} was removed")
            if self._fd < 0:
                self._open()
            if self._lost:
                line = self._lost_and_found() + line
            if self._torn:
                line = b"\n" + line
            done = os.write(self._fd, line)
            while done < len(line):
                # A disk that fills up takes a part, and says why when asked to take the rest.
                self._torn = True
                done += os.write(self._fd, line[done:])
            self._torn = False
            self._lost = 0
        except OSError as error:
            if done == len(line) - 1:  # only the end of the line is missing, and the next one brings it
                self._lost = 0
            else:
                self._say_lost(error)

    def _say_lost(self, error: OSError) -> None:
        if self._lost == 0:
            self._why_lost = error.strerror or str(error)
            _to_stderr(f"cannot write the rank log {self.path}: {self._why_lost}; training goes on without it")
        self._lost += 1

    def _lost_and_found(self) -> bytes:
        plural = "line is" if self._lost == 1 else "lines are"
        message = f"{self._lost} {plural} missing here from the rank log: {self._why_lost}"
        return dumps({"ts": time.time(), "event": "warning", "message": message})


def _as_number(value: Any) -> int | float | None:
    """Give the number that ``value`` is or holds, or None."""
    try:
        if hasattr(value, "item"):  # numpy scalars and tensors, without importing either
            value = value.item()
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            return None
        return int(value) if isinstance(value, int) else float(value)
    except Exception:  # whatever a foreign type raises: it is no number, and training goes on
        return None


def _to_stderr(message: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be None, closed, or full as well
        sys.stderr.write(f"ddp: {message}\n")
        sys.stderr.flush()
