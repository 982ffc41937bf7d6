"""Rows as files: CSV that no spreadsheet runs, and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows with a header line; empty where there are none.

    A text that a spreadsheet would take for a formula gets a ``'`` in front.
    """
    if not rows:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({k: _no_formula(v) for k, v in row.items()} for row in rows)
    return out.getvalue()


def _no_formula(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a JSON list."""
    return json.dumps(list(rows), ensure_ascii=False)
