"""Records as the ledger hands them out, on a clock of our own, and a collector."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from event_consumer import trace_ids
from event_consumer.otlp import GRPC, HTTP, OtlpSettings
from event_consumer.otlp_receiver import OtlpReceiver
from event_consumer.records import (
    DISCARDED,
    ENGINE_LOST,
    EVICTED,
    FINISHED,
    PROMOTED,
    PUBLISHED,
    CheckpointRecord,
    EngineRecord,
    RequestRecord,
)
from event_consumer.store import ChangeSet

sys.path.append(str(Path(__file__).parents[1]))

import postgres_server

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


ENGINE_ON = "aaaaaaaa-0000-4000-8000-000000000001"
ENGINE_OFF = "bbbbbbbb-0000-4000-8000-000000000002"


class Story:
    """Two conversations and some single requests in which everything that
    docs/traces.md asks for happens, and its contrary too.

    In the last hour, a minute apart, in the order they arrived."""

    def __init__(self) -> None:
        self._now_ns = time.time_ns() - 3_000 * SECOND
        self._next_checkpoint = 1
        self.requests: list[RequestRecord] = []
        self.checkpoints: list[CheckpointRecord] = []
        self._tell()

    @property
    def closed(self) -> list[tuple[RequestRecord, list[CheckpointRecord], Any]]:
        """As the ledger hands them to the tracer."""
        by_id = {(c.engine_id, c.checkpoint_id): c for c in self.checkpoints}
        return [
            (
                request,
                [c for c in self.checkpoints if c.request_id == request.request_id],
                by_id.get((request.engine_id, request.source_checkpoint_id)),
            )
            for request in self.requests
        ]

    @property
    def changes(self) -> ChangeSet:
        """As the store takes them."""
        engines = [
            EngineRecord(engine_id=ENGINE_ON, label="arm-on", last_event_ns=1),
            EngineRecord(engine_id=ENGINE_OFF, label="arm-off", last_event_ns=1),
        ]
        return ChangeSet.of(
            engines=engines, requests=self.requests, checkpoints=self.checkpoints
        )

    def _request(
        self,
        name: str,
        conversation: str,
        *,
        prompt: int,
        cached: int = 0,
        output: int = 100,
        **given: Any,
    ) -> RequestRecord:
        self._now_ns += 60 * SECOND
        engine_id = given.pop("engine_id", ENGINE_ON)
        request_id = f"{name}-0badf00d"
        known: dict[str, Any] = {
            "engine_id": engine_id,
            "request_id": request_id,
            "external_request_id": name,
            "session_id": conversation,
            "conversation_id": conversation,
            "label": "arm-on" if engine_id == ENGINE_ON else "arm-off",
            "model_name": "tiny-hybrid",
            "data_parallel_rank": 0,
            "status": FINISHED,
            "arrival_ns": self._now_ns,
            "admitted_ns": self._now_ns + SECOND,
            "finished_ns": self._now_ns + 30 * SECOND,
            "last_event_ns": self._now_ns + 30 * SECOND,
            "num_prompt_tokens": prompt,
            "num_output_tokens": output,
            "num_cached_tokens": cached,
            "num_external_tokens": 0,
            "shared_prefix_boundary": cached,
            "hit_limited_by": "prompt_end",
            "source_kind": "none",
            "finish_reason": "stop",
            "num_preemptions": 0,
            "num_superseded": 0,
            "trace_id": trace_ids.trace_id(engine_id, request_id),
            "span_id": trace_ids.request_span_id(engine_id, request_id),
        }
        request = RequestRecord(**{**known, **given})
        self.requests.append(request)
        return request

    def _checkpoint(
        self, request: RequestRecord, boundary: int, kind: str, **given: Any
    ) -> CheckpointRecord:
        number, self._next_checkpoint = (
            self._next_checkpoint,
            self._next_checkpoint + 1,
        )
        start_ns = request.arrival_ns or 0
        reason = given.get("discard_reason")
        known: dict[str, Any] = {
            "engine_id": request.engine_id,
            "checkpoint_id": number,
            "request_id": request.request_id,
            "external_request_id": request.external_request_id,
            "stage": DISCARDED if reason else PUBLISHED,
            "boundary": boundary,
            "boundary_kind": kind,
            "num_blocks": 3,
            "pinned_ns": start_ns + 10 * SECOND,
            "promoted_ns": start_ns + 11 * SECOND,
            "published_ns": None if reason else start_ns + 30 * SECOND,
            "discarded_ns": start_ns + 20 * SECOND if reason else None,
            "trace_id": request.trace_id,
            "span_id": trace_ids.checkpoint_span_id(request.engine_id, number),
            "last_event_ns": start_ns + 30 * SECOND,
        }
        checkpoint = CheckpointRecord(**{**known, **given})
        self.checkpoints.append(checkpoint)
        if checkpoint.stage in (PUBLISHED, EVICTED):
            request.retained_boundary = boundary
            request.retained_kind = kind
        return checkpoint

    def _resumed(self, source: CheckpointRecord) -> dict[str, Any]:
        source.num_hits += 1
        return {
            "cached": source.boundary,
            "source_kind": source.boundary_kind,
            "source_request_id": source.request_id,
            "source_external_request_id": source.external_request_id,
            "source_checkpoint_id": source.checkpoint_id,
            "source_boundary": source.boundary,
        }

    def _tell(self) -> None:
        # A conversation that works, until an answer ends by length.
        first = self._request("chatcmpl-40", "support-7", prompt=3000, output=2000)
        block = self._checkpoint(first, 4224, "decode_block")
        second = self._request(
            "chatcmpl-41",
            "support-7",
            prompt=5100,
            output=3000,
            num_superseded=1,
            **self._resumed(block),
        )
        self._checkpoint(second, 7392, "decode_block", discard_reason="superseded")
        tail = self._checkpoint(second, 8099, "exact_tail")
        third = self._request(
            "chatcmpl-42",
            "support-7",
            prompt=8200,
            output=2700,
            finish_reason="length",
            no_checkpoint_reason="length",
            **self._resumed(tail),
        )
        self._checkpoint(third, 10560, "decode_block", discard_reason="length")
        fourth = self._request(
            "chatcmpl-43",
            "support-7",
            prompt=11000,
            cached=1056,
            shared_prefix_boundary=8448,
            hit_limited_by="recurrent_state",
            source_kind="shared_prefix",
        )
        self._checkpoint(fourth, 11099, "exact_tail")

        # One whose checkpoint did not live long enough.
        early = self._request("chatcmpl-50", "billing-1", prompt=6000, output=800)
        self._checkpoint(
            early,
            6799,
            "exact_tail",
            stage=EVICTED,
            evicted_ns=(early.arrival_ns or 0) + 45 * SECOND,
            eviction_reason="lru",
        )
        late = self._request(
            "chatcmpl-51",
            "billing-1",
            prompt=6900,
            cached=0,
            hit_limited_by="attention",
        )
        # Used, and evicted later: not "before use".
        self._checkpoint(
            late,
            6999,
            "exact_tail",
            stage=EVICTED,
            num_hits=2,
            evicted_ns=(late.arrival_ns or 0) + 50 * SECOND,
            eviction_reason="lru",
        )

        self._request(
            "chatcmpl-60", "small", prompt=40, no_checkpoint_reason="below_block"
        )
        pressed = self._request(
            "chatcmpl-61",
            "pressed",
            prompt=2000,
            output=3000,
            num_preemptions=1,
            no_checkpoint_reason="memory_pressure",
        )
        self._checkpoint(
            pressed, 4224, "decode_block", discard_reason="memory_pressure"
        )
        self._request(
            "chatcmpl-63",
            "partial",
            prompt=100,
            incomplete=True,
            no_checkpoint_reason="aborted",
        )

        # The same conversation without retention.
        for turn, (prompt, cached) in enumerate([(3000, 0), (5100, 2992)]):
            self._request(
                f"chatcmpl-7{turn}",
                "support-7",
                prompt=prompt,
                cached=cached,
                output=2000,
                engine_id=ENGINE_OFF,
                shared_prefix_boundary=4992 if cached else 0,
                hit_limited_by="recurrent_state" if cached else "prompt_end",
                source_kind="prompt_replay" if cached else "none",
                no_checkpoint_reason="disabled",
            )

        lost = self._request(
            "chatcmpl-62",
            "lost",
            prompt=900,
            output=None,
            status=ENGINE_LOST,
            finished_ns=None,
            finish_reason=None,
        )
        self._checkpoint(lost, 1056, "decode_block", stage=PROMOTED, published_ns=None)


@pytest.fixture(scope="session")
def story() -> Story:
    return Story()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a database in a server of our own."""
    try:
        with postgres_server.running() as url:
            yield url.format(database="postgres")
    except postgres_server.NoPostgres as error:
        pytest.skip(f"NOT TESTED on PostgreSQL: {error}")
