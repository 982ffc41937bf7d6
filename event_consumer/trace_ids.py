"""Trace and span ids, derived from what the events name.

They are functions of their arguments alone: a request exported twice (after a
crash of the consumer) has the same ids both times, and a link to a checkpoint of
an earlier request needs no memory of that request.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from typing import Final

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}"
    r"(?:-.*)?"
)
"""W3C Trace Context, section 3.2: version, trace id, parent id, flags."""


@lru_cache(maxsize=1024)
def _of_engine(num_bytes: int, kind: bytes, engine_id: str) -> blake2b:
    """The digest of ``engine_id``, to be copied and continued."""
    return blake2b(f"{engine_id}\0".encode(), digest_size=num_bytes, person=kind)


def _hex_digest(num_bytes: int, kind: bytes, engine_id: str, name: str) -> str:
    digest = _of_engine(num_bytes, kind, engine_id).copy()
    digest.update(name.encode())
    return digest.hexdigest()


def parse_traceparent(traceparent: str | None) -> tuple[str, str] | None:
    """The caller's ``(trace id, parent span id)`` in hex; None when there is none
    or it is not valid (W3C Trace Context says to ignore it then)."""
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    return (match[1], match[2]) if match else None


def request_ids(
    engine_id: str, request_id: str, traceparent: str | None = None
) -> tuple[str, str]:
    """``(trace id, span id)`` of a request: 32 and 16 hex digits.

    The trace is the caller's where a valid ``traceparent`` came, else derived.
    """
    digest = _hex_digest(24, b"request", engine_id, request_id)
    caller = parse_traceparent(traceparent)
    return caller[0] if caller else digest[:32], digest[32:]


def trace_id(engine_id: str, request_id: str, traceparent: str | None = None) -> str:
    """The first of :func:`request_ids`."""
    return request_ids(engine_id, request_id, traceparent)[0]


def request_span_id(engine_id: str, request_id: str) -> str:
    """The second of :func:`request_ids`."""
    return request_ids(engine_id, request_id)[1]


def checkpoint_span_id(engine_id: str, checkpoint_id: int) -> str:
    """16 hex digits."""
    return _hex_digest(8, b"checkpoint", engine_id, str(checkpoint_id))
