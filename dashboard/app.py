"""The dashboard as an ASGI app: the pages in ``ui.py``, and the live routes beside them.

Run it with ``streamlit run dashboard/app.py``.
"""

import streamlit as st

from dashboard.live import lifespan, routes

app = st.App("ui.py", routes=routes(), lifespan=lifespan)
