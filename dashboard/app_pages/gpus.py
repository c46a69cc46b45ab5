"""GPUs page: every GPU of this machine, its last hour, and who uses it."""

from __future__ import annotations

import streamlit as st

from dashboard.components import panels
from dashboard.components.live_chart import live_chart
from ddp_core import runs

st.html('<div class="page-title"><h1>GPUs of this machine</h1></div>')
panels.machine()
with st.container(key="hardware_charts"):
    if runs.gpus_document()["gpus"]:
        live_chart(None, "busy", key="machine_busy", title="Busy")
        live_chart(None, "memory_used", key="machine_memory", title="Memory")
        live_chart(None, "power_w", key="machine_power", title="Power")
        live_chart(None, "temperature_c", key="machine_temperature", title="Temperature")
    live_chart(None, "cpu", key="machine_cpu", title="Host CPU")
    live_chart(None, "memory_used", key="machine_host_memory", title="Host memory", kind="host")
panels.connection()
