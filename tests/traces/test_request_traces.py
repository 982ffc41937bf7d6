"""What a closed request becomes at a real collector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from event_consumer import names, trace_ids
from event_consumer.otlp import OtlpSettings
from event_consumer.otlp_receiver import OtlpReceiver, ReceivedSpan
from event_consumer.records import ENGINE_LOST, CheckpointRecord, RequestRecord
from event_consumer.tracing import (
    RequestTracer,
    TraceEncoder,
    TraceSettings,
    _Closed,
    fold_superseded,
)

ENGINE = "11111111-2222-3333-4444-555555555555"
SECOND = 1_000_000_000
CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"


@pytest.fixture
def tracer(otlp: OtlpSettings) -> Iterator[RequestTracer]:
    running = RequestTracer(otlp)
    yield running
    running.shutdown(timeout_s=2)


def export(tracer: RequestTracer, *closed: tuple[Any, ...]) -> None:
    for request, checkpoints, source in closed:
        tracer.request_closed(request, checkpoints, source)
    assert tracer.flush(timeout_s=10)


def the_span(receiver: OtlpReceiver, name: str) -> ReceivedSpan:
    (span,) = receiver.spans(name)
    return span


def test_spans_tell_the_request_and_its_checkpoint(
    tracer, receiver, make_request, make_checkpoint
):
    request = make_request(
        source_request_id="chatcmpl-0-0badf00d",
        source_external_request_id="chatcmpl-0",
        source_checkpoint_id=7,
        source_boundary=3168,
    )
    export(tracer, (request, [make_checkpoint(request, 1)], None))
    parent = the_span(receiver, "kv_cache.request")
    child = the_span(receiver, "kv_cache.checkpoint")
    assert parent.parent_span_id == ""
    assert (parent.trace_id, parent.span_id) == (request.trace_id, request.span_id)
    assert (child.trace_id, child.parent_span_id) == (parent.trace_id, parent.span_id)
    # The times are those of the events, in 1970: no clock of ours is in them.
    assert (parent.start_ns, parent.end_ns) == (1 * SECOND, 9 * SECOND)
    assert (child.start_ns, child.end_ns) == (3 * SECOND, 9 * SECOND)
    assert parent.status == child.status == 0
    assert parent.kind == child.kind == 1  # internal
    assert parent.flags == child.flags == 0x101  # sampled; the parent is not remote
    assert parent.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny-hybrid",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.conversation.id": "session-a",
        "gen_ai.usage.input_tokens": 3634,
        "gen_ai.usage.output_tokens": 4080,
        "gen_ai.usage.cache_read.input_tokens": 3168,
        "gen_ai.usage.cache_write.input_tokens": 466,
        "gen_ai.response.finish_reasons": ["stop"],
        "vllm.checkpoint.engine.id": ENGINE,
        "vllm.checkpoint.engine.label": "arm-on",
        "vllm.checkpoint.engine.rank": 0,
        "vllm.prefix_cache.request.id": "chatcmpl-1-0badf00d",
        "vllm.prefix_cache.reuse_depth": 3168,
        "vllm.prefix_cache.prefilled_tokens": 466,
        "vllm.prefix_cache.attention_depth": 3168,
        "vllm.prefix_cache.recomputed_tokens": 0,
        "vllm.prefix_cache.hit_limited_by": "prompt_end",
        "vllm.prefix_cache.source.kind": "decode_block",
        "vllm.prefix_cache.source.boundary": 3168,
        "vllm.prefix_cache.source.request.id": "chatcmpl-0",
        "vllm.prefix_cache.source.checkpoint.id": 7,
        "vllm.prefix_cache.request.status": "finished",
        "vllm.prefix_cache.retained_depth": 7392,
        "vllm.prefix_cache.retained_kind": "decode_block",
        "vllm.checkpoint.count": 1,
    }
    assert child.attributes == {
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.model": "tiny-hybrid",
        "gen_ai.conversation.id": "session-a",
        "vllm.checkpoint.engine.id": ENGINE,
        "vllm.checkpoint.engine.label": "arm-on",
        "vllm.checkpoint.id": 1,
        "vllm.checkpoint.boundary": 7392,
        "vllm.checkpoint.kind": "decode_block",
        "vllm.checkpoint.stage": "published",
        "vllm.checkpoint.blocks": 3,
        "vllm.checkpoint.block_hash": "ab" * 32,
    }
    assert parent.resource["service.name"] == "vllm-checkpoints"
    assert parent.scope == names.SCOPE


def test_a_second_turn_links_to_the_span_that_published_its_checkpoint(
    tracer, receiver, make_request, make_checkpoint
):
    first = make_request("chatcmpl-1")
    published = make_checkpoint(first, 7)
    second = make_request("chatcmpl-2")
    export(tracer, (first, [published], None), (second, [], published))
    one, two = receiver.spans("kv_cache.request")
    child = the_span(receiver, "kv_cache.checkpoint")
    assert one.links == []
    (link,) = two.links
    assert (link.trace_id, link.span_id) == (child.trace_id, child.span_id)
    assert link.attributes == {
        "vllm.checkpoint.id": 7,
        "vllm.checkpoint.boundary": published.boundary,
        "vllm.checkpoint.kind": "decode_block",
        "vllm.prefix_cache.source.request.id": "chatcmpl-1",
    }


def test_a_link_crosses_into_the_trace_that_the_caller_of_the_first_turn_gave(
    tracer, receiver, make_request, make_checkpoint
):
    first = make_request("chatcmpl-1", traceparent=TRACEPARENT)
    published = make_checkpoint(first, 7)
    export(tracer, (first, [published], None), (make_request("two"), [], published))
    (link,) = receiver.spans("kv_cache.request")[1].links
    assert link.trace_id == CALLER_TRACE


def test_under_a_traceparent_the_span_is_a_sibling_of_vllms(
    tracer, receiver, make_request
):
    """vLLM's ``llm_request`` has the same trace, the same parent and the same
    ``gen_ai.request.id``."""
    request = make_request(traceparent=TRACEPARENT, tracestate="vendor=1,other=2")
    export(tracer, (request, [], None))
    span = the_span(receiver, "kv_cache.request")
    assert span.trace_id == CALLER_TRACE
    assert span.parent_span_id == CALLER_SPAN
    assert span.trace_state == "vendor=1,other=2"
    assert span.flags == 0x301  # sampled; the parent is remote
    assert span.attributes["gen_ai.request.id"] == "chatcmpl-1"


@pytest.mark.parametrize(
    "traceparent",
    [f"00-{'0' * 32}-{CALLER_SPAN}-01", "ff" + TRACEPARENT[2:], "nonsense", ""],
)
def test_an_invalid_traceparent_is_ignored(tracer, receiver, make_request, traceparent):
    request = make_request(traceparent=traceparent)
    export(tracer, (request, [], None))
    span = the_span(receiver, "kv_cache.request")
    assert span.parent_span_id == ""
    assert span.trace_id == trace_ids.trace_id(ENGINE, request.request_id)


def test_what_the_caller_does_not_sample_is_not_exported(
    tracer, receiver, make_request, make_checkpoint
):
    unsampled = make_request("quiet", traceparent=TRACEPARENT[:-2] + "00")
    export(
        tracer,
        (unsampled, [make_checkpoint(unsampled, 1)], None),
        (make_request("loud"), [], None),
    )
    span = the_span(receiver, "kv_cache.request")
    assert span.attributes["gen_ai.request.id"] == "loud"
    assert {log.trace_id for log in receiver.logs()} == {span.trace_id}
    assert [stats.num_dropped for stats in tracer.stats()] == [0, 0]


def test_superseded_checkpoints_are_folded_into_a_count(
    tracer, receiver, make_request, make_checkpoint
):
    """The last eight superseded ones and all others keep a span; so does whatever a
    later turn can link to."""
    request = make_request()
    checkpoints = [
        make_checkpoint(request, number, "superseded") for number in range(1, 21)
    ]
    checkpoints.insert(3, make_checkpoint(request, 99, "memory_pressure"))
    checkpoints.append(make_checkpoint(request, 21))
    export(tracer, (request, checkpoints, None))
    shown = [
        span.attributes["vllm.checkpoint.id"]
        for span in receiver.spans("kv_cache.checkpoint")
    ]
    assert shown == [99, *range(13, 22)]
    attributes = the_span(receiver, "kv_cache.request").attributes
    assert attributes["vllm.checkpoint.folded"] == 12
    assert attributes["vllm.checkpoint.count"] == 22
    discarded = receiver.logs("vllm.checkpoint.discarded")
    assert len(discarded) == 9


@given(
    st.lists(st.sampled_from(["superseded", "length", None]), max_size=30),
    st.integers(0, 10),
)
def test_folding_keeps_the_last_superseded_and_all_others(reasons, most):
    checkpoints = [
        CheckpointRecord(
            engine_id="e", checkpoint_id=i, request_id="r", discard_reason=reason
        )
        for i, reason in enumerate(reasons)
    ]
    kept = fold_superseded(checkpoints, most)
    superseded = [c for c in checkpoints if c.discard_reason == "superseded"]
    dropped = superseded[: max(0, len(superseded) - most)]
    assert list(kept) == [c for c in checkpoints if c not in dropped]


def test_stages_are_log_records_of_their_spans(
    tracer, receiver, make_request, make_checkpoint
):
    request = make_request()
    lost = make_checkpoint(request, 1, "superseded")
    kept = make_checkpoint(request, 2, supersedes_checkpoint_id=1)
    export(tracer, (request, [lost, kept], None))
    told = [(log.event_name, log.span_id, log.time_ns) for log in receiver.logs()]
    assert told == [
        ("vllm.prefix_cache.reused", request.span_id, 2 * SECOND),
        ("vllm.checkpoint.pinned", lost.span_id, 3 * SECOND),
        ("vllm.checkpoint.promoted", lost.span_id, 4 * SECOND),
        ("vllm.checkpoint.discarded", lost.span_id, 5 * SECOND),
        ("vllm.checkpoint.pinned", kept.span_id, 3 * SECOND),
        ("vllm.checkpoint.promoted", kept.span_id, 4 * SECOND),
        ("vllm.checkpoint.published", kept.span_id, 9 * SECOND),
    ]
    assert {log.trace_id for log in receiver.logs()} == {request.trace_id}
    (discarded,) = receiver.logs("vllm.checkpoint.discarded")
    assert discarded.attributes["vllm.checkpoint.reason"] == "superseded"
    assert (
        discarded.body == f"checkpoint 1 at token {lost.boundary} discarded: superseded"
    )
    assert not any(span.events for span in receiver.spans())


def test_stages_are_span_events_behind_a_switch(
    otlp, receiver, make_request, make_checkpoint
):
    tracer = RequestTracer(otlp, TraceSettings(span_events=True, log_records=False))
    request = make_request()
    export(tracer, (request, [make_checkpoint(request, 1)], None))
    tracer.shutdown()
    child = the_span(receiver, "kv_cache.checkpoint")
    assert [(event.name, event.time_ns) for event in child.events] == [
        ("vllm.checkpoint.pinned", 3 * SECOND),
        ("vllm.checkpoint.promoted", 4 * SECOND),
        ("vllm.checkpoint.published", 9 * SECOND),
    ]
    assert child.events[0].attributes["vllm.checkpoint.boundary"] == 7392
    (admission,) = the_span(receiver, "kv_cache.request").events
    assert admission.name == "vllm.prefix_cache.reused"
    assert receiver.logs() == []


def test_a_late_eviction_is_a_log_record_of_the_ended_span(
    tracer, receiver, make_request, make_checkpoint
):
    request = make_request()
    checkpoint = make_checkpoint(request, 1)
    export(tracer, (request, [checkpoint], None))
    evicted = make_checkpoint(
        request,
        1,
        stage="evicted",
        evicted_ns=69 * SECOND,
        eviction_reason="lru",
        num_hits=2,
    )
    tracer.checkpoint_evicted(evicted)
    assert tracer.flush(10)
    (log,) = receiver.logs("vllm.checkpoint.evicted")
    assert (log.trace_id, log.span_id) == (checkpoint.trace_id, checkpoint.span_id)
    assert log.time_ns == 69 * SECOND
    assert log.attributes["vllm.checkpoint.age"] == 60.0
    assert log.attributes["vllm.checkpoint.hits"] == 2
    assert log.attributes["vllm.checkpoint.reason"] == "lru"
    assert len(receiver.spans()) == 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"finish_reason": "error"}, "error"),
        (
            {"status": ENGINE_LOST, "finish_reason": None, "finished_ns": None},
            ENGINE_LOST,
        ),
    ],
)
def test_only_a_failed_request_has_an_error_status(
    tracer, receiver, make_request, make_checkpoint, given, error
):
    request = make_request(**given)
    export(tracer, (request, [make_checkpoint(request, 1, "error")], None))
    span = the_span(receiver, "kv_cache.request")
    assert (span.status, span.status_message) == (2, error)
    assert span.attributes["error.type"] == error
    assert the_span(receiver, "kv_cache.checkpoint").status == 0


@pytest.mark.parametrize("reason", ["length", "aborted", "below_block"])
def test_why_nothing_was_retained_is_an_attribute(
    tracer, receiver, make_request, reason
):
    request = make_request(
        retained_boundary=None, retained_kind=None, no_checkpoint_reason=reason
    )
    export(tracer, (request, [], None))
    span = the_span(receiver, "kv_cache.request")
    assert span.attributes["vllm.checkpoint.none_reason"] == reason
    assert "gen_ai.usage.cache_write.input_tokens" not in span.attributes
    assert span.status == 0


def test_recomputed_tokens_are_what_attention_had_and_the_state_had_not(
    tracer, receiver, make_request
):
    request = make_request(
        num_cached_tokens=1056, shared_prefix_boundary=3600, num_external_tokens=16
    )
    export(tracer, (request, [], None))
    attributes = the_span(receiver, "kv_cache.request").attributes
    assert attributes["vllm.prefix_cache.recomputed_tokens"] == 2544
    assert attributes["vllm.prefix_cache.prefilled_tokens"] == 3634 - 1056 - 16


class RecordingSampler(Sampler):
    """Keeps what it is asked, samples what has a link."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any], list[Any]]] = []

    def should_sample(self, parent_context, trace_id, name, *args, **kwargs):
        _, attributes, links = (*args, *(None,) * 3)[:3]
        if links is not None:
            self.asked.append((trace_id, dict(attributes or {}), list(links)))
        sampled = Decision.RECORD_AND_SAMPLE if links else Decision.DROP
        return SamplingResult(sampled, attributes)

    def get_description(self) -> str:
        return "records"


