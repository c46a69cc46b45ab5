"""The live panels: one component whose JavaScript draws what it is told to, from the page's own stream.

A panel's Python side only says which panel and of which run. Its data come over the page's WebSocket,
so nothing here reruns while a run goes on. What a user clicks in a panel comes back as a trigger:
``stop`` (a run's id), ``resume`` (a run and a checkpoint), ``go`` (another page) and ``changed`` (the page should
look again).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.components._shim import SHIM, current_page
from dashboard.components.live_chart import PLOTLY
from ddp_core import runs
from ddp_core.errors import UserError

_STATIC = Path(__file__).parents[1] / "static"
_component = st.components.v2.component(
    "ddp.panel", js=SHIM % "panels.js", css=(_STATIC / "panels.css").read_text(encoding="utf-8")
)
_PAGES = {
    "": "app_pages/launch.py",
    "runs": "app_pages/runs.py",
    "run": "app_pages/run.py",
    "gpus": "app_pages/gpus.py",
}
_PROBLEM = "ddp.problem"


def _panel(name: str, key: str, **data: Any) -> None:
    def stop() -> None:
        run_id = st.session_state[key].stop
        try:
            runs.stop(runs.Store().run(run_id))
        except UserError as error:
            st.session_state[_PROBLEM] = str(error)

    def resume() -> None:
        asked = st.session_state[key].resume
        store = runs.Store()
        try:
            runs.resume(store.run(asked["run"]), store, from_checkpoint=asked["checkpoint"])
        except UserError as error:
            st.session_state[_PROBLEM] = str(error)

    result = _component(
        key=key,
        data={"page": current_page(), "data": {"panel": name, **data}},
        on_stop_change=stop,
        on_resume_change=resume,
        on_go_change=_nothing,
        on_changed_change=_nothing,
    )
    if result.go:
        st.switch_page(_PAGES[result.go["page"]], query_params=result.go["parameters"])
    if (result.stop or result.resume) and (problem := st.session_state.pop(_PROBLEM, None)):
        st.error(problem)


def _nothing() -> None:
    """Make Streamlit keep the trigger; the page acts on it in its own order."""


def plan(preview: dict[str, Any], *, stale: bool) -> None:
    """What a launch will do: effective batch, steps, split. ``stale`` while the form has a mistake."""
    _panel("plan", "panel_plan", plan=preview, stale=stale, plotly=PLOTLY)


def header(run_id: str, shown: dict[str, Any]) -> None:
    """A run's state, progress and verdict, with Stop, Resume and Run again.

    Args:
        run_id: The run.
        shown: Its ``show`` document, so that something true is there before the stream is.
    """
    key = f"panel_header_{run_id}"
    # The document of the first script run stays: other data would draw the panel anew at every rerun.
    first: dict[str, Any] = st.session_state.setdefault(f"{key}_first", shown)
    _panel("header", key, run=run_id, show=first, gpus=shown["gpus"])


def ranks(run_id: str) -> None:
    """Each rank's latest numbers."""
    _panel("ranks", f"panel_ranks_{run_id}", run=run_id)


def hardware(run_id: str) -> None:
    """The latest numbers of the run's GPUs and of the host."""
    _panel("hardware", f"panel_hardware_{run_id}", run=run_id)


def events(run_id: str) -> None:
    """What happened to a run, the newest first."""
    _panel("events", f"panel_events_{run_id}", run=run_id)


def output(run_id: str, nproc_per_node: int) -> None:
    """What each rank prints, followed at its end."""
    _panel("output", f"panel_output_{run_id}", run=run_id, nproc_per_node=nproc_per_node)


def checkpoints(run_id: str) -> None:
    """The checkpoints that are there."""
    _panel("checkpoints", f"panel_checkpoints_{run_id}", run=run_id)


def run_list() -> None:
    """All runs of the store."""
    _panel("list", "panel_list")


def machine() -> None:
    """All GPUs of the machine and who uses them."""
    _panel("machine", "panel_machine")


def connection() -> None:
    """The word in the corner that says whether the page is live."""
    _panel("connection", "panel_connection")
