"""Colours and shapes: each meaning has one of both, on every page.

The colours are told apart by the common kinds of colour blindness (they follow
Okabe and Ito) and reach a contrast of 3:1 on the light and on the dark ground.
Nothing is said by colour alone: segments are hatched, stages have shapes.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mark(NamedTuple):
    """``shape`` as the table draws it, ``symbol`` as Plotly names it."""

    colour: str
    shape: str
    symbol: str


REUSED: Final = "#2b7fc4"
PREFILLED: Final = "#d1791b"
DECODED: Final = "#7d8794"

GOOD: Final = REUSED
WARNING: Final = "#d1791b"
BAD: Final = "#cf4a2f"
QUIET: Final = "#7d8794"
SPECIAL: Final = "#a363bd"

STAGES: Final[dict[str, Mark]] = {
    "pinned": Mark(QUIET, "circle-open", "circle-open"),
    "promoted": Mark("#128a6c", "triangle", "triangle-up"),
    "published": Mark(GOOD, "diamond", "diamond"),
    "discarded": Mark(BAD, "cross", "x"),
    "evicted": Mark(SPECIAL, "diamond-open", "diamond-open"),
    "gone": Mark(BAD, "plus", "cross"),
}
UNKNOWN_STAGE: Final = Mark(QUIET, "circle-open", "circle-open")

SEGMENT_PATTERNS: Final = {"reused": "", "prefilled": "/", "decoded": "."}
"""Plotly's hatching of each segment of the token axis."""

ARMS: Final = (QUIET, REUSED)
"""The two sides of a comparison: the baseline, then what is compared with it."""


def stage(code: str) -> Mark:
    """The mark of a checkpoint's stage."""
    return STAGES.get(code, UNKNOWN_STAGE)
