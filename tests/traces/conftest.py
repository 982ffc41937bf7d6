"""Records as the ledger hands them out, on a clock of our own, and a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from event_consumer import trace_ids
from event_consumer.otlp import GRPC, HTTP, OtlpSettings
from event_consumer.otlp_receiver import OtlpReceiver
from event_consumer.records import (
    DISCARDED,
    FINISHED,
    PUBLISHED,
    CheckpointRecord,
    RequestRecord,
)

ENGINE = "11111111-2222-3333-4444-555555555555"
SECOND = 1_000_000_000
"""The simulated clock begins one second after the epoch."""


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(params=[GRPC, HTTP])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def otlp(receiver: OtlpReceiver, protocol: str) -> OtlpSettings:
    """Settings that reach ``receiver``, over each protocol."""
    url = receiver.grpc_url if protocol == GRPC else receiver.http_url
    return OtlpSettings(endpoint=url, timeout_s=5)


@pytest.fixture
def make_request() -> Callable[..., RequestRecord]:
    """A finished turn; keyword arguments replace what is said here."""

    def make(name: str = "chatcmpl-1", **given: Any) -> RequestRecord:
        request_id = f"{name}-0badf00d"
        engine_id = given.get("engine_id", ENGINE)
        known: dict[str, Any] = {
            "engine_id": engine_id,
            "request_id": request_id,
            "external_request_id": name,
            "session_id": "session-a",
            "conversation_id": "session-a",
            "label": "arm-on",
            "model_name": "tiny-hybrid",
            "data_parallel_rank": 0,
            "status": FINISHED,
            "arrival_ns": SECOND,
            "admitted_ns": 2 * SECOND,
            "finished_ns": 9 * SECOND,
            "last_event_ns": 9 * SECOND,
            "num_prompt_tokens": 3634,
            "num_output_tokens": 4080,
            "num_cached_tokens": 3168,
            "num_external_tokens": 0,
            "shared_prefix_boundary": 3168,
            "hit_limited_by": "prompt_end",
            "source_kind": "decode_block",
            "finish_reason": "stop",
            "num_preemptions": 0,
            "num_superseded": 0,
            "retained_boundary": 7392,
            "retained_kind": "decode_block",
            "trace_id": trace_ids.trace_id(
                engine_id, request_id, given.get("traceparent")
            ),
            "span_id": trace_ids.request_span_id(engine_id, request_id),
        }
        return RequestRecord(**{**known, **given})

    return make


@pytest.fixture
def make_checkpoint() -> Callable[..., CheckpointRecord]:
    """A published checkpoint of ``request``, or, with a reason, a discarded one."""

    def make(
        request: RequestRecord,
        checkpoint_id: int = 1,
        discard_reason: str | None = None,
        **given: Any,
    ) -> CheckpointRecord:
        known: dict[str, Any] = {
            "engine_id": request.engine_id,
            "checkpoint_id": checkpoint_id,
            "request_id": request.request_id,
            "external_request_id": request.external_request_id,
            "stage": DISCARDED if discard_reason else PUBLISHED,
            "boundary": 1056 * (checkpoint_id + 6),
            "boundary_kind": "decode_block",
            "num_blocks": 3,
            "pinned_ns": 3 * SECOND,
            "promoted_ns": 4 * SECOND,
            "published_ns": None if discard_reason else 9 * SECOND,
            "discarded_ns": 5 * SECOND if discard_reason else None,
            "discard_reason": discard_reason,
            "block_hash": None if discard_reason else "ab" * 32,
            "trace_id": request.trace_id,
            "span_id": trace_ids.checkpoint_span_id(request.engine_id, checkpoint_id),
            "last_event_ns": 9 * SECOND,
        }
        return CheckpointRecord(**{**known, **given})

    return make
