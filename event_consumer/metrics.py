"""The metrics of the consumer: what the caches do, how the streams and the export are.

Counters are kept as plain integers and read when a reader collects (observable
instruments), so that an event costs one dictionary increment; depths and ages go
into histograms with explicit buckets (:mod:`event_consumer.histograms`). One set of
instruments feeds both OTLP and the Prometheus text of the service's ``/metrics``.

Attributes are few and bounded: the engine's label, model and data-parallel rank, and
the kinds and reasons of :mod:`vllm_fork.events`. Never a request or session id, and
no engine id: it is another one at every start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import grpc
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
    OTLPMetricExporter as GrpcMetricExporter,
)
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
    OTLPMetricExporter as HttpMetricExporter,
)
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from event_consumer import names
from event_consumer.export_queue import ExportStats
from event_consumer.histograms import (
    BucketHistogram,
    HistogramCollector,
    HistogramExporter,
    Labels,
)
from event_consumer.otlp import GRPC, OtlpSettings, channel_credentials
from event_consumer.records import LIVE, StreamRecord
from event_consumer.tracing import consumer_resource
from vllm_fork.events import (
    AnyEvent,
    CheckpointDiscarded,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStopped,
    EventBatch,
    PrefixReused,
    RequestFinished,
)

DEPTH_BUCKETS: Final = (0, *(2**n for n in range(6, 21)))
"""Tokens: 0 (nothing), then powers of two from 64 to 1,048,576."""
AGE_BUCKETS: Final = (1, 5, 15, 60, 300, 900, 3_600, 14_400, 86_400)
"""Seconds, from a second to a day."""
EXPORT_INTERVAL_S: Final = 15.0

_Attributes = dict[str, str | bool | int]


class StreamHealth(NamedTuple):
    """One endpoint, as a reader of metrics finds it."""

    stream: StreamRecord
    num_open_gaps: int


class _Series:
    """The counts of one label, model and rank."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.attributes: _Attributes = dict(labels)
        self.counts: defaultdict[tuple[str, Labels], int] = defaultdict(int)


class _Pins:
    """The blocks that one engine's checkpoints hold now."""

    def __init__(self, series: _Series) -> None:
        self.series = series
        self.num_blocks = 0
        self._of_request: dict[str, dict[int, int]] = {}

    def add(self, request_id: str, checkpoint_id: int, num_blocks: int) -> None:
        held = self._of_request.setdefault(request_id, {})
        if checkpoint_id not in held:
            held[checkpoint_id] = num_blocks
            self.num_blocks += num_blocks

    def release(self, request_id: str, checkpoint_id: int) -> None:
        held = self._of_request.get(request_id)
        if held is not None:
            self.num_blocks -= held.pop(checkpoint_id, 0)
            if not held:
                del self._of_request[request_id]

    def release_all(self, request_id: str) -> None:
        """The request is over, and its pins with it, whatever events were lost."""
        self.num_blocks -= sum(self._of_request.pop(request_id, {}).values())


