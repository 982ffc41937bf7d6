"""What the query commands share: their options, and how they read and print."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from event_consumer.records import (
    DISCARDED,
    ENGINE_LOST,
    EVICTED,
    FINISHED,
    GONE,
    OPEN,
    PINNED,
    PROMOTED,
    PUBLISHED,
)
from event_consumer.settings import ENV_PREFIX, SettingsError

STATUSES: Final = (OPEN, FINISHED, ENGINE_LOST)
STAGES: Final = (PINNED, PROMOTED, PUBLISHED, DISCARDED, EVICTED, GONE)
UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

MAX_SHOWN: Final = 120
"""Characters of a name in a table; ``--json`` has all of them."""
MAX_WHOLE: Final = 2**63 - 1
"""The largest number that a store holds."""


def whole(help: str) -> Any:
    """An option that is a count."""
    return typer.Option(min=0, callback=_refuse_too_large, help=help)


def _refuse_too_large(value: int | None) -> int | None:
    """As ``max`` would, but ``--help`` does not show such a number."""
    if value is not None and value > MAX_WHOLE:
        raise typer.BadParameter(f"{value} is more than a store holds, {MAX_WHOLE}.")
    return value


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar=f"{ENV_PREFIX}STORE",
        help="sqlite:///PATH or postgresql://USER@HOST/DATABASE.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One line of JSON, the last of stdout.")
]
LimitOption = Annotated[
    int, typer.Option(min=1, max=10_000, help="At most so many, latest first.")
]

SessionOption = Annotated[str | None, typer.Option(help="Session or conversation id.")]
EngineOption = Annotated[str | None, typer.Option(help="Engine id.")]
LabelOption = Annotated[str | None, typer.Option(help="Label of the engine.")]
MaxHitsOption = Annotated[
    int | None, whole("Has a checkpoint that was hit at most so often.")
]
MinDepthOption = Annotated[int | None, whole("Reused at least so many tokens.")]
MaxDepthOption = Annotated[int | None, whole("Reused at most so many tokens.")]
MinPrefilledOption = Annotated[
    int | None, whole("Prefilled at least so many prompt tokens.")
]
MinRecomputedOption = Annotated[
    int | None, whole("Prefilled at least so many tokens that attention had cached.")
]
IncompleteOption = Annotated[
    bool | None, typer.Option(help="Whether events of it may be missing.")
]
SinceOption = Annotated[
    str | None, typer.Option(help="90s, 15m, 2h, 7d, or an ISO 8601 time.")
]


def one_of(option: str, value: str | None, known: Sequence[str]) -> str | None:
    """``value``, if it is one of ``known`` or was not given.

    Raises:
        SettingsError: it is none of them; the nearest is suggested.
    """
    if value is None or value in known:
        return value
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(known)}."
    raise SettingsError(f"{option} {value!r} is not known: {hint}")


def parse_time(option: str, value: str | None) -> int | None:
    """Nanoseconds since the epoch; an age (``15m``) counts back from now, a time
    without a zone is UTC.

    Raises:
        SettingsError: it is neither, or out of range.
    """
    if value is None:
        return None
    time_ns = _time_ns(value)
    if time_ns is None:
        raise SettingsError(
            f"{option} {value!r} is no age and no time: write 90s, 15m, 2h, 7d or "
            "2026-01-31T12:00:00Z."
        )
    if not 0 <= time_ns <= MAX_WHOLE:
        raise SettingsError(f"{option} {value!r} is not between 1970 and 2262.")
    return time_ns


def _time_ns(value: str) -> int | None:
    age = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([smhd])", value)
    if age:
        return time.time_ns() - int(float(age[1]) * UNITS_S[age[2]] * 1e9)
    with suppress(ValueError):
        at = datetime.fromisoformat(value)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return int((at - datetime.fromtimestamp(0, UTC)).total_seconds() * 1e9)
    return None


def print_json(value: dict[str, Any]) -> None:
    """One line, the last of stdout."""
    print(json.dumps(value, separators=(", ", ": ")))


def printable(text: str) -> str:
    """A terminal must not obey what comes from clients and engines."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain(name: str) -> str:
    """A name, printable; one that is blank is seen, and a long one is shortened."""
    shown = printable(name)
    if len(shown) > MAX_SHOWN:
        half = MAX_SHOWN // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return shown if shown.strip() else repr(shown)
