"""A chart that follows a run or the machine by itself, without reruns of the page.

Python only says what to show. The data come over the page's WebSocket and are drawn by
``dashboard/static/chart.js`` with the plotly.js of the installed plotly package.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal, NamedTuple

from dashboard.components._shim import module_component

Kind = Literal["ranks", "gpus", "host", "processes"]
HEIGHT = 240

_mount = module_component("ddp.live_chart", "chart.js")
PLOTLY = version("plotly")


class _Look(NamedTuple):
    kind: Kind = "ranks"
    unit: str = ""
    y_range: tuple[float, float] | None = None
    from_zero: bool = False
    whole: bool = False


_PERCENT = (0.0, 100.0)
_LOOKS = {
    "accuracy": _Look(unit="fraction", y_range=_PERCENT),
    "val_accuracy": _Look(unit="fraction", y_range=_PERCENT, whole=True),
    "val_loss": _Look(whole=True),
    "samples_per_s": _Look(unit="samples/s", from_zero=True),
    "data_s": _Look(unit="s", from_zero=True),
    "forward_s": _Look(unit="s", from_zero=True),
    "backward_s": _Look(unit="s", from_zero=True),
    "optimizer_s": _Look(unit="s", from_zero=True),
    "busy": _Look("gpus", "%", _PERCENT),
    "memory_used": _Look("gpus", "bytes", from_zero=True),
    "power_w": _Look("gpus", "W", from_zero=True),
    "temperature_c": _Look("gpus", "°C"),
    "sm_clock_mhz": _Look("gpus", "MHz", from_zero=True),
    "cpu": _Look("host", "%", _PERCENT),
    "memory": _Look("processes", "bytes", from_zero=True),
}


def live_chart(
    run: str | None,
    field: str,
    *,
    key: str,
    title: str,
    kind: Kind | None = None,
    unit: str | None = None,
    y_range: tuple[float, float] | None = None,
    from_zero: bool | None = None,
    height: int = HEIGHT,
) -> None:
    """Show a live chart.

    What is left out of ``kind``, ``unit``, ``y_range`` and ``from_zero`` is as usual for the field.

    Args:
        run: The run's id; None for the whole machine over the last hour, which has no ranks.
        field: The metric's or the hardware field's name, such as ``loss``, ``busy``, ``memory_used``, ``cpu``.
        key: Unique on the page; a chart keeps its zoom for as long as its key and parameters stay.
        title: What it shows, such as ``Loss``.
        kind: ``ranks``: a metric of the rank logs by step, with its mean over ranks; ``gpus``, ``host`` or
            ``processes``: a field of the hardware samples by time, one curve per GPU, for the machine, or per
            rank's processes.
        unit: Unit of the y axis. ``bytes`` is shown in MiB or GiB, ``fraction`` (0 to 1) in percent.
        y_range: Fixed ends of the y axis, in the unit shown.
        from_zero: Let the y axis begin at 0.
        height: In pixels, everything included; the chart never takes another.
    """
    usual = _LOOKS.get(field, _Look())
    kind = usual.kind if kind is None else kind
    if kind == "processes" and field == "cpu":
        usual = _Look("processes", "% of a core", from_zero=True)
    data = {
        "title": title,
        "kind": kind,
        "field": field,
        "run": run,
        "unit": usual.unit if unit is None else unit,
        "yRange": usual.y_range if y_range is None else y_range,
        "fromZero": usual.from_zero if from_zero is None else from_zero,
        # Measured over all ranks together, so every rank logs the same and one curve says it.
        "whole": usual.whole,
        "height": height,
        "plotly": PLOTLY,
    }
    _mount(data, key=key, height=height)
