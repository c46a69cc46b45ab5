"""The pages and the way between them. Streamlit runs this file at every rerun."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

STATIC = Path(__file__).parent / "static"
# An icon of our own: Streamlit's emoji and Material icons would be fetched from another host.
st.set_page_config(page_title="DDP runs", page_icon=str(STATIC / "panels_icon.svg"), layout="wide")
st.html(STATIC / "panels_page.css")

page = st.navigation(
    [
        st.Page("app_pages/launch.py", title="Launch", icon=":material/rocket_launch:", default=True),
        st.Page("app_pages/runs.py", title="Runs", icon=":material/list:", url_path="runs"),
        st.Page("app_pages/gpus.py", title="GPUs", icon=":material/memory:", url_path="gpus"),
        st.Page("app_pages/run.py", title="Run", url_path="run", visibility="hidden"),
    ],
    position="top",
)
st.set_page_config(page_title=f"{page.title} · DDP runs")
# A page can tell by this whether somebody came to it or is on it already.
st.session_state["ddp.came_from"] = st.session_state.get("ddp.page")
st.session_state["ddp.page"] = page.url_path
page.run()
