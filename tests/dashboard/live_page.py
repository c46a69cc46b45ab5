"""Charts of the run that the address names, ``?run=<id>``; with ``&machine=1`` those of the machine too."""

import streamlit as st

from dashboard.components.live_chart import live_chart

st.set_page_config(layout="wide")
run = st.query_params.get("run")
st.button("rerun")
if run:
    live_chart(run, st.query_params.get("metric", "loss"), key="loss", title="Loss", height=300)
    if st.query_params.get("hardware"):
        left, right = st.columns(2)
        with left:
            live_chart(run, "busy", key="busy", title="Busy")
        with right:
            live_chart(run, "memory_used", key="memory", title="Memory")
        with left:
            live_chart(run, "cpu", key="host", title="Host CPU")
        with right:
            live_chart(run, "memory", key="processes", title="Memory of the ranks")
if st.query_params.get("machine"):
    live_chart(None, "busy", key="machine", title="Busy")
