"""A table of requests, checkpoints or conversations whose rows open, link and copy.

Streamlit's own data frame draws on a canvas: its rows have no link that stays in
the tab, its selection is a row *number* (which the next live row moves to another
request), and at 390 px it scrolls sideways. This table keeps rows by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import streamlit as st

from ui import formatting, palette

Cell = dict[str, Any]

_HERE: Final = Path(__file__).parent


def _variables() -> str:
    colours = {
        "reused": palette.REUSED,
        "prefilled": palette.PREFILLED,
        "decoded": palette.DECODED,
        "good": palette.GOOD,
        "warning": palette.WARNING,
        "bad": palette.BAD,
        "special": palette.SPECIAL,
        "promoted": palette.STAGES["promoted"].colour,
    }
    body = ";".join(f"--{name}:{colour}" for name, colour in colours.items())
    return f".records{{{body}}}\n"


_table = st.components.v2.component(
    "vllm_fork_record_table",
    html='<div class="records"></div>',
    css=_variables() + (_HERE / "record_table.css").read_text(),
    js=(_HERE / "record_table.js").read_text(),
)


class TableColumn(NamedTuple):
    """``help`` says what the column counts; ``align`` is ``right`` or ``lead``."""

    label: str
    help: str = ""
    align: str = ""


class Link(NamedTuple):
    """A link to a page of the dashboard, or out of it (``external``)."""

    text: str
    href: str
    external: bool = False

    def as_data(self, *, mono: bool = False) -> Cell:
        """The link as the table reads it."""
        return {
            "text": formatting.visible(self.text),
            "href": self.href,
            "external": self.external,
            "mono": mono,
        }


class Detail(NamedTuple):
    """What an opened row says: (label, text, is an id) items, and links."""

    items: Sequence[tuple[str, str, bool]]
    links: Sequence[Link] = ()


class TableRow(NamedTuple):
    """``key`` is what the row is; ``stamp`` changes when it is worth a highlight.

    ``name`` is what a screen reader calls it; ``strong`` sets a sum apart.
    """

    key: str
    cells: Sequence[Cell]
    name: str = ""
    stamp: int | None = None
    strong: bool = False
    detail: Detail | None = None


def text(
    value: str, *, quiet: bool = False, mono: bool = False, help: str = ""
) -> Cell:
    """A cell of plain text."""
    shown = formatting.visible(value)
    return {"kind": "text", "text": shown, "quiet": quiet, "mono": mono, "help": help}


def number(value: int | float | None, *, help: str = "") -> Cell:
    """A count, with thousands separated; a dash where it is not known."""
    return {"kind": "number", "text": formatting.count(value), "help": help}


def number_text(shown: str) -> Cell:
    """A cell of figures that are put together already."""
    return {"kind": "number", "text": shown}


def two_lines(first: str, second: str | None) -> Cell:
    """A text with something smaller under it."""
    return {
        "kind": "lines",
        "text": formatting.visible(first),
        "sub": formatting.visible(second or ""),
    }


def identifier(link: Link, copy: str, sub: Link | str | None = None) -> Cell:
    """An id that links and copies, with something smaller under it."""
    cell: Cell = {"kind": "id", "link": link.as_data(mono=True), "copy": copy}
    if isinstance(sub, Link):
        cell["sub"] = sub.as_data()
    elif sub:
        cell["sub"] = {"text": formatting.visible(sub)}
    return cell


def when(at_ns: int | None) -> Cell:
    """How long ago, counted on by the browser."""
    if at_ns is None:
        return text("—", quiet=True)
    return {"kind": "when", "ms": at_ns // 1_000_000}


def tag(shown: str, mark: str, tone: str, *, note: str = "", help: str = "") -> Cell:
    """A word with a shape: ``tone`` is good, warning, bad, special or quiet."""
    return {
        "kind": "tag",
        "text": formatting.visible(shown),
        "shape": mark,
        "tone": tone,
        "note": note,
        "help": help,
    }


def share(parts: Sequence[tuple[str, int]], shown: str, label: str) -> Cell:
    """A bar of ``(segment, tokens)`` parts with ``shown`` under it."""
    return {"kind": "share", "parts": list(parts), "text": shown, "label": label}


def record_table(
    columns: Sequence[TableColumn],
    rows: Sequence[TableRow],
    *,
    key: str,
    caption: str,
) -> None:
    """Show the table.

    Args:
        key: stays the same over refreshes, so that the table does.
        caption: what the table holds, for a screen reader.
    """
    data = {
        "caption": caption,
        "columns": [column._asdict() for column in columns],
        "rows": [
            {
                "key": row.key,
                "name": formatting.visible(row.name),
                "stamp": row.stamp,
                "strong": row.strong,
                "cells": list(row.cells),
                "detail": _detail(row.detail),
            }
            for row in rows
        ],
    }
    _table(key=key, data=data)


def _detail(detail: Detail | None) -> dict[str, Any] | None:
    if detail is None:
        return None
    return {
        "items": [
            {
                "label": label,
                "text": formatting.visible(value),
                "copy": value if is_id else "",
                "mono": is_id,
            }
            for label, value, is_id in detail.items
        ],
        "links": [link.as_data() for link in detail.links],
    }
