"""The look that all figures share: no frame, few lines, the page's own fonts."""

from __future__ import annotations

from typing import Any, Final

import plotly.graph_objects as go

CONFIG: Final[dict[str, Any]] = {
    "displaylogo": False,
    "displayModeBar": False,
    "responsive": True,
}
"""Options of ``st.plotly_chart``: the page's own download is the data."""

GRID: Final = "rgba(128,140,152,0.22)"
FAINT: Final = "rgba(128,140,152,0.75)"


def plain(figure: go.Figure, height: int, **more: Any) -> go.Figure:
    """Give ``figure`` the shared look at ``height`` pixels; ``more`` goes to layout."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"align": "left", "namelength": -1},
        legend={
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "xanchor": "left",
            "title": None,
        },
        dragmode=False,
    )
    figure.update_xaxes(
        gridcolor=GRID, zeroline=False, fixedrange=True, automargin=True
    )
    figure.update_yaxes(
        gridcolor=GRID, zeroline=False, fixedrange=True, automargin=True
    )
    figure.update_layout(**more)
    return figure
