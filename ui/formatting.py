"""Numbers, durations and ids as the pages show them."""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Final

MAX_SHOWN_CHARS: Final = 300

_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&@/^=\"'])")
_BIDI: Final = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
)


def visible(text: str) -> str:
    """``text`` with what would hide or reorder it made visible, and not too long.

    Control characters, line breaks, and characters that turn the direction of
    text become ``\\u…`` escapes. Not an escape for HTML or Markdown: see
    :func:`markdown` and :func:`plotly`.
    """
    shown = "".join(
        f"\\u{ord(c):04x}"
        if c in _BIDI or unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")
        else c
        for c in text[: MAX_SHOWN_CHARS + 1]
    )
    return shown[:MAX_SHOWN_CHARS] + "…" if len(text) > MAX_SHOWN_CHARS else shown


def markdown(text: str) -> str:
    """``text`` so that Streamlit's Markdown shows it as it is."""
    return _MARKDOWN.sub(r"\\\1", visible(text))


def plotly(text: str) -> str:
    """``text`` so that Plotly, which reads a little HTML, shows it as it is."""
    return html.escape(visible(text))


def count(value: int | float | None) -> str:
    """``12,345``, or a dash where it is not known."""
    if value is None:
        return "—"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def compact(value: float | None) -> str:
    """A large count in few characters: ``950``, ``12.4k``, ``3.1M``."""
    if value is None:
        return "—"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:,.0f}"


def percent(part: float | None, whole: float | None) -> str:
    """``87.2%``; a dash where there is no whole."""
    if not whole or part is None:
        return "—"
    return f"{part / whole:.1%}"


def duration(ns: int | float | None) -> str:
    """``850 µs``, ``12.3 ms``, ``4.21 s``, ``3 min 20 s``, ``2 h 5 min``, …"""
    if ns is None:
        return "—"
    sign, s = ("-", -ns / 1e9) if ns < 0 else ("", ns / 1e9)
    if s < 1e-3:
        return f"{sign}{s * 1e6:.0f} µs"
    if s < 1:
        return f"{sign}{s * 1e3:.1f} ms"
    if s < 100:
        return f"{sign}{s:.2f} s"
    if s < 6000:
        return f"{sign}{int(s // 60)} min {int(s % 60)} s"
    if s < 48 * 3600:
        return f"{sign}{int(s // 3600)} h {int(s % 3600 // 60)} min"
    return f"{sign}{int(s // 86400)} d {int(s % 86400 // 3600)} h"
