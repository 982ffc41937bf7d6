"""The figures of the overview."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ui import formatting, palette, reasons
from ui.charts import layout
from ui.queries import RETAINED

MAX_OUTCOMES: Final = 9
GAP: Final = 0.2
"""Between hit rate and tokens, of the height: room for the legend of the tokens."""


def tokens_over_time(
    times: Sequence[datetime], prompt: Sequence[int], cached: Sequence[int]
) -> go.Figure:
    """Hit rate above, the prompt tokens it is made of below, by time bucket.

    Args:
        times: start of each bucket.
        prompt: prompt tokens of each bucket.
        cached: those of them that were reused.
    """
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.52, 0.48],
        vertical_spacing=GAP,
    )
    rate = [c / p if p else None for c, p in zip(cached, prompt, strict=True)]
    figure.add_scatter(
        x=times,
        y=rate,
        row=1,
        col=1,
        # A single point makes no line.
        mode="lines" if len(rate) - rate.count(None) > 1 else "markers",
        connectgaps=True,
        name="hit rate",
        line={"color": palette.REUSED, "width": 2.2},
        fill="tozeroy",
        fillcolor="rgba(43,127,196,0.12)",
        hovertemplate="hit rate %{y:.1%}<extra></extra>",
        showlegend=False,
    )
    computed = [p - c for c, p in zip(cached, prompt, strict=True)]
    for name, values, colour in (
        ("reused", cached, palette.REUSED),
        ("prefilled", computed, palette.PREFILLED),
    ):
        figure.add_bar(
            x=times,
            y=values,
            row=2,
            col=1,
            name=name,
            marker={
                "color": colour,
                "pattern": {
                    "shape": palette.SEGMENT_PATTERNS[name],
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.5)",
                    "size": 5,
                    "solidity": 0.3,
                },
                "line": {"width": 0},
            },
            hovertemplate=f"{name} %{{y:,d}} tokens<extra></extra>",
        )
    figure.update_yaxes(
        row=1, col=1, range=[0, 1.02], tickformat=".0%", nticks=5, title="hit rate"
    )
    figure.update_yaxes(row=2, col=1, nticks=4, title="prompt tokens", tickformat="~s")
    figure.update_xaxes(showgrid=False)
    bars_end = figure.layout.yaxis2.domain[1]
    return layout.plain(
        figure,
        370,
        barmode="stack",
        bargap=0.12,
        hovermode="x unified",
        legend={"y": bars_end + GAP / 10, "traceorder": "normal"},
    )


def outcomes(counted: Sequence[tuple[str | None, int]]) -> go.Figure:
    """Ended requests by what they left: retained, or the reason why not.

    Args:
        counted: ``(outcome, requests)``, the most frequent first.
    """
    shown = list(counted[:MAX_OUTCOMES])
    if rest := sum(number for _, number in counted[MAX_OUTCOMES:]):
        shown.append(("other", rest))
    total = sum(number for _, number in counted) or 1
    names = [_outcome_name(outcome) for outcome, _ in shown]
    figure = go.Figure(
        go.Bar(
            x=[number for _, number in shown],
            y=names,
            orientation="h",
            width=0.62,
            marker={
                "color": [
                    palette.REUSED if outcome == RETAINED else palette.QUIET
                    for outcome, _ in shown
                ],
                "pattern": {
                    "shape": ["" if o == RETAINED else "/" for o, _ in shown],
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.4)",
                    "size": 6,
                    "solidity": 0.25,
                },
                "line": {"width": 0},
            },
            text=[f"{n:,} · {formatting.percent(n, total)}" for _, n in shown],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:,d} requests<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    most = max((number for _, number in shown), default=1)
    figure.update_xaxes(range=[0, most * 1.34], showticklabels=False, showgrid=False)
    return layout.plain(figure, 60 + 27 * len(shown), bargap=0.3)


def _outcome_name(outcome: str | None) -> str:
    if outcome == RETAINED:
        return "retained"
    if outcome == "other":
        return "other reasons"
    if outcome is None:
        return "not reported"
    return formatting.plotly(reasons.no_checkpoint(outcome).short)


def reuse_depths(counts: Sequence[int], edges: Sequence[int]) -> go.Figure:
    """How many requests reused how much of their prompt.

    Args:
        counts: requests of each bin.
        edges: lower edge of each bin, in tokens.
    """
    names = [_bin_name(edges, index) for index in range(len(edges))]
    figure = go.Figure(
        go.Bar(
            x=names,
            y=list(counts),
            marker={
                "color": [palette.PREFILLED] + [palette.REUSED] * (len(edges) - 1),
                "pattern": {
                    "shape": ["/"] + [""] * (len(edges) - 1),
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.5)",
                    "size": 6,
                    "solidity": 0.3,
                },
                "line": {"width": 0},
            },
            hovertemplate="%{x} tokens: %{y:,d} requests<extra></extra>",
        )
    )
    figure.update_yaxes(nticks=5, title="requests", tickformat=",d")
    figure.update_xaxes(showgrid=False, title="tokens reused", tickangle=0)
    return layout.plain(figure, 300, bargap=0.18)


def _bin_name(edges: Sequence[int], index: int) -> str:
    if edges[index] == 0:
        return "none"
    if index == len(edges) - 1:
        return f"≥{_k(edges[index])}"
    return f"<{_k(edges[index + 1])}"


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def pinned_blocks(times: Sequence[datetime], blocks: Sequence[int]) -> go.Figure:
    """KV-cache blocks that pins held, at the end of each time bucket."""
    figure = go.Figure(
        go.Scatter(
            x=list(times),
            y=list(blocks),
            mode="lines",
            line={
                "color": palette.STAGES["promoted"].colour,
                "width": 2,
                "shape": "hv",
            },
            fill="tozeroy",
            fillcolor="rgba(18,138,108,0.14)",
            hovertemplate="%{y:,d} blocks<extra></extra>",
        )
    )
    figure.update_yaxes(rangemode="tozero", nticks=5, title="blocks", tickformat=",d")
    figure.update_xaxes(showgrid=False)
    return layout.plain(figure, 300, hovermode="x unified")
