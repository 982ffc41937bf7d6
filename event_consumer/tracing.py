"""One trace a request: what it reused, what it left behind, and why.

``kv_cache.request`` runs from arrival to finish, under the caller's span where a
``traceparent`` came (a sibling of vLLM's ``llm_request``), else as the root of a
trace of its own; each checkpoint is a ``kv_cache.checkpoint`` child of it. A request
that resumed from a checkpoint links to the span of that checkpoint: a conversation
can be walked turn by turn. All times are those of the events, and all ids are
derived (:mod:`event_consumer.trace_ids`): exporting a request twice gives the same
spans.

Spans and log records are built as OTLP messages, not through the SDK's tracer, whose
spans draw their ids from a generator and cost several times as much to make and to
encode (``benchmarks/tracer.py`` measures both). The SDK's samplers and resource are
used as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message
from opentelemetry import trace
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import (
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.span import TraceState

from event_consumer import names
from event_consumer.export_queue import ExportQueue, ExportStats
from event_consumer.log_records import (
    Stage,
    checkpoint_ends,
    checkpoint_stages,
    log_record,
    num_stages,
    request_stages,
)
from event_consumer.otlp import OtlpSettings, Signal, Transport, open_transport
from event_consumer.otlp_attributes import set_attributes
from event_consumer.records import ENGINE_LOST, CheckpointRecord, RequestRecord
from event_consumer.trace_ids import parse_traceparent

SUPERSEDED: Final = "superseded"
ERROR_FINISH: Final = "error"

# Bits of an OTLP span's and link's flags (trace.proto, SpanFlags): the W3C flag
# "sampled", and whether the other side of the parent relation is remote.
_SAMPLED: Final = 0x01
_IS_REMOTE_KNOWN: Final = 0x100
_IS_REMOTE: Final = 0x200


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What becomes a trace.

    ``sample_ratio``: share of the traces of our own that are exported; under a
    caller's ``traceparent`` the caller's decision stands. ``log_records``: stages as
    log records. ``span_events``: stages as span events too, for backends without
    logs (Jaeger). ``max_superseded_spans``: superseded checkpoints of one request
    that get a span; earlier ones are folded into a count. ``max_queued``: spans, and
    log records, that may wait for a collector (about 1 kB each).

    Raises:
        ValueError: a value is out of range.
    """

    sample_ratio: float = 1.0
    log_records: bool = True
    span_events: bool = False
    max_superseded_spans: int = 8
    max_queued: int = 32_768

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(
                f"sample_ratio is a share from 0 to 1, not {self.sample_ratio:g}"
            )
        if self.max_superseded_spans < 0 or self.max_queued < 1:
            raise ValueError(
                "max_superseded_spans must be at least 0 and max_queued at least 1"
            )


class _Closed(NamedTuple):
    """A request to export; its superseded checkpoints are already folded."""

    request: RequestRecord
    checkpoints: Sequence[CheckpointRecord]
    source: CheckpointRecord | None
    num_checkpoints: int


class _Late(NamedTuple):
    """What befell a checkpoint after its span was exported."""

    checkpoint: CheckpointRecord


def consumer_resource() -> Resource:
    """The resource of all three signals; ``OTEL_SERVICE_NAME`` and
    ``OTEL_RESOURCE_ATTRIBUTES`` come first."""
    try:
        package_version = version("vllm-fork")
    except PackageNotFoundError:
        package_version = "unknown"
    own = {SERVICE_NAME: names.SERVICE_NAME, SERVICE_VERSION: package_version}
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


