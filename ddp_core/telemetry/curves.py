"""Growing columns of numbers, and the choice of their points that matter when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tsdownsample import MinMaxLTTBDownsampler

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]
"""x and y, each of shape (n,)."""

_SAMPLER = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]


class Column:
    """A growable array of float64.

    ``start`` is how many values were dropped at the front, so that a position counts from the first ever
    appended and stays valid: positions go from ``start`` to ``end``.
    """

    def __init__(self) -> None:
        self.start = 0
        self._values = np.empty(64)
        self._size = 0

    @property
    def end(self) -> int:
        """Position after the last value."""
        return self.start + self._size

    @property
    def values(self) -> Floats:
        """The values there are; a view, valid until the next change."""
        return self._values[: self._size]

    def since(self, position: int) -> Floats:
        """The values from a position on."""
        return self._values[max(0, position - self.start) : self._size]

    def extend(self, values: Floats | Sequence[float]) -> None:
        """Append values."""
        size = self._size + len(values)
        if size > len(self._values):
            grown = np.empty(max(size, 2 * len(self._values)))
            grown[: self._size] = self.values
            self._values = grown
        self._values[self._size : size] = values
        self._size = size

    def cut(self, size: int) -> None:
        """Keep only the first ``size`` values."""
        self._size = min(self._size, size)

    def drop(self, count: int) -> None:
        """Drop values at the front."""
        kept = self.values[count:].copy()
        self._values, self._size, self.start = kept, len(kept), self.start + count


def thin(x: Floats, y: Floats, *, lo: float | None = None, hi: float | None = None, points: int = 2000) -> Curve:
    """Choose the points of a curve that matter when it is drawn: MinMaxLTTB over the finite ones.

    The smallest and the largest finite value are always among them, and so is at least one value of every
    stretch of non-finite ones (as far as there is room), so that no line is drawn across it.

    Args:
        x: Shape (n,), sorted or not.
        y: Shape (n,).
        lo: Window; one point beyond each side is kept so that a line enters and leaves it.
        hi: See ``lo``.
        points: About how many points to give.

    Returns:
        The chosen points in the order of x.
    """
    if len(x) > 1 and not np.all(x[1:] >= x[:-1]):
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    first = 0 if lo is None else max(0, int(np.searchsorted(x, lo)) - 1)
    last = len(x) if hi is None else int(np.searchsorted(x, hi, "right")) + 1
    x, y = x[first:last], y[first:last]
    if len(x) <= points:
        return x.copy(), y.copy()
    finite = np.isfinite(y)
    good = np.flatnonzero(finite)
    bad = np.flatnonzero(~finite)
    kept = good
    if len(good) > points:
        chosen = _SAMPLER.downsample(x[good], np.ascontiguousarray(y[good]), n_out=max(points, 4))
        values = y[good]
        # The sampler's own buckets can miss an extreme when there are few of them.
        kept = np.union1d(good[chosen], good[[np.argmin(values), np.argmax(values)]])
    if len(bad):
        edges = bad[np.flatnonzero(np.diff(bad, prepend=-2) > 1)]
        kept = np.union1d(kept, np.union1d(_spread(edges, points // 2), _spread(bad, points // 8)))
    return x[kept], y[kept]


def _spread(indices: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """At most ``most`` of the indices, evenly, with the first and the last."""
    if len(indices) <= most:
        return indices
    return indices[np.linspace(0, len(indices) - 1, max(most, 2)).astype(np.intp)]
