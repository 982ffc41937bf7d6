"""What the state of the streams means for whoever looks at the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ui import formatting

SILENT_AFTER_S: Final = 10.0
"""The consumer writes each stream every two seconds, with or without news."""


class StreamState(NamedTuple):
    """``code`` of a stream as judged, its mark's tone and shape, and a sentence."""

    code: str
    word: str
    tone: str
    shape: str
    sentence: str


def judge(stream: dict[str, Any], now_ns: int) -> StreamState:
    """What one row of ``Queries.streams`` says, at ``now_ns``."""
    state = stream["state"]
    engine_ended = stream.get("engine_status") in ("stopped", "lost")
    written_ns = stream["updated_ns"] or stream["last_batch_ns"]
    silence_ns = now_ns - written_ns if written_ns else None
    if state == "gapped":
        return StreamState(
            "gapped",
            "gapped",
            "bad",
            "cross",
            "Batches are missing and are being asked for again: the newest figures "
            "of this engine are not complete.",
        )
    if state == "disconnected":
        sentence = "Nothing is connected at this endpoint."
        if stream.get("engine_status") == "stopped":
            return StreamState(
                "stopped",
                "engine stopped",
                "quiet",
                "pause",
                "The engine shut down in order: nothing is missing.",
            )
        return StreamState("disconnected", "disconnected", "bad", "plus", sentence)
    if engine_ended:
        return StreamState(
            "stopped", "engine stopped", "quiet", "pause", "The engine has ended."
        )
    if silence_ns is not None and silence_ns > SILENT_AFTER_S * 1e9:
        return StreamState(
            "silent",
            "silent",
            "warning",
            "bar",
            f"Nobody has written about it for {formatting.duration(silence_ns)}: the "
            "event consumer is not running, and nothing here is current.",
        )
    if state == "replaying":
        return StreamState(
            "replaying",
            "replaying",
            "warning",
            "triangle",
            "Older batches are being read again: figures catch up in a moment.",
        )
    if stream["num_lost"] or stream["num_dropped"]:
        return StreamState(
            "lossy",
            "live, with loss",
            "warning",
            "triangle",
            "Live now; earlier batches or events are lost for good.",
        )
    return StreamState("live", "live", "good", "circle", "Live; nothing is missing.")


class Banner(NamedTuple):
    """``level`` is ``error`` or ``warning``; the text is Markdown, ids escaped."""

    level: str
    text: str


def banner(streams: Sequence[dict[str, Any]], now_ns: int) -> Banner | None:
    """One line that names every stream in trouble; None where there is none."""
    by_code: dict[str, list[str]] = {}
    for stream in streams:
        name = stream.get("label") or stream["endpoint"]
        code = judge(stream, now_ns).code
        by_code.setdefault(code, []).append(formatting.markdown(name))
    parts, level = [], "warning"
    for code, words in (
        ("gapped", "gapped, batches are being asked for again"),
        ("disconnected", "not connected"),
        ("silent", "silent, the consumer is not running"),
    ):
        if names := by_code.get(code):
            some = ", ".join(f"**{name}**" for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{some}{more}: {words}")
            if code != "silent":
                level = "error"
    if lost := _lost_words(streams):
        parts.append(f"{lost} lost for good, so counts are low")
    return Banner(level, " · ".join(parts)) if parts else None


def _lost_words(streams: Sequence[dict[str, Any]]) -> str:
    counts = (
        (sum(s["num_lost"] or 0 for s in streams), "batch", "batches"),
        (sum(s["num_dropped"] or 0 for s in streams), "event", "events"),
    )
    return " and ".join(
        f"{formatting.count(n)} {one if n == 1 else many}"
        for n, one, many in counts
        if n
    )