class RequestTracer:
    """Exports one trace a closed request. A ``RequestSink``; thread-safe.

    Nothing here blocks or raises: a collector that is down, slow or wrong costs
    spans, which :meth:`stats` counts, and nothing else.
    """

    def __init__(
        self,
        otlp: OtlpSettings | None,
        settings: TraceSettings | None = None,
        *,
        logs: OtlpSettings | None = None,
        sampler: Sampler | None = None,
        resource: Resource | None = None,
    ) -> None:
        """
        Args:
            otlp: where spans go; None: nowhere.
            logs: where log records go; None: where the spans go.
        """
        self._settings = settings or TraceSettings()
        self._encoder = TraceEncoder(
            self._settings, sampler=sampler, resource=resource or consumer_resource()
        )
        self._transports: list[tuple[OtlpSettings, Transport]] = []
        self._spans: ExportQueue[_Closed] | None = None
        if otlp is not None:
            self._spans = self._open_queue("traces", otlp, self._encoder.spans)
        self._logs: ExportQueue[_Closed | _Late] | None = None
        logs = logs or otlp
        if self._settings.log_records and logs is not None:
            self._logs = self._open_queue("logs", logs, self._encoder.logs)

    def _open_queue(
        self,
        signal: Signal,
        otlp: OtlpSettings,
        encode: Callable[[Sequence[Any]], tuple[Message, int]],
    ) -> ExportQueue[Any]:
        """A queue before the collector; signals of one collector share a connection."""
        transport = next((t for to, t in self._transports if to == otlp), None)
        if transport is None:
            transport = open_transport(otlp)
            self._transports.append((otlp, transport))
        return ExportQueue(
            signal,
            transport,
            encode,
            max_queued=self._settings.max_queued,
            timeout_s=otlp.timeout_s,
        )

    def request_closed(
        self,
        request: RequestRecord,
        checkpoints: Sequence[CheckpointRecord],
        source: CheckpointRecord | None,
    ) -> None:
        """Export a request that ended, with its checkpoints in the order they were
        pinned; ``source`` is the checkpoint that it resumed from, where known. The
        records must not change afterwards."""
        shown = fold_superseded(checkpoints, self._settings.max_superseded_spans)
        closed = _Closed(request, shown, source, len(checkpoints))
        if self._spans is not None:
            self._spans.submit(closed, 1 + len(shown))
        if self._logs is not None:
            weight = num_stages(request, shown)
            if weight:
                self._logs.submit(closed, weight)

    def checkpoint_evicted(self, checkpoint: CheckpointRecord) -> None:
        """Tell that a published checkpoint, or the attention blocks under it, left
        the cache. Its span has ended and cannot change: a log record of it says so."""
        if self._logs is not None:
            self._logs.submit(_Late(checkpoint), 1)

    def stats(self) -> list[ExportStats]:
        """The counts of each signal that is exported."""
        return [queue.stats() for queue in self._queues]

    def untold(self) -> dict[str, int]:
        """For each engine, the oldest last event of the requests that were told and
        not exported yet; after a shutdown, of those that it left."""
        oldest: dict[str, int] = {}
        for queue in self._queues:
            for item in queue.unsettled():
                if isinstance(item, _Closed):
                    engine_id, ns = item.request.engine_id, item.request.last_event_ns
                    oldest[engine_id] = min(ns, oldest.get(engine_id, ns))
        return oldest

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Send what is queued; whether all of it was sent or dropped in time."""
        deadline = time.monotonic() + timeout_s
        flushed = True
        for queue in self._queues:
            flushed &= queue.flush(max(0.0, deadline - time.monotonic()))
        return flushed

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Flush within ``timeout_s`` seconds in all, drop and count the rest."""
        deadline = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.shutdown(max(0.0, deadline - time.monotonic()))
        for _, transport in self._transports:
            transport.close()

    @property
    def _queues(self) -> list[ExportQueue[Any]]:
        return [queue for queue in (self._spans, self._logs) if queue is not None]


def fold_superseded(
    checkpoints: Sequence[CheckpointRecord], max_superseded: int
) -> Sequence[CheckpointRecord]:
    """``checkpoints`` without the superseded ones before the last
    ``max_superseded``. Nothing can link to those: they were never published."""
    num_extra = -max_superseded
    for checkpoint in checkpoints:
        num_extra += checkpoint.discard_reason == SUPERSEDED
    if num_extra <= 0:
        return checkpoints
    kept = []
    for checkpoint in checkpoints:
        if num_extra > 0 and checkpoint.discard_reason == SUPERSEDED:
            num_extra -= 1
        else:
            kept.append(checkpoint)
    return kept


