"""Elements that Streamlit does not have: text reaches them as data, never as HTML."""