class CheckpointMetrics:
    """Counts events, and answers the readers. :meth:`apply` and
    :meth:`engine_ended` are for one thread; everything else is thread-safe."""

    def __init__(
        self,
        otlp: OtlpSettings | None = None,
        *,
        streams: Callable[[], Iterable[StreamHealth]] = tuple,
        exports: Callable[[], Iterable[ExportStats]] = tuple,
        resource: Resource | None = None,
        export_interval_s: float = EXPORT_INTERVAL_S,
    ) -> None:
        """
        Args:
            otlp: where to push the metrics; None: they can only be scraped.
            streams: the state of each endpoint now. Called on a reader's thread.
            exports: the counts of the tracer. Called on a reader's thread.
            export_interval_s: seconds between two pushes.
        """
        self._streams = streams
        self._exports = exports
        self._series: dict[tuple[str, str, int], _Series] = {}
        self._pins: dict[str, _Pins] = {}
        self._reuse_depth = BucketHistogram(
            names.REUSE_DEPTH,
            "{token}",
            "Prompt tokens served from the prefix cache at a first admission",
            DEPTH_BUCKETS,
        )
        self._retained_depth = BucketHistogram(
            names.RETAINED_DEPTH,
            "{token}",
            "Deepest boundary that a finished request left in the prefix cache",
            DEPTH_BUCKETS,
        )
        self._age = BucketHistogram(
            names.AGE,
            "s",
            "Time from a checkpoint's publication to its eviction",
            AGE_BUCKETS,
        )
        histograms = (self._reuse_depth, self._retained_depth, self._age)
        self._registry = CollectorRegistry()
        self._registry.register(HistogramCollector(histograms))
        readers: list[MetricReader] = [
            PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
        ]
        if otlp is not None:
            readers.append(
                PeriodicExportingMetricReader(
                    HistogramExporter(_metric_exporter(otlp), histograms),
                    export_interval_millis=export_interval_s * 1e3,
                    export_timeout_millis=otlp.timeout_s * 1e3,
                )
            )
        self._provider = MeterProvider(
            readers,
            resource or consumer_resource(),
            shutdown_on_exit=False,
        )
        self._create_instruments()
        self._handlers: dict[type, Callable[[_Pins, Any], None]] = {
            CheckpointPinned: self._pinned,
            CheckpointPromoted: self._promoted,
            CheckpointPublished: self._published,
            CheckpointDiscarded: self._discarded,
            CheckpointEvicted: self._evicted,
            PrefixReused: self._prefix_reused,
            RequestFinished: self._request_finished,
        }

    # -- in ------------------------------------------------------------------

    def apply(self, batch: EventBatch, events: Iterable[AnyEvent]) -> None:
        """Count the events of one batch. Each batch must come once."""
        pins = self._pins.get(batch.engine_id)
        if pins is None:
            pins = self._pins[batch.engine_id] = _Pins(self._series_of(batch))
        handlers = self._handlers
        for event in events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(pins, event)
            elif type(event) is EngineStopped:
                self.engine_ended(batch.engine_id)

    def engine_ended(self, engine_id: str) -> None:
        """The engine stopped or was lost: nothing is pinned in it any more."""
        self._pins.pop(engine_id, None)

    def _series_of(self, batch: EventBatch) -> _Series:
        rank = batch.data_parallel_rank or 0
        key = (batch.label, batch.model_name, rank)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series(
                (
                    (names.ENGINE_LABEL, batch.label),
                    (names.REQUEST_MODEL, batch.model_name),
                    (names.ENGINE_RANK, rank),
                )
            )
        return series

    def _pinned(self, pins: _Pins, event: CheckpointPinned) -> None:
        kind = ((names.BOUNDARY_KIND, event.boundary_kind),)
        pins.series.counts[names.PINNED, kind] += 1
        pins.add(event.request_id, event.checkpoint_id, event.num_blocks)

    def _promoted(self, pins: _Pins, event: CheckpointPromoted) -> None:
        kind = ((names.BOUNDARY_KIND, event.boundary_kind),)
        pins.series.counts[names.PROMOTED, kind] += 1

    def _published(self, pins: _Pins, event: CheckpointPublished) -> None:
        kind = ((names.BOUNDARY_KIND, event.boundary_kind),)
        pins.series.counts[names.PUBLISHED, kind] += 1
        pins.release(event.request_id, event.checkpoint_id)

    def _discarded(self, pins: _Pins, event: CheckpointDiscarded) -> None:
        why = ((names.BOUNDARY_KIND, event.boundary_kind), (names.REASON, event.reason))
        pins.series.counts[names.DISCARDED, why] += 1
        pins.release(event.request_id, event.checkpoint_id)

    def _evicted(self, pins: _Pins, event: CheckpointEvicted) -> None:
        why = (
            (names.BOUNDARY_KIND, event.boundary_kind),
            (names.REASON, event.reason),
            (names.USED, event.num_hits > 0),
        )
        pins.series.counts[names.EVICTED, why] += 1
        self._age.add(event.age_s, (*pins.series.labels, why[2]))

    def _prefix_reused(self, pins: _Pins, event: PrefixReused) -> None:
        if event.resumed:
            return  # a re-admission says nothing about the cache's worth
        series = pins.series
        cached = event.num_cached_tokens
        series.counts[names.PROMPT_TOKENS, ()] += event.num_prompt_tokens
        series.counts[names.CACHED_TOKENS, ()] += cached
        depth = event.shared_prefix_boundary
        if depth is not None and depth > cached:
            series.counts[names.RECOMPUTED_TOKENS, ()] += depth - cached
        source = (names.SOURCE_KIND, event.source_kind)
        self._reuse_depth.add(cached, (*series.labels, source))

    def _request_finished(self, pins: _Pins, event: RequestFinished) -> None:
        series = pins.series
        pins.release_all(event.request_id)
        if event.retained_boundary is None:
            left = ((names.NO_CHECKPOINT_REASON, event.no_checkpoint_reason or ""),)
        else:
            left = ((names.RETAINED_KIND, event.retained_kind or ""),)
            self._retained_depth.add(event.retained_boundary, series.labels + left)
        series.counts[names.REQUESTS, left] += 1

    # -- out -----------------------------------------------------------------

    def prometheus(self, accept: str = "") -> tuple[bytes, str]:
        """The body and the content type that answer a scrape with this ``Accept``."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Push now; whether it was done in time."""
        return self._provider.force_flush(timeout_s * 1e3)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Push a last time, within about ``timeout_s`` seconds."""
        self._provider.shutdown(timeout_s * 1e3)

    def _create_instruments(self) -> None:
        meter = self._provider.get_meter(names.SCOPE)
        for name, unit, description in _COUNTERS:
            meter.create_observable_counter(
                name, [self._reads(name)], unit, description
            )
        meter.create_observable_up_down_counter(
            names.PINNED_BLOCKS,
            [self._pinned_blocks],
            "{block}",
            "Blocks held now by checkpoints that are neither published nor discarded",
        )
        for name, unit, description, value in _STREAM_COUNTERS:
            meter.create_observable_counter(
                name, [self._reads_streams(value)], unit, description
            )
        for name, unit, description, value in _STREAM_GAUGES:
            meter.create_observable_gauge(
                name, [self._reads_streams(value)], unit, description
            )
        for name, unit, description, values in _EXPORT_COUNTERS:
            meter.create_observable_counter(
                name, [self._reads_exports(unit, values)], unit, description
            )
        for name, unit, description, values in _EXPORT_GAUGES:
            meter.create_observable_up_down_counter(
                name, [self._reads_exports(unit, values)], unit, description
            )

    def _reads(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterator[Observation]:
            # list(): the counting thread goes on meanwhile.
            for series in list(self._series.values()):
                for (counter, extra), count in list(series.counts.items()):
                    if counter == name:
                        yield Observation(count, {**series.attributes, **dict(extra)})

        return read

    def _pinned_blocks(self, _: CallbackOptions) -> Iterator[Observation]:
        held = {id(series): 0 for series in list(self._series.values())}
        for pins in list(self._pins.values()):
            held[id(pins.series)] = held.get(id(pins.series), 0) + pins.num_blocks
        for series in list(self._series.values()):
            yield Observation(held.get(id(series), 0), dict(series.attributes))

    def _reads_streams(
        self, value: Callable[[StreamHealth], Iterable[tuple[float, _Attributes]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterator[Observation]:
            for health in self._streams():
                endpoint = {names.STREAM_ENDPOINT: health.stream.endpoint}
                for number, extra in value(health):
                    yield Observation(number, {**endpoint, **extra})

        return read

    def _reads_exports(
        self,
        unit: str,
        values: Callable[[ExportStats], Iterable[tuple[int, _Attributes]]],
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        signal = "traces" if unit == "{span}" else "logs"

        def read(_: CallbackOptions) -> Iterator[Observation]:
            for stats in self._exports():
                if stats.signal == signal:
                    for number, extra in values(stats):
                        yield Observation(number, extra)

        return read


def _metric_exporter(otlp: OtlpSettings) -> MetricExporter:
    """The SDK's own exporter: what a lost push did not tell, the next one does."""
    zipped = otlp.compression == "gzip"
    if otlp.resolved_protocol == GRPC:
        secure = otlp.endpoint.startswith("https:")
        return GrpcMetricExporter(
            endpoint=otlp.endpoint,
            insecure=not secure,
            credentials=channel_credentials(otlp) if secure else None,
            headers=dict(otlp.headers),
            timeout=otlp.timeout_s,
            compression=grpc.Compression.Gzip if zipped else None,
        )
    return HttpMetricExporter(
        endpoint=otlp.http_url("metrics"),
        certificate_file=otlp.certificate_file,
        headers=dict(otlp.headers),
        timeout=otlp.timeout_s,
        compression=Compression.Gzip if zipped else None,
    )


