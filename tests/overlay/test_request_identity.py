"""Names that clients choose reach the stream in a form that every store takes."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_fork.checkpoint import EXTERNAL_ID_ATTRIBUTE, RequestIdentity
from vllm_fork.events import MAX_SESSION_ID_CHARS


def test_hostile_names():
    request = SimpleNamespace(
        request_id="a\0b",
        session_id="s\0" + "x" * 1000,
        trace_headers={"traceparent": "00-\0"},
        **{EXTERNAL_ID_ATTRIBUTE: None},
    )
    identity = RequestIdentity.of(request)
    assert identity.request_id == "a\ufffdb"
    assert identity.session_id == ("s\ufffd" + "x" * 1000)[:MAX_SESSION_ID_CHARS]
    assert identity.traceparent == "00-\ufffd"
    assert identity.external_request_id is None
    assert RequestIdentity.of(request, hash_session_id=True).session_id != (
        identity.session_id
    )
