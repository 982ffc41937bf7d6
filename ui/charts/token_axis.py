"""The token axis: a request from its first prompt token to its last output token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go

from ui import formatting, palette, reasons
from ui.charts import layout

_SEGMENTS: Final = (
    ("reused", palette.REUSED, "taken from the prefix cache"),
    ("prefilled", palette.PREFILLED, "prompt tokens computed"),
    ("decoded", palette.DECODED, "tokens generated"),
)


def segments(request: dict[str, Any]) -> list[tuple[str, int, int]]:
    """``(name, start, end)`` of each part of the axis: half-open, in tokens."""
    prompt = request["num_prompt_tokens"] or 0
    cached = min(request["num_cached_tokens"] or 0, prompt)
    end = prompt + (request["num_output_tokens"] or 0)
    parts = [
        ("reused", 0, cached),
        ("prefilled", cached, prompt),
        ("decoded", prompt, end),
    ]
    return [part for part in parts if part[2] > part[1]]


def token_axis(
    request: dict[str, Any], checkpoints: Sequence[dict[str, Any]]
) -> go.Figure:
    """Reused | prefilled | decoded, and every boundary marked by its stage.

    Args:
        request: a row of ``requests``.
        checkpoints: its rows of ``checkpoints``.
    """
    figure = go.Figure()
    meanings = {name: (colour, words) for name, colour, words in _SEGMENTS}
    for name, start, end in segments(request):
        colour, words = meanings[name]
        figure.add_bar(
            y=[0],
            x=[end - start],
            base=[start],
            orientation="h",
            name=name,
            width=0.5,
            marker={
                "color": colour,
                "pattern": {
                    "shape": palette.SEGMENT_PATTERNS[name],
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.55)",
                    "size": 7,
                    "solidity": 0.35,
                },
                "line": {"width": 0},
            },
            hovertemplate=f"<b>{name}</b>: {words}<br>[{start:,}, {end:,}) · "
            f"{end - start:,} tokens<extra></extra>",
        )
    last = max((end for _, _, end in segments(request)), default=1)
    for stage_name in palette.STAGES:
        marked = [c for c in checkpoints if c["stage"] == stage_name]
        if marked:
            figure.add_trace(_boundaries(stage_name, marked))
    for checkpoint in checkpoints:
        figure.add_shape(
            type="line",
            x0=checkpoint["boundary"],
            x1=checkpoint["boundary"],
            y0=-0.25,
            y1=0.42,
            line={"width": 1, "color": layout.FAINT, "dash": "dot"},
        )
    figure.update_yaxes(visible=False, range=[-0.32, 0.62])
    figure.update_xaxes(
        range=[-last * 0.012, last * 1.012],
        title={"text": "token position", "font": {"size": 12}},
        tickformat=",d",
        showgrid=False,
        ticks="outside",
        tickcolor=layout.GRID,
        nticks=8,
    )
    return layout.plain(figure, 190, barmode="overlay", hovermode="closest")


def _boundaries(stage_name: str, marked: Sequence[dict[str, Any]]) -> go.Scatter:
    mark = palette.stage(stage_name)
    return go.Scatter(
        x=[c["boundary"] for c in marked],
        y=[0.46] * len(marked),
        mode="markers",
        name=stage_name,
        marker={
            "symbol": mark.symbol,
            "size": 12,
            "color": mark.colour,
            "line": {"width": 2 if "open" in mark.symbol else 0, "color": mark.colour},
        },
        text=[_what(c) for c in marked],
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
    )


def _what(checkpoint: dict[str, Any]) -> str:
    stage_name = checkpoint["stage"]
    lines = [
        f"<b>{formatting.plotly(stage_name)}</b> at token {checkpoint['boundary']:,}",
        formatting.plotly(reasons.kind(checkpoint["boundary_kind"]).short),
    ]
    if checkpoint["discard_reason"]:
        reason = reasons.no_checkpoint(checkpoint["discard_reason"])
        lines.append(f"why: {formatting.plotly(reason.short)}")
    if checkpoint["eviction_reason"]:
        reason = reasons.eviction(checkpoint["eviction_reason"])
        lines.append(f"evicted: {formatting.plotly(reason.short)}")
    if checkpoint["num_hits"]:
        lines.append(f"reused {checkpoint['num_hits']:,} times")
    return "<br>".join(lines)


def alternative(request: dict[str, Any], checkpoints: Sequence[dict[str, Any]]) -> str:
    """The figure in a sentence, for a screen reader."""
    parts = [f"{end - start:,} tokens {name}" for name, start, end in segments(request)]
    marks = [f"{c['stage']} at {c['boundary']:,}" for c in checkpoints[:20]]
    said = f"Token axis: {', '.join(parts) or 'no tokens yet'}."
    return f"{said} Boundaries: {', '.join(marks)}." if marks else said
