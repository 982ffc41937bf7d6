"""The figure of the comparison: two arms, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from ui import formatting, palette
from ui.charts import layout
from ui.comparison import TurnPair

MAX_NAME: Final = 48
"""Characters of an arm's name in the legend: two stand beside each other."""


def computed_by_turn(pairs: Sequence[TurnPair], name_a: str, name_b: str) -> go.Figure:
    """Prompt tokens computed in each turn: what reuse saves, arm beside arm."""
    figure = go.Figure()
    turns = [f"turn {pair.turn}" for pair in pairs]
    for name, rows, colour, pattern in (
        (name_a, [pair.a for pair in pairs], palette.ARMS[0], "/"),
        (name_b, [pair.b for pair in pairs], palette.ARMS[1], ""),
    ):
        shares = [
            formatting.percent(row["cached"], row["prompt"]) if row else ""
            for row in rows
        ]
        figure.add_bar(
            x=turns,
            y=[row["prompt"] - row["cached"] if row else None for row in rows],
            name=formatting.plotly(_short(name)),
            text=shares,
            textposition="outside",
            cliponaxis=False,
            marker={
                "color": colour,
                "pattern": {
                    "shape": pattern,
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.5)",
                    "size": 6,
                    "solidity": 0.3,
                },
                "line": {"width": 0},
            },
            hovertemplate="%{y:,d} prompt tokens computed, %{text} reused"
            f"<extra>{formatting.plotly(name)}</extra>",
        )
    figure.update_yaxes(title="prompt tokens computed", tickformat=",d", nticks=6)
    figure.update_xaxes(showgrid=False)
    return layout.plain(
        figure, 330, barmode="group", bargap=0.28, hovermode="x unified"
    )


def _short(name: str) -> str:
    """The ends of a long name: labels often differ in one of them."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[:half]}…{name[-half:]}"