class TraceEncoder:
    """Turns closed requests into OTLP export requests. Pure but for the sampler."""

    def __init__(
        self, settings: TraceSettings, *, sampler: Sampler | None, resource: Resource
    ) -> None:
        self._span_events = settings.span_events
        self._sampler = sampler or ParentBased(TraceIdRatioBased(settings.sample_ratio))
        self._resource = resource

    def spans(self, items: Sequence[_Closed]) -> tuple[Message, int]:
        """One export request, and the number of spans in it."""
        export = ExportTraceServiceRequest()
        group = export.resource_spans.add()
        set_attributes(group.resource.attributes, self._resource.attributes)
        scoped = group.scope_spans.add()
        scoped.scope.name = names.SCOPE
        for item in items:
            self._add_request(scoped.spans, item)
        return export, len(scoped.spans)

    def logs(self, items: Sequence[_Closed | _Late]) -> tuple[Message, int]:
        """One export request, and the number of log records in it."""
        export = ExportLogsServiceRequest()
        group = export.resource_logs.add()
        set_attributes(group.resource.attributes, self._resource.attributes)
        scoped = group.scope_logs.add()
        scoped.scope.name = names.SCOPE
        now_ns = time.time_ns()
        for item in items:
            scoped.log_records.extend(self._log_records(item, now_ns))
        return export, len(scoped.log_records)

    def _add_request(self, spans: Any, closed: _Closed) -> None:
        request, checkpoints, source, num_checkpoints = closed
        attributes = request_attributes(
            request, num_checkpoints, num_checkpoints - len(checkpoints)
        )
        context = _parent_context(request)
        link = _source_link(request, source)
        sampled = self._sampler.should_sample(
            context,
            int(request.trace_id or "0", 16),
            names.REQUEST_SPAN,
            trace.SpanKind.INTERNAL,
            attributes,
            [link] if link is not None else [],
        )
        if not sampled.decision.is_sampled():
            return
        trace_id = bytes.fromhex(request.trace_id or "")
        span_id = bytes.fromhex(request.span_id or "")
        trace_state = sampled.trace_state.to_header() if sampled.trace_state else ""
        parent = parse_traceparent(request.traceparent)
        start_ns, end_ns = request_interval(request, checkpoints)
        span = spans.add(
            name=names.REQUEST_SPAN,
            kind=Span.SPAN_KIND_INTERNAL,
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=bytes.fromhex(parent[1]) if parent else b"",
            trace_state=trace_state,
            flags=_SAMPLED | _IS_REMOTE_KNOWN | (_IS_REMOTE if parent else 0),
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
        )
        set_attributes(span.attributes, sampled.attributes or attributes)
        if (failure := _failure(request)) is not None:
            span.status.code = Status.STATUS_CODE_ERROR
            span.status.message = failure
        if link is not None:
            _add_link(span, link)
        if self._span_events:
            _add_events(span, request_stages(request))
        for checkpoint in checkpoints:
            self._add_checkpoint(spans, checkpoint, request, span)

    def _add_checkpoint(
        self,
        spans: Any,
        checkpoint: CheckpointRecord,
        request: RequestRecord,
        parent: Span,
    ) -> None:
        start_ns, end_ns = checkpoint_interval(checkpoint)
        span = spans.add(
            name=names.CHECKPOINT_SPAN,
            kind=Span.SPAN_KIND_INTERNAL,
            trace_id=parent.trace_id,
            span_id=bytes.fromhex(checkpoint.span_id or ""),
            parent_span_id=parent.span_id,
            trace_state=parent.trace_state,
            flags=_SAMPLED | _IS_REMOTE_KNOWN,
            start_time_unix_nano=start_ns,
            end_time_unix_nano=end_ns,
        )
        set_attributes(span.attributes, checkpoint_attributes(checkpoint, request))
        if self._span_events:
            _add_events(span, checkpoint_stages(checkpoint))

    def _log_records(self, item: _Closed | _Late, now_ns: int) -> Iterator[LogRecord]:
        if isinstance(item, _Late):
            checkpoint = item.checkpoint
            if self._keeps(checkpoint.trace_id, None):
                *_, newest = checkpoint_ends(checkpoint)
                yield log_record(newest, *_ids(checkpoint), now_ns)
            return
        request = item.request
        if not self._keeps(request.trace_id, request):
            return
        ids = _ids(request)
        for stage in request_stages(request):
            yield log_record(stage, *ids, now_ns)
        for checkpoint in item.checkpoints:
            ids = _ids(checkpoint)
            for stage in checkpoint_stages(checkpoint):
                yield log_record(stage, *ids, now_ns)

    def _keeps(self, trace_id: str | None, request: RequestRecord | None) -> bool:
        """Whether the sampler keeps the trace that a log record belongs to."""
        return self._sampler.should_sample(
            _parent_context(request) if request is not None else None,
            int(trace_id or "0", 16),
            names.REQUEST_SPAN,
        ).decision.is_sampled()


