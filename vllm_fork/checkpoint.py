"""What one checkpoint is, and who it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_fork.events import MAX_SESSION_ID_CHARS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

EXTERNAL_ID_ATTRIBUTE = "external_req_id"
"""Set on the core's ``Request`` by ``plugin``: the core itself drops the id that
the client and vLLM's own spans know."""


class RequestIdentity(NamedTuple):
    """The names of a request, as every event carries them."""

    request_id: str
    external_request_id: str | None = None
    session_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None

    @classmethod
    def of(cls, request: Request, hash_session_id: bool = False) -> RequestIdentity:
        """Read a request's names; a session id is capped, and hashed on request.

        Clients choose some of them: a NUL, which no database takes in a text, is
        replaced.
        """
        session_id = request.session_id
        if session_id is not None:
            session_id = str(session_id)
            if hash_session_id:
                digest = hashlib.blake2b(session_id.encode(), digest_size=16)
                session_id = digest.hexdigest()
            session_id = session_id[:MAX_SESSION_ID_CHARS]
        headers = request.trace_headers or {}
        return cls(
            _storable(request.request_id) or "",
            _storable(getattr(request, EXTERNAL_ID_ATTRIBUTE, None)),
            _storable(session_id),
            _storable(headers.get("traceparent")),
            _storable(headers.get("tracestate")),
        )


def _storable(text: str | None) -> str | None:
    return text and text.replace("\0", "\ufffd")


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The exact recurrent state of one request after tokens ``[0, boundary)``.

    ``blocks`` holds one block a Mamba group, in the order of the groups; an exact
    tail adds the attention tail blocks behind them. While pinned, the controller
    holds one reference to each.
    """

    checkpoint_id: int
    owner: RequestIdentity
    boundary: int
    boundary_kind: str
    blocks: tuple[KVCacheBlock, ...]
    published_monotonic_ns: int = 0
    num_hits: int = 0
