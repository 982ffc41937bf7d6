"""What was committed is exported, whoever dies in between and however long ago."""

from __future__ import annotations

import uuid

import pytest

from event_consumer import tables
from event_consumer.export_marks import GRID_NS, KEEP_S, ExportMarks
from event_consumer.otlp_receiver import OtlpReceiver
from event_consumer.records import ClosedRequest, EngineRecord, RequestRecord
from event_consumer.store import ChangeSet, Store
from vllm_fork.events import EngineStarted, PrefixReused, RequestFinished

HOUR_NS = 3_600_000_000_000
T0 = 1_800_000_000 * 1_000_000_000


def closed(at_ns: int, engine_id: str = "e") -> ClosedRequest:
    request = RequestRecord(engine_id=engine_id, request_id="r", last_event_ns=at_ns)
    return ClosedRequest(request, [], None)


def test_a_mark_is_never_after_what_may_be_missing():
    marks = ExportMarks()
    assert marks.update([], {}, 0.0) == {}
    # An engine that was lost ends requests that spoke last an hour ago.
    ended = [closed(T0), closed(T0 - HOUR_NS), closed(T0 + 5)]
    assert marks.update(ended, {}, 0.0)["e"] <= T0 - HOUR_NS
    assert marks.update([], {"e": T0 - 7}, 0.2)["e"] <= T0 - 7
    assert marks.update([], {"e": T0}, 9 * KEEP_S)["e"] <= T0, "however long it waits"


def test_a_mark_follows_the_export_and_goes_at_last():
    marks = ExportMarks()
    marks.update([closed(T0), closed(T0 + HOUR_NS)], {}, 0.0)
    assert marks.update([], {}, 0.2) == {"e": T0 + HOUR_NS}
    assert "e" in marks
    assert marks.update([], {}, KEEP_S) == {}
    assert "e" not in marks


def test_few_commits_move_a_mark():
    marks = ExportMarks()
    found = [
        marks.update([closed(T0 + n * GRID_NS // 50)], {}, n / 5)["e"]
        for n in range(100)
    ]
    assert len(set(found)) == 2


def test_marks_are_kept_with_the_rows_by_endpoint(store_url):
    long_id = "e" * 64
    engines = [
        EngineRecord(engine_id=long_id, endpoint="mine"),
        EngineRecord(engine_id="other", endpoint="another's"),
    ]
    with Store(store_url) as store:
        store.commit(ChangeSet.of(engines=engines), {long_id: 1, "other": 2})
        store.commit(ChangeSet.of(), {long_id: 3, "other": 2})
    with Store(store_url) as store:
        assert store.load_marks(["mine"]) == {long_id: 3}
        store.commit(ChangeSet.of())
        assert store.load_marks(["mine"]) == {long_id: 3}
        store.commit(ChangeSet.of(), {})
        assert store.load_marks(["mine"]) == {}
        assert store.load_marks(["another's"]) == {"other": 2}, "not ours to delete"


def life(number: int) -> list[object]:
    """A request that ends ``number`` hours after the first."""
    clock = {
        "time_unix_ns": T0 + number * HOUR_NS,
        "monotonic_ns": number * HOUR_NS,
        "request_id": f"r{number}",
    }
    depths = {"num_prompt_tokens": 10, "num_cached_tokens": 0}
    return [
        PrefixReused(**clock, **depths),
        RequestFinished(**clock, **depths, num_output_tokens=1, finish_reason="stop"),
    ]


STARTED = EngineStarted(
    time_unix_ns=T0, monotonic_ns=0, vllm_version="0", fork_version="0", retention="on"
)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_what_was_committed_hours_ago_and_not_exported_is_exported_by_the_next(
    raw_publisher, start_consumer, store_url, free_port, rows, wait_for, how
):
    """The collector was away all the time, the engine was started again meanwhile, and
    the consumer was killed or stopped; whatever was committed arrives, once."""
    publisher = raw_publisher
    otlp = ("--otlp", f"http://127.0.0.1:{free_port}")
    consumer = start_consumer(store_url, publisher, arguments=otlp)
    publisher.greet()
    publisher.send(0, STARTED, *life(0), *life(1))
    publisher.send(1, *life(2))
    wait_for(lambda: len(rows(store_url, tables.requests, status="finished")) == 3)
    publisher.engine_id = str(uuid.uuid4())
    publisher.send(0, STARTED, *life(3))
    publisher.send(1, *life(4))
    wait_for(lambda: len(rows(store_url, tables.requests, status="finished")) == 5)
    consumer.kill() if how == "kill" else consumer.stop()
    expected = {row["span_id"] for row in rows(store_url, tables.requests)}
    assert len(expected) == 5

    def exported():
        return [span.span_id for span in receiver.spans("kv_cache.request")]

    with OtlpReceiver(grpc_port=free_port) as receiver:
        consumer = start_consumer(store_url, publisher, arguments=otlp)
        wait_for(lambda: set(exported()) == expected)
        assert consumer.stop() == 0
        assert len(exported()) == 5
        assert not [m for m in rows(store_url, tables.meta) if "untold" in m["key"]]
        receiver.clear()
        consumer = start_consumer(store_url, publisher, arguments=otlp)
        wait_for(
            lambda: (
                rows(store_url, tables.streams, state="live")
                or rows(store_url, tables.streams, state="replaying")
            )
        )
        assert consumer.stop() == 0
        assert exported() == []


def test_without_export_no_marks_are_kept(
    serve, raw_publisher, rows, sqlite_url, wait_for
):
    """Should it be switched on again, the past is not told."""
    publisher = raw_publisher
    with Store(sqlite_url) as store:
        engine = EngineRecord(engine_id="old", endpoint=publisher.endpoint)
        store.commit(ChangeSet.of(engines=[engine]), {"old": 1})
    serve(publisher)
    publisher.greet()
    publisher.send(0, STARTED)
    wait_for(lambda: rows(sqlite_url, tables.streams, applied_seq=0))
    assert not [m for m in rows(sqlite_url, tables.meta) if "untold" in m["key"]]
