"""The pages: scripts that ``ui.app`` runs; none is imported.

The folder is not called ``pages``: Streamlit serves a folder of that name by
itself, so that the first deep link after a start would miss the app around it.
"""