_COUNTERS: Final = (
    (names.PINNED, "{checkpoint}", "Checkpoints whose blocks were reserved"),
    (names.PROMOTED, "{checkpoint}", "Checkpoints whose state was materialized"),
    (names.PUBLISHED, "{checkpoint}", "Checkpoints that entered the prefix cache"),
    (names.DISCARDED, "{checkpoint}", "Checkpoints released without publication"),
    (names.EVICTED, "{checkpoint}", "Published checkpoints that left the cache"),
    (names.REQUESTS, "{request}", "Requests that ended, by what they left behind"),
    (names.PROMPT_TOKENS, "{token}", "Prompt tokens of first admissions"),
    (names.CACHED_TOKENS, "{token}", "Those of them served from the prefix cache"),
    (
        names.RECOMPUTED_TOKENS,
        "{token}",
        "Prompt tokens computed again for want of the recurrent state",
    ),
)

_STREAM_COUNTERS: Final[tuple[tuple[str, str, str, Any], ...]] = (
    (
        names.STREAM_EVENTS,
        "{event}",
        "Events applied",
        lambda h: [(h.stream.num_events, {})],
    ),
    (
        names.STREAM_REPLAYED,
        "{batch}",
        "Batches recovered from a publisher's replay buffer",
        lambda h: [(h.stream.num_replayed, {})],
    ),
    (
        names.STREAM_LOST,
        "{batch}",
        "Batches that could not be recovered",
        lambda h: [(h.stream.num_lost, {})],
    ),
    (
        names.STREAM_DUPLICATES,
        "{batch}",
        "Batches that came again and were left out",
        lambda h: [(h.stream.num_duplicates, {})],
    ),
    (
        names.STREAM_UNREADABLE,
        "{event}",
        "Events of an unknown type, and events or frames that do not decode",
        lambda h: [
            (h.stream.num_unknown, {names.REASON: "unknown"}),
            (h.stream.num_undecodable, {names.REASON: "undecodable"}),
        ],
    ),
    (
        names.STREAM_DROPPED,
        "{event}",
        "Events that the publisher announced as dropped",
        lambda h: [(h.stream.num_dropped, {})],
    ),
    (
        names.STREAM_RESTARTS,
        "{restart}",
        "New epochs seen on the endpoint",
        lambda h: [(h.stream.num_restarts, {})],
    ),
)