def request_attributes(
    request: RequestRecord, num_checkpoints: int, num_folded: int
) -> dict[str, Any]:
    """The attributes of a request span; docs/traces.md says what each means."""
    prompt = request.num_prompt_tokens
    cached = request.num_cached_tokens
    attributes = {
        names.OPERATION_NAME: names.TEXT_COMPLETION,
        names.REQUEST_MODEL: request.model_name or None,
        names.REQUEST_ID: request.external_request_id,
        names.CONVERSATION_ID: request.session_id or request.conversation_id,
        names.INPUT_TOKENS: prompt,
        names.OUTPUT_TOKENS: request.num_output_tokens,
        names.CACHE_READ_TOKENS: cached,
        names.CACHE_WRITE_TOKENS: cache_write_tokens(request),
        names.FINISH_REASONS: [request.finish_reason]
        if request.finish_reason
        else None,
        names.ERROR_TYPE: _failure(request),
        names.ENGINE_ID: request.engine_id,
        names.ENGINE_LABEL: request.label or None,
        names.ENGINE_RANK: request.data_parallel_rank,
        names.CORE_REQUEST_ID: request.request_id,
        names.REUSE_DEPTH: cached,
        names.PREFILLED_TOKENS: prefilled_tokens(request),
        names.EXTERNAL_TOKENS: request.num_external_tokens or None,
        names.ATTENTION_DEPTH: request.shared_prefix_boundary,
        names.RECOMPUTED_TOKENS: recomputed_tokens(request),
        names.HIT_LIMITED_BY: request.hit_limited_by,
        names.SOURCE_KIND: request.source_kind,
        names.SOURCE_BOUNDARY: request.source_boundary,
        names.SOURCE_REQUEST_ID: request.source_external_request_id
        or request.source_request_id,
        names.SOURCE_CHECKPOINT_ID: request.source_checkpoint_id,
        names.REQUEST_STATUS: request.status,
        names.REQUEST_INCOMPLETE: request.incomplete or None,
        names.PREEMPTIONS: request.num_preemptions or None,
        names.RETAINED_DEPTH: request.retained_boundary,
        names.RETAINED_KIND: request.retained_kind,
        names.NO_CHECKPOINT_REASON: request.no_checkpoint_reason,
        names.NUM_CHECKPOINTS: num_checkpoints,
        names.NUM_FOLDED: num_folded or None,
    }
    return {key: value for key, value in attributes.items() if value is not None}


def checkpoint_attributes(
    checkpoint: CheckpointRecord, request: RequestRecord
) -> dict[str, Any]:
    """The attributes of a checkpoint span; None where a thing is not known."""
    return {
        names.REQUEST_ID: request.external_request_id,
        names.REQUEST_MODEL: request.model_name or None,
        names.CONVERSATION_ID: request.session_id or request.conversation_id,
        names.ENGINE_ID: request.engine_id,
        names.ENGINE_LABEL: request.label or None,
        names.CHECKPOINT_ID: checkpoint.checkpoint_id,
        names.BOUNDARY: checkpoint.boundary,
        names.BOUNDARY_KIND: checkpoint.boundary_kind,
        names.STAGE: checkpoint.stage,
        names.REASON: checkpoint.discard_reason,
        names.NUM_BLOCKS: checkpoint.num_blocks,
        names.BLOCK_HASH: checkpoint.block_hash,
        names.SUPERSEDES_BOUNDARY: checkpoint.supersedes_boundary,
        names.SUPERSEDES_ID: checkpoint.supersedes_checkpoint_id,
    }