def test_a_sampler_sees_attributes_and_links_at_the_start(
    receiver, make_request, make_checkpoint
):
    sampler = RecordingSampler()
    tracer = RequestTracer(
        OtlpSettings(endpoint=receiver.grpc_url),
        TraceSettings(log_records=False),
        sampler=sampler,
    )
    first = make_request("chatcmpl-1")
    second = make_request("chatcmpl-2")
    source = make_checkpoint(first, 7)
    export(tracer, (first, [source], None), (second, [], source))
    tracer.shutdown()
    assert [trace_id for trace_id, _, _ in sampler.asked] == [
        int(first.trace_id, 16),
        int(second.trace_id, 16),
    ]
    assert sampler.asked[0][1]["vllm.prefix_cache.reuse_depth"] == 3168
    (link,) = sampler.asked[1][2]
    assert link.context.span_id == int(source.span_id, 16)
    assert the_span(receiver, "kv_cache.request").span_id == second.span_id


def test_a_ratio_of_own_traces_is_sampled_whole(
    receiver, make_request, make_checkpoint
):
    """A trace is exported with its children and its log records, or not at all."""
    tracer = RequestTracer(
        OtlpSettings(endpoint=receiver.grpc_url), TraceSettings(sample_ratio=0.3)
    )
    closed = []
    for number in range(400):
        request = make_request(f"chatcmpl-{number}")
        closed.append((request, [make_checkpoint(request, number)], None))
    export(tracer, *closed)
    tracer.shutdown()
    kept = {span.trace_id for span in receiver.spans("kv_cache.request")}
    assert 70 < len(kept) < 180
    assert {span.trace_id for span in receiver.spans("kv_cache.checkpoint")} == kept
    assert {log.trace_id for log in receiver.logs()} == kept


