"""Makes what a publisher sent fit for every store, as it is decoded.

A PostgreSQL text holds no NUL, and its columns have a width. Clients choose some of
the names, and any publisher may speak on an endpoint: what no store takes is replaced
or shortened here, so that all stores hold the same text and none refuses a commit.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import msgspec
from sqlalchemy import Table

from event_consumer import tables
from vllm_fork.events import (
    AnyEvent,
    CheckpointEvicted,
    EngineStarted,
    EventBatch,
    RequestEvent,
    RequestFinished,
)

MAX_NAME: Final = 512
"""Characters of a name that a client or an operator chooses."""

_DIGEST_BYTES: Final = 8
_REPEATED: Final = ("external_request_id", "session_id", "traceparent", "tracestate")


def storable(text: str, limit: int = sys.maxsize) -> str:
    """``text`` as every store takes it, in at most ``limit`` characters. Two names that
    differ stay different: what is cut off leaves its digest. A word of a narrow column
    has no room for one."""
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(text) <= limit:
        return text
    digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    if limit <= 2 * len(digest):
        return f"{text[: limit - 1]}…"
    return f"{text[: limit - len(digest) - 1]}…{digest}"


def make_storable(batch: EventBatch, events: Iterable[AnyEvent]) -> None:
    """Change what no store takes in the header of ``batch`` and in ``events``, but for
    what :func:`make_names_storable` is for."""
    batch.engine_id = storable(batch.engine_id, MAX_ENGINE_ID)
    batch.label = storable(batch.label, MAX_NAME)
    batch.model_name = storable(batch.model_name, MAX_NAME)
    for event in events:
        for name, limit in _TEXTS[type(event)]:
            text = getattr(event, name)
            if text is not None and ("\0" in text or len(text) > limit):
                setattr(event, name, storable(text, limit))
        if type(event) is EngineStarted:
            event.publish_on = [storable(end, MAX_NAME) for end in event.publish_on]
        elif type(event) is RequestFinished:
            if isinstance(event.stop_reason, str):
                event.stop_reason = storable(event.stop_reason)
        elif type(event) is CheckpointEvicted and not math.isfinite(event.age_s):
            event.age_s = 0.0


def make_names_storable(event: RequestEvent) -> None:
    """Change what no store takes in the names that a request's events repeat: they are
    read of the first one only."""
    for name, limit in _NAMES:
        text = getattr(event, name)
        if text is not None and ("\0" in text or len(text) > limit):
            setattr(event, name, storable(text, limit))


def _width(table: Table, column: str) -> int:
    """How many characters a column takes."""
    return getattr(table.c[column].type, "length", None) or sys.maxsize


MAX_ENGINE_ID: Final = _width(tables.engines, "engine_id")
MAX_BLOCK_HASH: Final = _width(tables.checkpoints, "block_hash")


def _texts(kind: type) -> list[tuple[str, int]]:
    """The text fields of an event type that are read of each event, and how many
    characters each may have."""
    return [
        (field.name, _limit(field.name))
        for field in msgspec.structs.fields(kind)
        if field.type in (str, str | None) and field.name not in _REPEATED
    ]


def _limit(field: str) -> int:
    """The width of the column that a field is written to."""
    column = "discard_reason" if field == "reason" else field
    for table in (tables.requests, tables.checkpoints, tables.engines):
        if column in table.c:
            return _width(table, column)
    return sys.maxsize


_NAMES: Final = [(name, _limit(name)) for name in _REPEATED]
_TEXTS: Final = {kind: _texts(kind) for kind in typing.get_args(AnyEvent)}
