"""What the ledger keeps and the store writes: one record a row.

Each struct has the columns of its table in :mod:`event_consumer.tables`, under
the same names and in the same order. Times are nanoseconds since the Unix epoch,
from the engine's clock; None means "not known (yet)". A field that is known never
becomes unknown again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from vllm_fork.events import AnyEvent, EventBatch

# Status of a request.
OPEN: Final = "open"
FINISHED: Final = "finished"
ENGINE_LOST: Final = "engine_lost"

# Status of an engine.
RUNNING: Final = "running"
STOPPED: Final = "stopped"
LOST: Final = "lost"

# Stages of a checkpoint.
PINNED: Final = "pinned"
PROMOTED: Final = "promoted"
PUBLISHED: Final = "published"
DISCARDED: Final = "discarded"
EVICTED: Final = "evicted"
GONE: Final = "gone"
"""Its engine is no more."""

LIVE_STAGES: Final = (PINNED, PROMOTED, PUBLISHED)

# Status of a gap (with LOST).
GAP_OPEN: Final = "open"
GAP_RECOVERED: Final = "recovered"

# States of a stream.
REPLAYING: Final = "replaying"
LIVE: Final = "live"
GAPPED: Final = "gapped"
DISCONNECTED: Final = "disconnected"


class EngineRecord(msgspec.Struct, kw_only=True, gc=False):
    """One engine epoch."""

    engine_id: str
    data_parallel_rank: int | None = None
    endpoint: str | None = None
    label: str = ""
    model_name: str = ""
    status: str = RUNNING
    started_ns: int | None = None
    last_event_ns: int | None = None
    retention: str | None = None
    retention_reason: str | None = None
    exact_tail: str | None = None
    copy_interval: int | None = None
    publish_on: str | None = None
    block_size: int | None = None
    hash_unit: int | None = None
    num_blocks: int | None = None
    num_mamba_groups: int | None = None
    async_scheduling: bool | None = None
    vllm_version: str | None = None
    fork_version: str | None = None
    events_dropped: int = 0


class RequestRecord(msgspec.Struct, kw_only=True, gc=False):
    """One request of one engine epoch."""

    engine_id: str
    request_id: str
    external_request_id: str | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    label: str = ""
    model_name: str = ""
    data_parallel_rank: int | None = None
    status: str = OPEN
    incomplete: bool = False
    arrival_ns: int | None = None
    admitted_ns: int | None = None
    finished_ns: int | None = None
    last_event_ns: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_external_tokens: int | None = None
    shared_prefix_boundary: int | None = None
    hit_limited_by: str | None = None
    source_kind: str | None = None
    source_request_id: str | None = None
    source_external_request_id: str | None = None
    source_checkpoint_id: int | None = None
    source_boundary: int | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_preemptions: int | None = None
    num_superseded: int | None = None
    retained_boundary: int | None = None
    retained_kind: str | None = None
    no_checkpoint_reason: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    trace_id: str | None = None
    span_id: str | None = None


class CheckpointRecord(msgspec.Struct, kw_only=True, gc=False):
    """One checkpoint of one request."""

    engine_id: str
    checkpoint_id: int
    request_id: str
    external_request_id: str | None = None
    stage: str = PINNED
    boundary: int = 0
    boundary_kind: str = ""
    num_blocks: int | None = None
    block_hash: str | None = None
    supersedes_checkpoint_id: int | None = None
    supersedes_boundary: int | None = None
    pinned_ns: int | None = None
    promoted_ns: int | None = None
    published_ns: int | None = None
    discarded_ns: int | None = None
    discard_reason: str | None = None
    evicted_ns: int | None = None
    eviction_reason: str | None = None
    num_hits: int = 0
    attention_evicted_ns: int | None = None
    trace_id: str | None = None
    span_id: str | None = None
    last_event_ns: int = 0


class StreamRecord(msgspec.Struct, kw_only=True, gc=False):
    """One endpoint: where the consumer stands in it, and what it has counted.

    ``applied_seq`` is the last batch of ``engine_id`` whose effects the store
    holds; -1 before the first.
    """

    endpoint: str
    replay_endpoint: str | None = None
    state: str = DISCONNECTED
    engine_id: str | None = None
    data_parallel_rank: int | None = None
    applied_seq: int = -1
    last_batch_ns: int | None = None
    lag_ns: int | None = None
    num_batches: int = 0
    num_events: int = 0
    num_replayed: int = 0
    num_duplicates: int = 0
    num_lost: int = 0
    num_unknown: int = 0
    num_undecodable: int = 0
    num_dropped: int = 0
    num_restarts: int = 0
    updated_ns: int | None = None


class GapRecord(msgspec.Struct, kw_only=True, gc=False):
    """Batches ``[first_seq, end_seq)`` of one epoch that did not come in order."""

    endpoint: str
    engine_id: str
    first_seq: int
    end_seq: int
    status: str
    detected_ns: int
    closed_ns: int | None = None


class ClosedRequest(NamedTuple):
    """A request that ended; the arguments of :meth:`RequestSink.request_closed`."""

    request: RequestRecord
    checkpoints: list[CheckpointRecord]
    source: CheckpointRecord | None


class Snapshot(NamedTuple):
    """What a consumer needs in order to go on where the store stands.

    ``requests`` are those not yet closed; ``checkpoints`` those that live, those
    of ``requests`` and those that they resumed from; ``conversations`` names the
    conversation of each request that left a live checkpoint, by
    ``(engine_id, request_id)``.
    """

    streams: list[StreamRecord]
    gaps: list[GapRecord]
    engines: list[EngineRecord]
    requests: list[RequestRecord]
    checkpoints: list[CheckpointRecord]
    conversations: dict[tuple[str, str], str]


class RequestSink(Protocol):
    """Who is told of each request that ended (the tracer, the metrics)."""

    def checkpoint_evicted(self, checkpoint: CheckpointRecord) -> None:
        """``checkpoint`` left the cache, long after its request ended. A copy."""
        ...

    def request_closed(
        self,
        request: RequestRecord,
        checkpoints: Sequence[CheckpointRecord],
        source: CheckpointRecord | None,
    ) -> None:
        """``checkpoints`` are the request's own, in the order they were pinned;
        ``source`` is the one it resumed from, where that was one of ours and is
        still known. The records are copies: nothing changes them afterwards."""
        ...

    def untold(self) -> dict[str, int]:
        """For each engine, the oldest ``last_event_ns`` of the requests that were told
        here and would be lost with this process."""
        ...


class EventCounter(Protocol):
    """Who counts events as they are applied (the metrics)."""

    def apply(self, batch: EventBatch, events: Iterable[AnyEvent]) -> None:
        """Once a batch, in order."""
        ...

    def engine_ended(self, engine_id: str) -> None:
        """The engine stopped or was lost."""
        ...
