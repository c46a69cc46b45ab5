"""Charts of the run that the address names, ``?run=<id>``; ``&hardware=1`` and ``&machine=1`` add more."""

import streamlit as st

from dashboard.components.live_chart import live_chart

st.set_page_config(layout="wide")
query = st.query_params
st.button("rerun")
if st.checkbox("charts", value=True):
    if run := query.get("run"):
        live_chart(run, query.get("metric", "loss"), key="loss", title="Loss", height=300)
        if query.get("hardware"):
            for place, (field, title) in zip(
                st.columns(2) * 2,
                {"busy": "Busy", "memory_used": "Memory", "cpu": "Host CPU", "memory": "Memory of the ranks"}.items(),
                strict=True,
            ):
                with place:
                    live_chart(run, field, key=field, title=title)
    if query.get("machine"):
        live_chart(None, "busy", key="machine", title="Busy")
