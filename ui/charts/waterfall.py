"""The turn waterfall: a conversation turn by turn, and what each carried over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go

from ui import formatting, palette
from ui.charts import layout
from ui.charts.token_axis import segments

MAX_TURNS: Final = 40
_PARTS: Final = (
    ("reused", palette.REUSED),
    ("prefilled", palette.PREFILLED),
    ("decoded", palette.DECODED),
)


def waterfall(turns: Sequence[dict[str, Any]], first_turn: int = 0) -> go.Figure:
    """One bar a turn: reused | prefilled | decoded; a diamond where it left a state.

    A dotted line leads from a state to the turn that resumed from it.

    Args:
        turns: rows of ``requests`` in the order of arrival, at most
            :data:`MAX_TURNS`.
        first_turn: the number of the first of them.
    """
    figure = go.Figure()
    lanes = [f"turn {first_turn + index}" for index in range(len(turns))]
    parts = [
        {name: (start, end) for name, start, end in segments(turn)} for turn in turns
    ]
    for name, colour in _PARTS:
        spans = [part.get(name, (0, 0)) for part in parts]
        figure.add_bar(
            y=lanes,
            x=[end - start for start, end in spans],
            base=[start for start, _ in spans],
            orientation="h",
            width=0.56,
            name=name,
            marker={
                "color": colour,
                "pattern": {
                    "shape": palette.SEGMENT_PATTERNS[name],
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.5)",
                    "size": 6,
                    "solidity": 0.3,
                },
                "line": {"width": 0},
            },
            customdata=[[start, end] for start, end in spans],
            hovertemplate=f"<b>%{{y}}</b> {name} %{{x:,d}} tokens"
            "<br>[%{customdata[0]:,d}, %{customdata[1]:,d})<extra></extra>",
        )
    _add_links(figure, turns, lanes)
    left = [
        (turn["retained_boundary"], lane, turn)
        for turn, lane in zip(turns, lanes, strict=True)
        if turn["retained_boundary"] is not None
    ]
    if left:
        mark = palette.stage("published")
        figure.add_scatter(
            x=[boundary for boundary, _, _ in left],
            y=[lane for _, lane, _ in left],
            mode="markers",
            name="left for the next turn",
            marker={
                "symbol": mark.symbol,
                "size": 12,
                "color": mark.colour,
                "line": {"width": 1.5, "color": "white"},
            },
            hovertemplate="<b>%{y}</b> left a state at token %{x:,d}<extra></extra>",
            cliponaxis=False,
        )
    figure.update_yaxes(
        categoryorder="array", categoryarray=lanes, autorange="reversed", showgrid=False
    )
    figure.update_xaxes(
        title={"text": "token position", "font": {"size": 12}},
        tickformat=",d",
        rangemode="tozero",
        nticks=8,
    )
    return layout.plain(
        figure, 120 + 38 * len(turns), barmode="overlay", hovermode="closest"
    )


def _add_links(
    figure: go.Figure, turns: Sequence[dict[str, Any]], lanes: Sequence[str]
) -> None:
    lane_of = {
        turn["request_id"]: lane for turn, lane in zip(turns, lanes, strict=True)
    }
    xs: list[int | None] = []
    ys: list[str | None] = []
    for turn, lane in zip(turns, lanes, strict=True):
        source = lane_of.get(turn["source_request_id"] or "")
        boundary = turn["source_boundary"]
        if source and source != lane and boundary is not None:
            xs += [boundary, boundary, None]
            ys += [source, lane, None]
    if xs:
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="lines",
            line={"color": palette.REUSED, "width": 1.6, "dash": "dot"},
            name="resumed",
            hoverinfo="skip",
        )


def alternative(turns: Sequence[dict[str, Any]]) -> str:
    """The figure in words, for a screen reader."""
    said = [
        f"turn {index}: {formatting.count(turn['num_cached_tokens'])} of "
        f"{formatting.count(turn['num_prompt_tokens'])} reused"
        for index, turn in enumerate(turns[:MAX_TURNS])
    ]
    return "Turn waterfall. " + "; ".join(said) + "."
