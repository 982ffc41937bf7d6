"""Every OpenTelemetry name that this project writes.

``gen_ai.*`` follows the GenAI semantic conventions, which are all in development
and live in a repository of their own (open-telemetry/semantic-conventions-genai);
the names here are those of its registry on 2026-11-29, where
``gen_ai.usage.cache_creation.input_tokens`` has become ``…cache_write.input_tokens``
(its change 440). ``otel.sdk.*`` and ``error.type`` are OpenTelemetry's own.
Everything else is ours, under ``vllm.checkpoint.*`` and ``vllm.prefix_cache.*``.

``docs/traces.md`` is the reference of what each means; a test holds the two together.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "vllm_fork.event_consumer"
"""Instrumentation scope of all three signals."""
SERVICE_NAME: Final = "vllm-checkpoints"
"""``service.name`` unless ``OTEL_SERVICE_NAME`` or resource attributes name another."""

# Spans.
REQUEST_SPAN: Final = "kv_cache.request"
CHECKPOINT_SPAN: Final = "kv_cache.checkpoint"

# GenAI semantic conventions.
OPERATION_NAME: Final = "gen_ai.operation.name"
TEXT_COMPLETION: Final = "text_completion"
"""The engine sees token sequences: it cannot tell a chat from a completion."""
REQUEST_MODEL: Final = "gen_ai.request.model"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"
REQUEST_ID: Final = "gen_ai.request.id"
"""vLLM's own (``vllm.tracing.SpanAttributes``), not of the conventions: the id that
the client knows. It joins our span to vLLM's ``llm_request``."""

# OpenTelemetry's own.
ERROR_TYPE: Final = "error.type"

# Attributes of both spans: the engine.
ENGINE_ID: Final = "vllm.checkpoint.engine.id"
ENGINE_LABEL: Final = "vllm.checkpoint.engine.label"
ENGINE_RANK: Final = "vllm.checkpoint.engine.rank"

# Attributes of the request span: what it was admitted with.
CORE_REQUEST_ID: Final = "vllm.prefix_cache.request.id"
REUSE_DEPTH: Final = "vllm.prefix_cache.reuse_depth"
PREFILLED_TOKENS: Final = "vllm.prefix_cache.prefilled_tokens"
EXTERNAL_TOKENS: Final = "vllm.prefix_cache.external_tokens"
ATTENTION_DEPTH: Final = "vllm.prefix_cache.attention_depth"
RECOMPUTED_TOKENS: Final = "vllm.prefix_cache.recomputed_tokens"
HIT_LIMITED_BY: Final = "vllm.prefix_cache.hit_limited_by"
SOURCE_KIND: Final = "vllm.prefix_cache.source.kind"
SOURCE_BOUNDARY: Final = "vllm.prefix_cache.source.boundary"
SOURCE_REQUEST_ID: Final = "vllm.prefix_cache.source.request.id"
SOURCE_CHECKPOINT_ID: Final = "vllm.prefix_cache.source.checkpoint.id"

# Attributes of the request span: how it went, and what it left.
REQUEST_STATUS: Final = "vllm.prefix_cache.request.status"
REQUEST_INCOMPLETE: Final = "vllm.prefix_cache.request.incomplete"
PREEMPTIONS: Final = "vllm.prefix_cache.request.preemptions"
RETAINED_DEPTH: Final = "vllm.prefix_cache.retained_depth"
RETAINED_KIND: Final = "vllm.prefix_cache.retained_kind"
NO_CHECKPOINT_REASON: Final = "vllm.checkpoint.none_reason"
NUM_CHECKPOINTS: Final = "vllm.checkpoint.count"
NUM_FOLDED: Final = "vllm.checkpoint.folded"

# Attributes of the checkpoint span.
CHECKPOINT_ID: Final = "vllm.checkpoint.id"
BOUNDARY: Final = "vllm.checkpoint.boundary"
BOUNDARY_KIND: Final = "vllm.checkpoint.kind"
STAGE: Final = "vllm.checkpoint.stage"
REASON: Final = "vllm.checkpoint.reason"
NUM_BLOCKS: Final = "vllm.checkpoint.blocks"
BLOCK_HASH: Final = "vllm.checkpoint.block_hash"
SUPERSEDES_BOUNDARY: Final = "vllm.checkpoint.supersedes.boundary"
SUPERSEDES_ID: Final = "vllm.checkpoint.supersedes.id"
NUM_HITS: Final = "vllm.checkpoint.hits"
USED: Final = "vllm.checkpoint.used"
"""Whether any request resumed from it before it was evicted (metrics only)."""
AGE: Final = "vllm.checkpoint.age"
"""Seconds from publication to eviction."""

# Events: the ``event_name`` of a log record, the name of a span event, and, for the
# stages of a checkpoint, the name of the counter as well.
PINNED: Final = "vllm.checkpoint.pinned"
PROMOTED: Final = "vllm.checkpoint.promoted"
PUBLISHED: Final = "vllm.checkpoint.published"
DISCARDED: Final = "vllm.checkpoint.discarded"
EVICTED: Final = "vllm.checkpoint.evicted"
ATTENTION_EVICTED: Final = "vllm.checkpoint.attention_evicted"
REUSED: Final = "vllm.prefix_cache.reused"

# Metrics of the cache. The counters of the stages bear the names of the events above;
# RECOMPUTED_TOKENS and the histograms REUSE_DEPTH, RETAINED_DEPTH and AGE those of the
# attributes.
PINNED_BLOCKS: Final = "vllm.checkpoint.pinned_blocks"
REQUESTS: Final = "vllm.prefix_cache.requests"
PROMPT_TOKENS: Final = "vllm.prefix_cache.prompt_tokens"
CACHED_TOKENS: Final = "vllm.prefix_cache.cached_tokens"

# Metrics of the streams.
STREAM_LAG: Final = "vllm.checkpoint.stream.lag"
STREAM_LIVE: Final = "vllm.checkpoint.stream.live"
STREAM_OPEN_GAPS: Final = "vllm.checkpoint.stream.open_gaps"
STREAM_LOST: Final = "vllm.checkpoint.stream.lost"
STREAM_REPLAYED: Final = "vllm.checkpoint.stream.replayed"
STREAM_DUPLICATES: Final = "vllm.checkpoint.stream.duplicates"
STREAM_EVENTS: Final = "vllm.checkpoint.stream.events"
STREAM_UNREADABLE: Final = "vllm.checkpoint.stream.unreadable"
STREAM_DROPPED: Final = "vllm.checkpoint.stream.dropped"
STREAM_RESTARTS: Final = "vllm.checkpoint.stream.restarts"
STREAM_ENDPOINT: Final = "vllm.checkpoint.stream.endpoint"

# Metrics of our own export: OpenTelemetry's names for an SDK's health.
SPANS_EXPORTED: Final = "otel.sdk.exporter.span.exported"
LOGS_EXPORTED: Final = "otel.sdk.exporter.log.exported"
SPANS_PROCESSED: Final = "otel.sdk.processor.span.processed"
LOGS_PROCESSED: Final = "otel.sdk.processor.log.processed"
SPAN_QUEUE_SIZE: Final = "otel.sdk.processor.span.queue.size"
LOG_QUEUE_SIZE: Final = "otel.sdk.processor.log.queue.size"
