"""The stage timeline: when a request ran and when its checkpoints changed stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from ui import formatting, palette
from ui.charts import layout

MAX_LANES: Final = 12
_STAGES: Final = (
    ("pinned", "pinned_ns"),
    ("promoted", "promoted_ns"),
    ("published", "published_ns"),
    ("discarded", "discarded_ns"),
    ("evicted", "evicted_ns"),
)


def stage_times(checkpoint: dict[str, Any]) -> list[tuple[str, int]]:
    """``(stage, time in ns)`` of every stage that the checkpoint reached, in order."""
    reached = [(name, checkpoint[column]) for name, column in _STAGES]
    times = [(name, at) for name, at in reached if at is not None]
    if checkpoint["stage"] == "gone":
        times.append(("gone", checkpoint["last_event_ns"]))
    return times


def stage_timeline(
    request: dict[str, Any],
    checkpoints: Sequence[dict[str, Any]],
    now_ns: int,
    local_time: Callable[[int], str],
) -> go.Figure:
    """One lane for the request and one a checkpoint, seconds from arrival.

    An eviction long after the finish is drawn at the right edge with its time in
    the hover text, so that it does not squeeze the rest.

    Args:
        checkpoints: at most :data:`MAX_LANES` are drawn, the deepest.
        now_ns: where the bar of a running request ends.
        local_time: a time in words.
    """
    drawn = list(checkpoints)[:MAX_LANES]
    start = request["arrival_ns"] or request["admitted_ns"] or request["last_event_ns"]
    admitted = request["admitted_ns"] or start
    end = request["finished_ns"] or (
        now_ns if request["status"] == "open" else request["last_event_ns"]
    )
    span = max(end - start, 1_000_000)
    latest = start + span * 1.04
    figure = go.Figure()

    def seconds(ns: float) -> float:
        return (min(ns, latest) - start) / 1e9

    def bar(lane: str, begin: int, finish: int, name: str, colour: str, pattern: str):
        figure.add_bar(
            y=[lane],
            x=[max(seconds(finish) - seconds(begin), span / 1e9 / 400)],
            base=[seconds(begin)],
            orientation="h",
            width=0.42,
            name=name,
            marker={
                "color": colour,
                "pattern": {
                    "shape": pattern,
                    "fillmode": "overlay",
                    "size": 6,
                    "solidity": 0.3,
                    "fgcolor": "rgba(255,255,255,0.5)",
                },
                "line": {"width": 0},
            },
            showlegend=name in ("waiting", "running"),
            hovertemplate=f"<b>{name}</b> {formatting.duration(finish - begin)}"
            f"<br>{local_time(begin)} — {local_time(finish)}<extra></extra>",
        )

    if admitted > start:
        bar("request", start, admitted, "waiting", palette.DECODED, "/")
    if request["admitted_ns"]:
        bar("request", admitted, end, "running", palette.REUSED, "")
    points: dict[str, list[tuple[float, str, str]]] = {}
    for checkpoint in drawn:
        lane = _lane(checkpoint)
        times = stage_times(checkpoint)
        if not times:
            continue
        held = [at for name, at in times if name != "evicted"]
        figure.add_scatter(
            x=[seconds(held[0]), seconds(held[-1])],
            y=[lane, lane],
            mode="lines",
            line={"width": 3, "color": layout.FAINT},
            hoverinfo="skip",
            showlegend=False,
        )
        for name, at in times:
            text = (
                f"<b>{name}</b> {local_time(at)}<br>"
                f"{formatting.duration(at - start)} after arrival"
            )
            points.setdefault(name, []).append((seconds(at), lane, text))
    for name, marked in points.items():
        mark = palette.stage(name)
        figure.add_scatter(
            x=[x for x, _, _ in marked],
            y=[lane for _, lane, _ in marked],
            mode="markers",
            name=name,
            text=[text for _, _, text in marked],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
            marker={
                "symbol": mark.symbol,
                "size": 11,
                "color": mark.colour,
                "line": {
                    "width": 2 if "open" in mark.symbol else 0,
                    "color": mark.colour,
                },
            },
        )
    lanes = ["request", *(_lane(c) for c in drawn)]
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=lanes[::-1],
        showgrid=False,
        tickfont={"size": 12},
    )
    figure.update_xaxes(
        title={"text": "seconds from arrival", "font": {"size": 12}},
        range=[-span / 1e9 * 0.015, span / 1e9 * 1.055],
        nticks=8,
    )
    height = 110 + 30 * len(lanes)
    return layout.plain(figure, height, barmode="overlay", hovermode="closest")


def _lane(checkpoint: dict[str, Any]) -> str:
    return f"{checkpoint['boundary']:,} · #{checkpoint['checkpoint_id']}"