_STREAM_GAUGES: Final[tuple[tuple[str, str, str, Any], ...]] = (
    (
        names.STREAM_LAG,
        "s",
        "Time from the making of the last batch to its receipt",
        lambda h: (
            [] if h.stream.lag_ns is None else [(max(0.0, h.stream.lag_ns / 1e9), {})]
        ),
    ),
    (
        names.STREAM_LIVE,
        "{stream}",
        "1 while the stream is connected and in order, else 0",
        lambda h: [(int(h.stream.state == LIVE), {})],
    ),
    (
        names.STREAM_OPEN_GAPS,
        "{gap}",
        "Gaps that are neither recovered nor given up",
        lambda h: [(h.num_open_gaps, {})],
    ),
)


def _exported(stats: ExportStats) -> Iterator[tuple[int, _Attributes]]:
    yield stats.exported, {}


def _processed(stats: ExportStats) -> Iterator[tuple[int, _Attributes]]:
    """What left the queue: exported, or dropped with the reason."""
    yield stats.exported, {}
    for reason, count in stats.dropped.items():
        yield count, {names.ERROR_TYPE: reason}


def _queued(stats: ExportStats) -> Iterator[tuple[int, _Attributes]]:
    yield stats.queued, {}


_EXPORT_COUNTERS: Final = (
    (
        names.SPANS_EXPORTED,
        "{span}",
        "Spans that the collector took",
        _exported,
    ),
    (
        names.LOGS_EXPORTED,
        "{log_record}",
        "Log records that the collector took",
        _exported,
    ),
    (
        names.SPANS_PROCESSED,
        "{span}",
        "Spans that left the queue; with error.type, dropped",
        _processed,
    ),
    (
        names.LOGS_PROCESSED,
        "{log_record}",
        "Log records that left the queue; with error.type, dropped",
        _processed,
    ),
)

_EXPORT_GAUGES: Final = (
    (names.SPAN_QUEUE_SIZE, "{span}", "Spans that wait for the collector", _queued),
    (
        names.LOG_QUEUE_SIZE,
        "{log_record}",
        "Log records that wait for the collector",
        _queued,
    ),
)
