"""The dashboard's entry point: ``streamlit run ui/app.py -- --store URL``.

Reads the event consumer's store and nothing else. Settings: ``ui.settings``.
"""

from __future__ import annotations

import streamlit as st

from ui import shell

st.set_page_config(
    page_title="vllm-fork",
    page_icon=str(shell.HERE / "icon.svg"),
    layout="wide",
    menu_items={"About": "What each request reused, and what it left for the next."},
)
st.html(shell.HERE / "app.css")
st.logo(shell.LOGO, size="medium")
st.navigation(list(shell.pages().values()), position="top").run()
