"""The store's tables (SQLAlchemy Core): what the consumer writes and the UI reads.

Times are nanoseconds since the Unix epoch, from the engine's clock, in ``*_ns``
columns; token counts are plain integers. NULL means "not known (yet)".
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION: Final = 1

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

engines = Table(
    "engines",
    metadata,
    Column("engine_id", String(64), primary_key=True),
    Column("data_parallel_rank", Integer),
    Column("endpoint", Text),
    Column("label", Text, nullable=False, default=""),
    Column("model_name", Text, nullable=False, default=""),
    Column("status", String(16), nullable=False),  # running | stopped | lost
    Column("started_ns", BigInteger),
    Column("last_event_ns", BigInteger),
    Column("retention", String(16)),  # on | off
    Column("retention_reason", Text),
    Column("exact_tail", Text),
    Column("copy_interval", Integer),
    Column("publish_on", Text),  # comma-separated
    Column("block_size", Integer),
    Column("hash_unit", Integer),
    Column("num_blocks", Integer),
    Column("num_mamba_groups", Integer),
    Column("async_scheduling", Boolean),
    Column("vllm_version", Text),
    Column("fork_version", Text),
    Column("events_dropped", BigInteger, nullable=False, default=0),
)

requests = Table(
    "requests",
    metadata,
    Column("engine_id", String(64), primary_key=True),
    Column("request_id", String(512), primary_key=True),
    Column("external_request_id", String(512)),
    Column("session_id", String(512)),
    # The session id, or the id of the first request of its chain of reuse.
    Column("conversation_id", String(1100)),
    Column("label", Text, nullable=False, default=""),
    Column("model_name", Text, nullable=False, default=""),
    Column("data_parallel_rank", Integer),
    Column("status", String(16), nullable=False),  # open | finished | engine_lost
    # Events of this request may be missing: it overlaps a range that was lost.
    Column("incomplete", Boolean, nullable=False, default=False),
    Column("arrival_ns", BigInteger),
    Column("admitted_ns", BigInteger),
    Column("finished_ns", BigInteger),
    Column("last_event_ns", BigInteger, nullable=False),
    Column("num_prompt_tokens", Integer),
    Column("num_output_tokens", Integer),
    Column("num_cached_tokens", Integer),  # reuse depth at first admission
    Column("num_external_tokens", Integer),
    Column("shared_prefix_boundary", Integer),
    Column("hit_limited_by", String(32)),
    Column("source_kind", String(32)),
    Column("source_request_id", String(512)),
    Column("source_external_request_id", String(512)),
    Column("source_checkpoint_id", BigInteger),
    Column("source_boundary", Integer),
    Column("finish_reason", String(32)),
    Column("stop_reason", Text),
    Column("num_preemptions", Integer),
    Column("num_superseded", Integer),
    Column("retained_boundary", Integer),
    Column("retained_kind", String(32)),
    Column("no_checkpoint_reason", String(64)),
    Column("traceparent", Text),  # the caller's, where vLLM let it through
    Column("tracestate", Text),
    Column("trace_id", String(32)),
    Column("span_id", String(16)),
    Index("ix_requests_last_event", "last_event_ns"),
    Index("ix_requests_arrival", "arrival_ns"),
    Index("ix_requests_external", "external_request_id"),
    Index("ix_requests_session", "session_id"),
    Index("ix_requests_conversation", "conversation_id"),
    Index("ix_requests_source", "engine_id", "source_request_id"),
    Index("ix_requests_label", "label", "last_event_ns"),
    Index("ix_requests_reason", "no_checkpoint_reason", "last_event_ns"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("engine_id", String(64), primary_key=True),
    Column("checkpoint_id", BigInteger, primary_key=True),
    Column("request_id", String(512), nullable=False),
    Column("external_request_id", String(512)),
    # pinned | promoted | published | discarded | evicted | gone (engine lost)
    Column("stage", String(16), nullable=False),
    Column("boundary", Integer, nullable=False),
    Column("boundary_kind", String(32), nullable=False),
    Column("num_blocks", Integer),
    Column("block_hash", String(128)),  # hex of bytes, or decimal
    Column("supersedes_checkpoint_id", BigInteger),
    Column("supersedes_boundary", Integer),
    Column("pinned_ns", BigInteger),
    Column("promoted_ns", BigInteger),
    Column("published_ns", BigInteger),
    Column("discarded_ns", BigInteger),
    Column("discard_reason", String(32)),
    Column("evicted_ns", BigInteger),
    Column("eviction_reason", String(32)),
    Column("num_hits", Integer, nullable=False, default=0),
    Column("attention_evicted_ns", BigInteger),
    Column("trace_id", String(32)),
    Column("span_id", String(16)),
    Column("last_event_ns", BigInteger, nullable=False),
    Index("ix_checkpoints_request", "engine_id", "request_id"),
    Index("ix_checkpoints_stage", "stage", "last_event_ns"),
    Index("ix_checkpoints_reason", "discard_reason", "last_event_ns"),
    Index("ix_checkpoints_last_event", "last_event_ns"),
)

streams = Table(
    "streams",
    metadata,
    Column("endpoint", String(512), primary_key=True),
    Column("replay_endpoint", Text),
    # replaying | live | gapped | disconnected
    Column("state", String(16), nullable=False),
    Column("engine_id", String(64)),
    Column("data_parallel_rank", Integer),
    Column("applied_seq", BigInteger, nullable=False, default=-1),
    Column("last_batch_ns", BigInteger),  # wall clock of the consumer
    Column("lag_ns", BigInteger),  # received minus made, of the last batch
    Column("num_batches", BigInteger, nullable=False, default=0),
    Column("num_events", BigInteger, nullable=False, default=0),
    Column("num_replayed", BigInteger, nullable=False, default=0),  # batches
    Column("num_duplicates", BigInteger, nullable=False, default=0),  # batches
    Column("num_lost", BigInteger, nullable=False, default=0),  # batches
    Column("num_unknown", BigInteger, nullable=False, default=0),  # events
    Column(
        "num_undecodable", BigInteger, nullable=False, default=0
    ),  # events or frames
    Column(
        "num_dropped", BigInteger, nullable=False, default=0
    ),  # events, by publisher
    Column("num_restarts", BigInteger, nullable=False, default=0),
    Column("updated_ns", BigInteger),
)

gaps = Table(
    "gaps",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("endpoint", String(512), nullable=False),
    Column("engine_id", String(64), nullable=False, default=""),
    Column("first_seq", BigInteger, nullable=False),
    Column("end_seq", BigInteger, nullable=False),  # half-open: [first_seq, end_seq)
    Column("status", String(16), nullable=False),  # open | recovered | lost
    Column("detected_ns", BigInteger, nullable=False),
    Column("closed_ns", BigInteger),
    UniqueConstraint("endpoint", "engine_id", "first_seq", name="uq_gaps_range"),
    Index("ix_gaps_endpoint", "endpoint", "status"),
)
