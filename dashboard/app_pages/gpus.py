"""GPUs page: every GPU of this machine, its last hour, and who uses it."""

from __future__ import annotations

import streamlit as st

from dashboard.components import panels
from dashboard.components.live_chart import live_chart
from ddp_core import runs

st.html('<div class="page-title"><h1>GPUs of this machine</h1></div>')
panels.machine()
if runs.gpus_document()["gpus"]:
    with st.container(key="gpu_charts"):
        for field, title in (
            ("busy", "Busy"),
            ("memory_used", "Memory"),
            ("power_w", "Power"),
            ("temperature_c", "Temperature"),
        ):
            live_chart(None, field, key=f"machine_{field}", title=title)
panels.connection()
