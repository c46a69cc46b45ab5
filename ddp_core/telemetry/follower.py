"""Follow files that others append to: by byte offset, only what is new, in bounded memory.

A poll that finds nothing new costs one ``stat``. Nothing is kept open between polls, so one process
can follow thousands of files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ddp_core.telemetry.jsonl import loads

MAX_LINE = 1 << 20
"""Longest line that is kept, in bytes; a longer one is skipped and counted."""

_CHUNK = 1 << 20
_ANCHOR = 64


class LineFollower:
    """Read the complete lines that were appended to a file since the last look.

    The file may not exist yet, may end in half a line (kept until the rest arrives), hold any
    bytes, be truncated, or be replaced by another one; in the last two cases reading begins again at its start.

    Args:
        path: The file.

    Attributes:
        generation: Changes whenever reading began again, so that what was built from earlier lines is void.
        skipped: Number of lines over :data:`MAX_LINE` that were left out in this generation.
        caught_up: False if the last poll stopped at its ``max_bytes`` and there is more to read at once.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = os.fspath(path)
        self.generation = 0
        self.skipped = 0
        self.caught_up = True
        self._position = 0
        self._tail = b""
        self._in_long_line = False
        self._seen = (0, 0)
        self._anchor = b""  # the last bytes read

    @property
    def offset(self) -> int:
        """Bytes of the file that are done with: where the first line not yet given begins."""
        return self._position - len(self._tail)

    @property
    def rest(self) -> bytes:
        """The half line after the last whole one, which is all there will be once nobody writes any more."""
        return self._tail

    def poll(self, max_bytes: int = 8 << 20) -> list[bytes]:
        """Read what is new.

        Args:
            max_bytes: Read at most this much now; the rest waits for the next poll.

        Returns:
            The complete lines since the last poll, without their newlines. Empty if there are none, or
            if the file is not there or cannot be read.
        """
        try:
            stat = os.stat(self.path)  # noqa: PTH116  a Path costs as much as the call itself
            if stat.st_size == self._position and (stat.st_ino, stat.st_mtime_ns) == self._seen:
                self.caught_up = True
                return []
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self.caught_up = True
            return []
        try:
            return self._read(fd, max_bytes)
        except OSError:  # a directory, or a disk that fails: as good as not there
            self.caught_up = True
            return []
        finally:
            os.close(fd)

    def _read(self, fd: int, max_bytes: int) -> list[bytes]:
        stat = os.fstat(fd)
        # A shorter file, one that was written anew, and another one in its place (even with the same inode) all show
        # in this: the bytes that were read last are no longer there.
        if os.pread(fd, len(self._anchor), self._position - len(self._anchor)) != self._anchor:
            self._begin_again()
        self._seen = (stat.st_ino, stat.st_mtime_ns)
        lines: list[bytes] = []
        left = max_bytes
        while left > 0 and (chunk := os.pread(fd, min(_CHUNK, left), self._position)):
            left -= len(chunk)
            self._position += len(chunk)
            self._anchor = (self._anchor + chunk[-_ANCHOR:])[-_ANCHOR:]
            self._take(chunk, lines)
        self.caught_up = left > 0
        return lines

    def _take(self, chunk: bytes, lines: list[bytes]) -> None:
        """Add the lines that ``chunk`` completes to ``lines`` and keep its torn tail."""
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            found = (self._tail + head).split(b"\n")
            if self._in_long_line:
                del found[0]
                self._in_long_line = False
            whole = [line for line in found if len(line) <= MAX_LINE]
            self.skipped += len(found) - len(whole)
            lines += whole
            self._tail = tail
        elif not self._in_long_line:
            self._tail += tail
        if len(self._tail) > MAX_LINE:
            self._tail = b""
            self._in_long_line = True
            self.skipped += 1

    def _begin_again(self) -> None:
        self.generation += 1
        self.skipped = 0
        self._position = 0
        self._tail = self._anchor = b""
        self._in_long_line = False


class JsonlFollower:
    """Read the JSON objects that were appended to a file since the last look.

    Lines that are torn, null or no JSON object are skipped and counted; blank lines are nothing.

    Args:
        path: The file.
    """

    def __init__(self, path: Path | str) -> None:
        self.lines = LineFollower(path)
        self._bad = 0
        self._bad_generation = 0

    @property
    def offset(self) -> int:
        """See :attr:`LineFollower.offset`."""
        return self.lines.offset

    @property
    def generation(self) -> int:
        """Changes whenever the file was truncated or replaced and is read again from its start."""
        return self.lines.generation

    @property
    def caught_up(self) -> bool:
        """False if there is more to read at once."""
        return self.lines.caught_up

    @property
    def skipped(self) -> int:
        """Number of lines of this generation that could not be used."""
        return self._bad + self.lines.skipped

    def poll(self, max_bytes: int = 8 << 20) -> list[dict[str, Any]]:
        """Read the objects that are new; see :meth:`LineFollower.poll`."""
        lines = self.lines.poll(max_bytes)
        if self._bad_generation != self.lines.generation:
            self._bad_generation = self.lines.generation
            self._bad = 0
        records = []
        for line in lines:
            record = loads(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                self._bad += 1
        return records