def test_exporting_a_request_twice_gives_the_same_spans(
    receiver, make_request, make_checkpoint
):
    request = make_request()
    for _ in range(2):
        tracer = RequestTracer(OtlpSettings(endpoint=receiver.grpc_url))
        export(tracer, (request, [make_checkpoint(request, 1)], None))
        tracer.shutdown()
    spans = receiver.spans()
    assert spans[:2] == spans[2:]


def test_the_service_can_be_named_by_opentelemetrys_own_variables(
    receiver, make_request, monkeypatch
):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prod-cache")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    tracer = RequestTracer(OtlpSettings(endpoint=receiver.grpc_url))
    export(tracer, (make_request(), [], None))
    tracer.shutdown()
    resource = the_span(receiver, "kv_cache.request").resource
    assert resource["service.name"] == "prod-cache"
    assert resource["deployment.environment.name"] == "prod"


@pytest.mark.parametrize(
    "given", [{"sample_ratio": 1.5}, {"max_superseded_spans": -1}, {"max_queued": 0}]
)
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match=r"must|share"):
        TraceSettings(**given)


times = st.none() | st.integers(1, 20 * SECOND)
counts = st.none() | st.integers(0, 2**31 - 1)


@given(
    request=st.builds(
        RequestRecord,
        engine_id=st.just(ENGINE),
        request_id=st.just("r"),
        trace_id=st.just("1" * 32),
        span_id=st.just("2" * 16),
        arrival_ns=times,
        admitted_ns=times,
        finished_ns=times,
        last_event_ns=st.integers(0, 20 * SECOND),
        num_prompt_tokens=counts,
        num_cached_tokens=counts,
        num_external_tokens=counts,
        shared_prefix_boundary=counts,
        retained_boundary=counts,
        hit_limited_by=st.none() | st.text(max_size=5),
        finish_reason=st.none() | st.text(max_size=5),
        traceparent=st.none() | st.text(max_size=60) | st.just(TRACEPARENT),
        tracestate=st.none() | st.text(max_size=20),
    ),
    checkpoints=st.lists(
        st.builds(
            CheckpointRecord,
            engine_id=st.just(ENGINE),
            checkpoint_id=st.integers(0, 9),
            request_id=st.just("r"),
            trace_id=st.just("1" * 32),
            span_id=st.just("3" * 16),
            pinned_ns=times,
            promoted_ns=times,
            published_ns=times,
            discarded_ns=times,
            evicted_ns=times,
        ),
        max_size=4,
    ),
)
def test_any_life_seen_in_part_becomes_a_valid_trace(
    request: RequestRecord, checkpoints: Sequence[CheckpointRecord]
):
    """Events may be lost: whatever is not known, spans end after they start, every
    child has its parent, and no attribute is empty."""
    encoder = TraceEncoder(
        TraceSettings(span_events=True), sampler=None, resource=Resource({})
    )
    closed = _Closed(request, checkpoints, None, len(checkpoints))
    message, count = encoder.spans([closed])
    spans = message.resource_spans[0].scope_spans[0].spans
    assert count == len(spans) == 1 + len(checkpoints)
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert all(item.value.WhichOneof("value") for item in span.attributes)
    assert all(span.parent_span_id == spans[0].span_id for span in spans[1:])
    encoder.logs([closed])
