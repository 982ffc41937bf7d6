"""Spans a second through the tracer to a local OTLP receiver in another process.

Two arms, interleaved: the tracer (spans built as OTLP messages), and the same spans
through OpenTelemetry's SDK (``Tracer.start_span``, ``BatchSpanProcessor``, the OTLP
gRPC exporter). Each request has two checkpoints, so three spans; the tracer's second
number includes the log records of the stages, seven a request. The median of
``--rounds`` each::

    python benchmarks/tracer.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from event_consumer import names, trace_ids
from event_consumer.otlp import OtlpSettings
from event_consumer.records import (
    DISCARDED,
    FINISHED,
    PUBLISHED,
    CheckpointRecord,
    RequestRecord,
)
from event_consumer.tracing import (
    RequestTracer,
    TraceSettings,
    checkpoint_attributes,
    checkpoint_interval,
    consumer_resource,
    request_attributes,
    request_interval,
)

ENGINE = "00000000-0000-4000-8000-000000000000"
SPANS_A_REQUEST = 3
Closed = tuple[RequestRecord, list[CheckpointRecord], CheckpointRecord | None]


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of a receiver in a process of its own, which keeps nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "event_consumer.otlp_receiver", "--count-only"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["grpc_url"]
    finally:
        process.terminate()
        process.wait()


def closed_requests(count: int) -> list[Closed]:
    """A conversation of ``count`` turns, each of which resumed from the one before."""
    closed: list[Closed] = []
    source = None
    for turn in range(count):
        request, checkpoints = _turn(turn, source)
        closed.append((request, checkpoints, source))
        source = checkpoints[-1]
    return closed


def _turn(
    turn: int, source: CheckpointRecord | None
) -> tuple[RequestRecord, list[CheckpointRecord]]:
    name = f"chatcmpl-{turn:032x}"
    request_id = f"{name}-0badf00d"
    start_ns = 1_700_000_000_000_000_000 + turn * 1_000_000
    request = RequestRecord(
        engine_id=ENGINE,
        request_id=request_id,
        external_request_id=name,
        session_id="session",
        conversation_id="session",
        label="bench",
        model_name="tiny-hybrid",
        data_parallel_rank=0,
        status=FINISHED,
        arrival_ns=start_ns,
        admitted_ns=start_ns + 1_000,
        finished_ns=start_ns + 9_000,
        last_event_ns=start_ns + 9_000,
        num_prompt_tokens=3634,
        num_output_tokens=4080,
        num_cached_tokens=3168,
        num_external_tokens=0,
        shared_prefix_boundary=3168,
        hit_limited_by="prompt_end",
        source_kind="decode_block" if source else "none",
        source_request_id=source.request_id if source else None,
        source_external_request_id=source.external_request_id if source else None,
        source_checkpoint_id=source.checkpoint_id if source else None,
        source_boundary=source.boundary if source else None,
        finish_reason="stop",
        num_preemptions=0,
        num_superseded=1,
        retained_boundary=7392,
        retained_kind="decode_block",
        trace_id=trace_ids.trace_id(ENGINE, request_id),
        span_id=trace_ids.request_span_id(ENGINE, request_id),
    )
    checkpoints = [
        CheckpointRecord(
            engine_id=ENGINE,
            checkpoint_id=number,
            request_id=request_id,
            external_request_id=name,
            stage=PUBLISHED if kept else DISCARDED,
            boundary=7392 if kept else 6336,
            boundary_kind="decode_block",
            num_blocks=3,
            pinned_ns=start_ns + 2_000,
            promoted_ns=start_ns + 3_000,
            published_ns=start_ns + 9_000 if kept else None,
            discarded_ns=None if kept else start_ns + 4_000,
            discard_reason=None if kept else "superseded",
            trace_id=request.trace_id,
            span_id=trace_ids.checkpoint_span_id(ENGINE, number),
            last_event_ns=start_ns + 9_000,
        )
        for number, kept in ((2 * turn, False), (2 * turn + 1, True))
    ]
    return request, checkpoints


def through_tracer(url: str, closed: list[Closed], *, log_records: bool) -> float:
    """Seconds from the first request handed over to the last span acknowledged."""
    settings = TraceSettings(log_records=log_records, max_queued=10_000_000)
    tracer = RequestTracer(OtlpSettings(endpoint=url), settings)
    begin = time.perf_counter()
    for request, checkpoints, source in closed:
        tracer.request_closed(request, checkpoints, source)
    assert tracer.flush(timeout_s=120)
    seconds = time.perf_counter() - begin
    exported = tracer.stats()[0].exported
    assert exported == SPANS_A_REQUEST * len(closed), exported
    tracer.shutdown()
    return seconds


def through_sdk(url: str, closed: list[Closed]) -> float:
    """The same spans, made and exported by the SDK."""
    provider = TracerProvider(resource=consumer_resource(), shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(endpoint=url, insecure=True), max_queue_size=10_000_000
        )
    )
    tracer = provider.get_tracer(names.SCOPE)
    begin = time.perf_counter()
    for request, checkpoints, source in closed:
        start_ns, end_ns = request_interval(request, checkpoints)
        parent = tracer.start_span(
            names.REQUEST_SPAN,
            attributes=request_attributes(request, len(checkpoints), 0),
            links=[_sdk_link(source)] if source else [],
            start_time=start_ns,
        )
        context = trace.set_span_in_context(parent)
        for checkpoint in checkpoints:
            attributes = checkpoint_attributes(checkpoint, request)
            child_start_ns, child_end_ns = checkpoint_interval(checkpoint)
            tracer.start_span(
                names.CHECKPOINT_SPAN,
                context,
                attributes={k: v for k, v in attributes.items() if v is not None},
                start_time=child_start_ns,
            ).end(child_end_ns)
        parent.end(end_ns)
    provider.force_flush()
    seconds = time.perf_counter() - begin
    provider.shutdown()
    return seconds


def _sdk_link(source: CheckpointRecord) -> trace.Link:
    return trace.Link(
        trace.SpanContext(
            int(source.trace_id or "0", 16), int(source.span_id or "0", 16), False
        ),
        {names.CHECKPOINT_ID: source.checkpoint_id, names.BOUNDARY: source.boundary},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    closed = closed_requests(options.requests)
    arms: dict[str, Callable[[str], float]] = {
        "spans_per_s": lambda url: through_tracer(url, closed, log_records=False),
        "spans_per_s_with_logs": lambda url: through_tracer(
            url, closed, log_records=True
        ),
        "sdk_spans_per_s": lambda url: through_sdk(url, closed),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    with receiver() as url:
        for _ in range(options.rounds):
            for name, run in arms.items():
                rates[name].append(SPANS_A_REQUEST * len(closed) / run(url))
    result = {name: round(statistics.median(each)) for name, each in rates.items()}
    if options.json:
        print(json.dumps(result))
        return
    for name, rate in result.items():
        print(f"{name:<24}{rate:>9,} /s")


if __name__ == "__main__":
    main()
