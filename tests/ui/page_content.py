"""What a page run by ``AppTest`` shows: its texts, and the rows of its tables."""

from __future__ import annotations

import json
from typing import Any

from streamlit.testing.v1 import AppTest


def tables(at: AppTest) -> dict[str, dict[str, Any]]:
    """The data of each record table on the page, by caption."""
    found: dict[str, dict[str, Any]] = {}
    for element in at.get("bidi_component"):
        data = json.loads(element.proto.json)
        found[data["caption"]] = data
    return found


def table(at: AppTest, caption: str) -> list[dict[str, Any]]:
    """The rows of the table whose caption begins with ``caption``."""
    for name, data in tables(at).items():
        if name.startswith(caption):
            return data["rows"]
    raise AssertionError(f"no table {caption!r} among {list(tables(at))}")


def texts(at: AppTest) -> str:
    """Every text on the page that is not in a table."""
    kinds = (
        at.title,
        at.subheader,
        at.markdown,
        at.caption,
        at.text,
        at.code,
        at.error,
        at.warning,
        at.info,
    )
    return "\n".join(str(element.value) for kind in kinds for element in kind)


def figures(at: AppTest) -> dict[str, str]:
    """The metrics of the page, by label."""
    return {metric.label: metric.value for metric in at.metric}
