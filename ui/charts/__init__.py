"""The figures (Plotly): each takes rows and returns a figure, and reads nothing."""
