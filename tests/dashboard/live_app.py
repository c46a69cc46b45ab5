"""An app with nothing but live charts, for the tests of the chart and of the live route."""

import streamlit as st

from dashboard.live import lifespan, routes

app = st.App("live_page.py", routes=routes(), lifespan=lifespan)
