"""Metrics as a collector receives them, and as Prometheus scrapes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from event_consumer.export_queue import ExportStats
from event_consumer.metrics import CheckpointMetrics, StreamHealth
from event_consumer.otlp import OtlpSettings
from event_consumer.otlp_receiver import OtlpReceiver, ReceivedMetric, ReceivedPoint
from event_consumer.records import GAPPED, LIVE, StreamRecord
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

CUMULATIVE = 2
ENGINE_ATTRIBUTES = {
    "vllm.checkpoint.engine.label": "arm-on",
    "gen_ai.request.model": "tiny-hybrid",
    "vllm.checkpoint.engine.rank": 1,
}
BOUNDS = [0.0, *(float(2**n) for n in range(6, 21))]

STREAMS = [
    StreamHealth(
        StreamRecord(
            endpoint="tcp://127.0.0.1:5567",
            state=LIVE,
            lag_ns=250_000_000,
            num_events=100,
            num_replayed=3,
            num_duplicates=4,
            num_unknown=5,
            num_undecodable=6,
            num_dropped=7,
            num_restarts=1,
        ),
        0,
    ),
    StreamHealth(
        StreamRecord(endpoint="tcp://127.0.0.1:5568", state=GAPPED, num_lost=9), 2
    ),
]
EXPORTS = [
    ExportStats("traces", exported=10, dropped={"queue_full": 3}, queued=2),
    ExportStats("logs", exported=20, queued=1),
]

Collect = Callable[[], dict[str, ReceivedMetric]]


def batch(engine_id: str = "engine-1", **given: Any) -> EventBatch:
    header = {"label": "arm-on", "model_name": "tiny-hybrid", "data_parallel_rank": 1}
    return EventBatch(1.0, [], **{"engine_id": engine_id, **header, **given})


def at(request_id: str = "r1") -> dict[str, Any]:
    return {
        "time_unix_ns": 1,
        "monotonic_ns": 1,
        "request_id": request_id,
        "session_id": "secret-session",
    }


def checkpoint(
    kind: type[AnyEvent], number: int, request_id: str = "r1", **given: Any
) -> Any:
    known = {"checkpoint_id": number, "boundary": 1056, "boundary_kind": "exact_tail"}
    return kind(**{**at(request_id), **known, **given})


def finished(request_id: str = "r1", **given: Any) -> RequestFinished:
    known = {
        "num_prompt_tokens": 100,
        "num_output_tokens": 10,
        "num_cached_tokens": 0,
        "finish_reason": "stop",
    }
    return RequestFinished(**{**at(request_id), **known, **given})


@pytest.fixture
def metrics(otlp) -> Iterator[CheckpointMetrics]:
    running = CheckpointMetrics(
        otlp, streams=lambda: STREAMS, exports=lambda: EXPORTS, export_interval_s=3600
    )
    yield running
    running.shutdown(timeout_s=2)


@pytest.fixture
def collect(metrics: CheckpointMetrics, receiver: OtlpReceiver) -> Collect:
    """Push, and return what arrived by name."""

    def pushed() -> dict[str, ReceivedMetric]:
        receiver.clear()
        assert metrics.flush(10)
        return {metric.name: metric for metric in receiver.metrics()}

    return pushed


def point(metric: ReceivedMetric, **attributes: Any) -> ReceivedPoint:
    wanted = {**ENGINE_ATTRIBUTES, **attributes}
    (found,) = [p for p in metric.points if p.attributes == wanted]
    return found


def test_stages_are_counted_by_kind_and_reason(metrics, collect):
    metrics.apply(
        batch(),
        [
            checkpoint(CheckpointPinned, 1, num_blocks=3),
            checkpoint(CheckpointPinned, 2, boundary_kind="copy", num_blocks=3),
            checkpoint(CheckpointPromoted, 1),
            checkpoint(CheckpointDiscarded, 1, reason="superseded"),
            checkpoint(CheckpointDiscarded, 2, boundary_kind="copy", reason="length"),
        ],
    )
    metrics.apply(
        batch(),
        [
            checkpoint(CheckpointPinned, 3, num_blocks=3),
            checkpoint(CheckpointPublished, 3),
            checkpoint(CheckpointEvicted, 3, reason="lru", age_s=7.0, num_hits=2),
            checkpoint(CheckpointEvicted, 0, reason="lru", age_s=70.0),
        ],
    )
    got = collect()
    kind, why = "vllm.checkpoint.kind", "vllm.checkpoint.reason"
    pinned = got["vllm.checkpoint.pinned"]
    assert point(pinned, **{kind: "exact_tail"}).value == 2
    assert point(pinned, **{kind: "copy"}).value == 1
    promoted = got["vllm.checkpoint.promoted"]
    assert point(promoted, **{kind: "exact_tail"}).value == 1
    published = got["vllm.checkpoint.published"]
    assert point(published, **{kind: "exact_tail"}).value == 1
    discarded = got["vllm.checkpoint.discarded"]
    assert point(discarded, **{kind: "exact_tail", why: "superseded"}).value == 1
    assert point(discarded, **{kind: "copy", why: "length"}).value == 1
    evicted = got["vllm.checkpoint.evicted"]
    used = "vllm.checkpoint.used"
    assert point(evicted, **{kind: "exact_tail", why: "lru", used: True}).value == 1
    assert point(evicted, **{kind: "exact_tail", why: "lru", used: False}).value == 1
    age = got["vllm.checkpoint.age"]
    assert point(age, **{used: True}).sum == 7.0
    assert point(age, **{used: False}).bucket_counts == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    for metric in (pinned, promoted, published, discarded, evicted):
        assert (metric.kind, metric.unit) == ("sum", "{checkpoint}")
        assert (metric.monotonic, metric.temporality) == (True, CUMULATIVE)
        assert metric.description


def test_depths_go_into_explicit_buckets(metrics, collect):
    """A bucket holds values up to and including its bound; nothing reused is a bucket
    of its own."""
    for cached in (0, 0, 64, 65, 3168, 2_000_000):
        metrics.apply(
            batch(),
            [
                PrefixReused(
                    **at(),
                    num_prompt_tokens=4000,
                    num_cached_tokens=cached,
                    source_kind="decode_block",
                )
            ],
        )
    metrics.apply(batch(), [finished(retained_boundary=4096, retained_kind="copy")])
    got = collect()
    reuse = got["vllm.prefix_cache.reuse_depth"]
    assert (reuse.kind, reuse.unit, reuse.temporality) == (
        "histogram",
        "{token}",
        CUMULATIVE,
    )
    depths = point(reuse, **{"vllm.prefix_cache.source.kind": "decode_block"})
    assert depths.bounds == BOUNDS
    filled = {i: n for i, n in enumerate(depths.bucket_counts) if n}
    assert filled == {0: 2, 1: 1, 2: 1, BOUNDS.index(4096.0): 1, len(BOUNDS): 1}
    assert (depths.count, depths.sum) == (6, 64 + 65 + 3168 + 2_000_000)
    retained = got["vllm.prefix_cache.retained_depth"]
    left = point(retained, **{"vllm.prefix_cache.retained_kind": "copy"})
    assert left.bucket_counts[BOUNDS.index(4096.0)] == left.count == 1


def test_tokens_are_counted_at_first_admissions_only(metrics, collect):
    reused = {"num_prompt_tokens": 4000, "shared_prefix_boundary": 3600}
    metrics.apply(
        batch(),
        [
            PrefixReused(**at(), **reused, num_cached_tokens=1056),
            PrefixReused(**at(), **reused, num_cached_tokens=3696, resumed=True),
            PrefixReused(**at("r2"), num_prompt_tokens=500, num_cached_tokens=0),
        ],
    )
    got = collect()
    for name, value in (
        ("vllm.prefix_cache.prompt_tokens", 4500),
        ("vllm.prefix_cache.cached_tokens", 1056),
        ("vllm.prefix_cache.recomputed_tokens", 2544),
    ):
        assert got[name].unit == "{token}"
        assert point(got[name]).value == value
    assert sum(p.count for p in got["vllm.prefix_cache.reuse_depth"].points) == 2


def test_requests_are_counted_by_what_they_left(metrics, collect):
    metrics.apply(
        batch(),
        [
            finished("a", retained_boundary=1, retained_kind="exact_tail"),
            finished("b", no_checkpoint_reason="below_block"),
            finished("c", no_checkpoint_reason="below_block"),
        ],
    )
    requests = collect()["vllm.prefix_cache.requests"]
    assert requests.unit == "{request}"
    kept = {"vllm.prefix_cache.retained_kind": "exact_tail"}
    assert point(requests, **kept).value == 1
    none = {"vllm.checkpoint.none_reason": "below_block"}
    assert point(requests, **none).value == 2


def test_pinned_blocks_are_those_held_now(metrics, collect):
    def held() -> float | None:
        metric = collect()["vllm.checkpoint.pinned_blocks"]
        assert (metric.kind, metric.unit, metric.monotonic) == ("sum", "{block}", False)
        return point(metric).value

    metrics.apply(batch(), [checkpoint(CheckpointPinned, 1, num_blocks=3)])
    metrics.apply(batch("engine-2"), [checkpoint(CheckpointPinned, 1, num_blocks=3)])
    assert held() == 6
    metrics.apply(batch(), [checkpoint(CheckpointPinned, 1, num_blocks=3)])
    assert held() == 6
    metrics.apply(batch(), [checkpoint(CheckpointPublished, 1)])
    metrics.apply(batch(), [checkpoint(CheckpointDiscarded, 1, reason="shutdown")])
    assert held() == 3
    metrics.engine_ended("engine-2")
    assert held() == 0


@pytest.mark.parametrize(
    "end",
    [
        finished("r1", no_checkpoint_reason="aborted"),
        EngineStopped(time_unix_ns=1, monotonic_ns=1),
    ],
)
def test_pins_whose_end_was_lost_end_with_their_request_or_engine(
    metrics, collect, end
):
    metrics.apply(batch(), [checkpoint(CheckpointPinned, 1, num_blocks=3), end])
    assert point(collect()["vllm.checkpoint.pinned_blocks"]).value == 0


def test_streams_and_export_tell_their_health(metrics, collect):
    got = collect()
    first = {"vllm.checkpoint.stream.endpoint": "tcp://127.0.0.1:5567"}
    second = {"vllm.checkpoint.stream.endpoint": "tcp://127.0.0.1:5568"}

    def values(name: str) -> dict[tuple[Any, ...], float | None]:
        return {tuple(p.attributes.items()): p.value for p in got[name].points}

    def both(one: float, two: float) -> dict[tuple[Any, ...], float]:
        return {tuple(first.items()): one, tuple(second.items()): two}

    prefix = "vllm.checkpoint.stream."
    assert values(prefix + "events") == both(100, 0)
    assert values(prefix + "replayed") == both(3, 0)
    assert values(prefix + "lost") == both(0, 9)
    assert values(prefix + "duplicates") == both(4, 0)
    assert values(prefix + "dropped") == both(7, 0)
    assert values(prefix + "restarts") == both(1, 0)
    assert values(prefix + "live") == both(1, 0)
    assert values(prefix + "open_gaps") == both(0, 2)
    assert values(prefix + "lag") == {tuple(first.items()): 0.25}
    assert got[prefix + "lag"].unit == "s"
    assert got[prefix + "lost"].unit == "{batch}"
    unreadable = values(prefix + "unreadable")
    assert unreadable[*first.items(), ("vllm.checkpoint.reason", "unknown")] == 5
    assert unreadable[*first.items(), ("vllm.checkpoint.reason", "undecodable")] == 6
    assert values("otel.sdk.exporter.span.exported") == {(): 10}
    assert values("otel.sdk.exporter.log.exported") == {(): 20}
    dropped = (("error.type", "queue_full"),)
    assert values("otel.sdk.processor.span.processed") == {(): 10, dropped: 3}
    assert values("otel.sdk.processor.span.queue.size") == {(): 2}
    assert values("otel.sdk.processor.log.queue.size") == {(): 1}


def everything() -> list[Any]:
    return [
        PrefixReused(**at(), num_prompt_tokens=4000, num_cached_tokens=3168),
        checkpoint(CheckpointPinned, 1, num_blocks=3),
        checkpoint(CheckpointPromoted, 1),
        checkpoint(CheckpointPublished, 1),
        checkpoint(CheckpointDiscarded, 2, reason="length"),
        checkpoint(CheckpointEvicted, 1, reason="lru", age_s=7.0),
        finished(retained_boundary=4096, retained_kind="copy"),
    ]


def test_no_metric_names_a_request_a_session_or_an_engine(metrics, collect):
    metrics.apply(batch("engine-77"), everything())
    for metric in collect().values():
        for each in metric.points:
            text = str(each.attributes)
            assert "secret-session" not in text
            assert "r1" not in each.attributes.values()
            assert "engine-77" not in text


def test_the_scrape_says_the_same_as_the_push(metrics, collect):
    metrics.apply(batch(), everything())
    text, content_type = metrics.prometheus()
    assert content_type.startswith("text/plain")
    scraped = {f.name: f for f in text_string_to_metric_families(text.decode())}
    for metric in collect().values():
        name = metric.name.replace(".", "_") + (
            "_seconds" if metric.unit == "s" else ""
        )
        family = scraped.pop(name)
        if metric.kind == "histogram":
            totals = {s.value for s in family.samples if s.name.endswith("_sum")}
            assert totals == {p.sum for p in metric.points}
            last = [s.value for s in family.samples if s.labels.get("le") == "+Inf"]
            assert sorted(last) == sorted(p.count for p in metric.points)
        else:
            kind = "counter" if metric.monotonic else "gauge"
            assert family.type == kind
            assert sorted(s.value for s in family.samples) == sorted(
                p.value for p in metric.points
            )
    assert set(scraped) == {"target"} or set(scraped) == {"target_info"}


def test_openmetrics_is_spoken_where_it_is_asked_for(metrics):
    text, content_type = metrics.prometheus("application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_nothing_counted_yet_is_no_trouble(otlp, receiver, caplog):
    metrics = CheckpointMetrics(otlp, export_interval_s=3600)
    assert metrics.flush(5)
    metrics.prometheus()
    metrics.shutdown(2)
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []
    assert all(m.name.startswith("vllm.") for m in receiver.metrics())


def test_without_a_collector_it_can_still_be_scraped():
    metrics = CheckpointMetrics()
    metrics.apply(batch(), everything())
    assert b"vllm_checkpoint_pinned_total{" in metrics.prometheus()[0]
    metrics.shutdown(1)


def test_a_collector_that_is_down_does_not_hold_up_the_end():
    metrics = CheckpointMetrics(
        OtlpSettings(endpoint="http://127.0.0.1:9", timeout_s=30),
        export_interval_s=3600,
    )
    metrics.apply(batch(), everything())
    before = time.monotonic()
    metrics.shutdown(timeout_s=1)
    assert time.monotonic() - before < 5