def prefilled_tokens(request: RequestRecord) -> int | None:
    """Prompt tokens that this request had to compute at its first admission."""
    if request.num_prompt_tokens is None or request.num_cached_tokens is None:
        return None
    served = request.num_cached_tokens + (request.num_external_tokens or 0)
    return max(0, request.num_prompt_tokens - served)


def recomputed_tokens(request: RequestRecord) -> int | None:
    """Tokens computed again although their attention was still cached: for want of
    the recurrent state. None where the engine did not tell how deep attention was."""
    depth, cached = request.shared_prefix_boundary, request.num_cached_tokens
    return None if depth is None or cached is None else max(0, depth - cached)


def cache_write_tokens(request: RequestRecord) -> int | None:
    """Prompt tokens that the retained checkpoint newly covers; None where none was
    retained (vLLM may still have cached prompt blocks of its own)."""
    retained, prompt = request.retained_boundary, request.num_prompt_tokens
    if retained is None or prompt is None:
        return None
    return max(0, min(retained, prompt) - (request.num_cached_tokens or 0))


def request_interval(
    request: RequestRecord, checkpoints: Iterable[CheckpointRecord]
) -> tuple[int, int]:
    """Start and end in nanoseconds: what is known best of arrival and finish."""
    start_ns = request.arrival_ns or request.admitted_ns
    if start_ns is None:
        known = [checkpoint_interval(c)[0] for c in checkpoints]
        start_ns = min(known, default=request.finished_ns or request.last_event_ns)
    end_ns = request.finished_ns or request.last_event_ns
    return start_ns, max(start_ns, end_ns)


def checkpoint_interval(checkpoint: CheckpointRecord) -> tuple[int, int]:
    """Start and end in nanoseconds: pinned to published or discarded."""
    end_ns = (
        checkpoint.published_ns or checkpoint.discarded_ns or checkpoint.last_event_ns
    )
    start_ns = checkpoint.pinned_ns or checkpoint.promoted_ns or end_ns
    return start_ns, max(start_ns, end_ns)


def _failure(request: RequestRecord) -> str | None:
    """The ``error.type`` of a request that failed; None for one that did not."""
    if request.status == ENGINE_LOST:
        return ENGINE_LOST
    return ERROR_FINISH if request.finish_reason == ERROR_FINISH else None


def _ids(record: RequestRecord | CheckpointRecord) -> tuple[bytes, bytes]:
    return bytes.fromhex(record.trace_id or ""), bytes.fromhex(record.span_id or "")


def _parent_context(request: RequestRecord) -> Any:
    """The caller's context; None without a valid ``traceparent``."""
    parent = parse_traceparent(request.traceparent)
    if parent is None or request.traceparent is None:
        return None
    flags = int(request.traceparent.strip()[53:55], 16)
    span_context = trace.SpanContext(
        int(parent[0], 16),
        int(parent[1], 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(flags & _SAMPLED),
        trace_state=TraceState.from_header([request.tracestate or ""]),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(span_context))


def _source_link(
    request: RequestRecord, source: CheckpointRecord | None
) -> trace.Link | None:
    """The link to the span of the checkpoint that was resumed from."""
    if source is None or source.trace_id is None or source.span_id is None:
        return None
    return trace.Link(
        trace.SpanContext(
            int(source.trace_id, 16),
            int(source.span_id, 16),
            is_remote=False,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        ),
        {
            names.CHECKPOINT_ID: source.checkpoint_id,
            names.BOUNDARY: source.boundary,
            names.BOUNDARY_KIND: source.boundary_kind,
            names.SOURCE_REQUEST_ID: source.external_request_id or source.request_id,
        },
    )


def _add_link(span: Span, link: trace.Link) -> None:
    added = span.links.add(
        trace_id=link.context.trace_id.to_bytes(16, "big"),
        span_id=link.context.span_id.to_bytes(8, "big"),
        flags=_SAMPLED | _IS_REMOTE_KNOWN,
    )
    set_attributes(added.attributes, link.attributes or {})


def _add_events(span: Span, stages: Iterable[Stage]) -> None:
    for stage in stages:
        event = span.events.add(name=stage.name, time_unix_nano=stage.time_ns)
        set_attributes(event.attributes, stage.attributes)
