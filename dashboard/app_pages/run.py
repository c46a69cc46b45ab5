"""Run page, ``?run=<id>``: one run from queued to its end, live."""

from __future__ import annotations

import shlex

import streamlit as st

from dashboard.components import panels
from dashboard.components.live_chart import live_chart
from ddp_core import runs
from ddp_core.errors import UserError


def unknown(run_id: str, problem: str) -> None:
    """Say that there is no such run, and where the runs are."""
    st.html('<div class="page-title"><h1>No such run</h1></div>')
    with st.container(border=True, key="no_such_run"):
        st.text(problem[:1].upper() + problem[1:] if run_id else "The address names no run.")
        st.caption("It may have been deleted, or this dashboard was started with another store (DDP_STORE).")
        st.page_link("app_pages/runs.py", label="All runs", icon=":material/list:")


def config_tab(run: runs.RunDir, command: list[str] | None) -> None:
    """The snapshot of the config and the command, as launched."""
    try:
        text = run.config_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        st.text(f"{run.config_file} cannot be read: {error}")
    else:
        st.code(text, language="yaml")
    if command:
        st.code(shlex.join(command), language="bash", wrap_lines=True)
    st.code(str(run.path), language=None, wrap_lines=True)


def wants_gpus(run: runs.RunDir) -> bool:
    """Tell whether a run that waits is going to hold GPUs, as far as its config tells."""
    try:
        launch = run.config().launch
    except UserError:
        return False
    return isinstance(launch.gpus, tuple) or (launch.gpus == "auto" and launch.device != "cpu")


def main() -> None:
    """Draw the page."""
    run_id = st.query_params.get("run", "")
    try:
        run = runs.Store().run(run_id)
        shown = runs.show(run)
    except UserError as error:
        unknown(run_id, error.message)
        return
    nproc = shown["nproc_per_node"]
    if nproc is None:
        try:
            nproc = run.config().launch.nproc_per_node
        except UserError:
            nproc = 1
    st.set_page_config(page_title=f"{run_id} · DDP runs")
    panels.header(run_id, shown)
    with st.container(key="run_charts"):
        live_chart(run_id, "loss", key=f"loss_{run_id}", title="Loss")
        live_chart(run_id, "val_accuracy", key=f"val_{run_id}", title="Validation accuracy")
    with st.container(key="run_numbers"):
        panels.ranks(run_id)
        panels.hardware(run_id)
    with st.container(key="hardware_charts"):
        if shown["gpus"] or (shown["state"] == "queued" and wants_gpus(run)):
            live_chart(run_id, "busy", key=f"busy_{run_id}", title="Busy")
            live_chart(run_id, "memory_used", key=f"memory_used_{run_id}", title="Memory")
            live_chart(run_id, "power_w", key=f"power_w_{run_id}", title="Power")
            live_chart(run_id, "temperature_c", key=f"temperature_c_{run_id}", title="Temperature")
        else:
            live_chart(run_id, "cpu", key=f"cpu_{run_id}", title="Host CPU")
            live_chart(run_id, "cpu", key=f"cpu_of_ranks_{run_id}", title="CPU of each rank", kind="processes")
            live_chart(run_id, "memory", key=f"memory_of_ranks_{run_id}", title="Memory of each rank")
    events, output, config, checkpoints = st.tabs(["Events", "Output", "Config", "Checkpoints"])
    with events:
        panels.events(run_id)
    with output:
        panels.output(run_id, nproc)
    with config:
        config_tab(run, shown["command"])
    with checkpoints:
        panels.checkpoints(run_id)
    panels.connection()


main()
