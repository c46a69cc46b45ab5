"""Runs page: every run of the store, newest first, live."""

from __future__ import annotations

import streamlit as st

from dashboard.components import panels

st.html('<div class="page-title"><h1>Runs</h1></div>')
panels.run_list()
panels.connection()
