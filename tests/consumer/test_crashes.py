"""Nothing is lost or counted twice, whoever dies, on real processes and sockets."""

from __future__ import annotations

import contextlib
import random
import subprocess

import pytest

from event_consumer import tables
from event_consumer.otlp_receiver import OtlpReceiver


def has_all(rows, url: str, endpoint: str, num_events: int) -> bool:
    found = rows(url, tables.streams, endpoint=endpoint)
    return bool(found) and found[0]["num_events"] >= num_events


@pytest.mark.parametrize(
    ("num_events", "num_kills"),
    [(6_000, 3), pytest.param(100_000, 25, marks=pytest.mark.nightly)],
)
def test_a_consumer_killed_at_random_points_leaves_the_same_store(
    start_engine,
    start_consumer,
    tmp_path,
    rows,
    records,
    wait_for,
    num_events,
    num_kills,
):
    """One consumer is left alone, another killed again and again: what they wrote
    of the same stream is the same, row by row."""
    rng = random.Random(num_events)
    quiet, killed = (f"sqlite:///{tmp_path}/{name}.db" for name in ("quiet", "killed"))
    engine = start_engine(events=num_events, rate=num_events / (3 * num_kills))
    start_consumer(quiet, engine)
    seen: list[int] = []
    for target in sorted(rng.sample(range(num_events), num_kills)):
        consumer = start_consumer(killed, engine)
        wait_for(lambda: has_all(rows, killed, engine.endpoint, target))  # noqa: B023
        with contextlib.suppress(subprocess.TimeoutExpired):
            consumer.process.wait(rng.uniform(0.0, 0.2))
        consumer.kill()
        seen.append(rows(killed, tables.streams)[0]["num_events"])
    start_consumer(killed, engine)
    assert engine.said() == {"events": num_events}
    for url in (quiet, killed):
        wait_for(lambda: has_all(rows, url, engine.endpoint, num_events))  # noqa: B023
    assert any(0 < count < num_events for count in seen), "it was killed at work"
    assert records(killed) == records(quiet)
    counts = ("engine_id", "applied_seq", "num_batches", "num_events", "num_lost")
    one, other = (
        {name: rows(url, tables.streams)[0][name] for name in counts}
        for url in (quiet, killed)
    )
    assert one == other
    assert one["num_events"] == num_events
    assert one["num_lost"] == 0
    assert len(rows(quiet, tables.requests)) > num_events // 20
    assert rows(killed, tables.gaps, status="lost") == []


def test_a_killed_engine_takes_its_requests_and_checkpoints_with_it(
    start_engine, start_consumer, sqlite_url, rows, wait_for
):
    """And the one that follows it at the same address starts clean."""
    engine = start_engine(events=2_000)
    start_consumer(sqlite_url, engine, engine_lost_after_s=0.3)
    wait_for(lambda: has_all(rows, sqlite_url, engine.endpoint, 2_000))
    of_engine = {"engine_id": engine.engine_id}
    assert rows(sqlite_url, tables.requests, status="open", **of_engine)
    assert rows(sqlite_url, tables.checkpoints, stage="published", **of_engine)
    assert rows(sqlite_url, tables.checkpoints, stage="promoted", **of_engine)

    engine.kill()
    wait_for(lambda: rows(sqlite_url, tables.engines, status="lost", **of_engine))
    assert not rows(sqlite_url, tables.requests, status="open", **of_engine)
    assert rows(sqlite_url, tables.requests, status="engine_lost", **of_engine)
    for stage in ("pinned", "promoted", "published"):
        assert not rows(sqlite_url, tables.checkpoints, stage=stage, **of_engine)
    assert rows(sqlite_url, tables.checkpoints, stage="gone", **of_engine)
    assert rows(sqlite_url, tables.streams)[0]["state"] == "disconnected"

    lost = rows(sqlite_url, tables.requests, **of_engine)
    second = start_engine(
        seed=1, events=1_000, endpoint=engine.endpoint, replay=engine.replay
    )
    wait_for(lambda: has_all(rows, sqlite_url, engine.endpoint, 3_000))
    assert rows(sqlite_url, tables.requests, **of_engine) == lost
    assert rows(sqlite_url, tables.engines, engine_id=second.engine_id)[0][
        "status"
    ] == ("running")
    stream = wait_for(lambda: rows(sqlite_url, tables.streams, state="live"))[0]
    assert stream["engine_id"] == second.engine_id
    assert stream["num_restarts"] == 1
    assert stream["num_lost"] == 0


def test_an_engine_replaced_while_nobody_consumes_is_lost_too(
    start_engine, start_consumer, sqlite_url, rows, wait_for
):
    engine = start_engine(events=1_000)
    consumer = start_consumer(sqlite_url, engine)
    wait_for(lambda: has_all(rows, sqlite_url, engine.endpoint, 1_000))
    assert consumer.stop() == 0
    engine.kill()
    second = start_engine(
        seed=1, events=1_000, endpoint=engine.endpoint, replay=engine.replay
    )
    start_consumer(sqlite_url, engine)
    wait_for(lambda: has_all(rows, sqlite_url, engine.endpoint, 2_000))
    statuses = {
        row["engine_id"]: row["status"] for row in rows(sqlite_url, tables.engines)
    }
    assert statuses == {engine.engine_id: "lost", second.engine_id: "running"}
    assert not rows(
        sqlite_url, tables.requests, engine_id=engine.engine_id, status="open"
    )


def test_sigterm_commits_what_was_read(
    start_engine, start_consumer, sqlite_url, rows, free_port, wait_for
):
    engine = start_engine(events=1_000)
    consumer = start_consumer(
        sqlite_url, engine, flush_interval_s=60, http=f"127.0.0.1:{free_port}"
    )
    events = "vllm_checkpoint_stream_events_total"
    wait_for(lambda: consumer.metric(events) == 1_000)
    assert rows(sqlite_url, tables.requests) == []
    assert consumer.stop() == 0
    assert consumer.says("Stopped in order")
    assert rows(sqlite_url, tables.streams)[0]["num_events"] == 1_000
    assert len(rows(sqlite_url, tables.requests)) > 100


def test_spans_that_died_with_the_consumer_are_exported_after_all(
    start_engine, start_consumer, sqlite_url, free_port, rows, wait_for
):
    """The collector was away, the consumer was killed; both come back."""
    engine = start_engine(events=600)
    otlp = ("--otlp", f"http://127.0.0.1:{free_port}")
    consumer = start_consumer(sqlite_url, engine, arguments=otlp)
    wait_for(lambda: has_all(rows, sqlite_url, engine.endpoint, 600))
    consumer.kill()
    assert rows(sqlite_url, tables.streams)[0]["state"] != "disconnected"
    expected = {
        r["span_id"] for r in rows(sqlite_url, tables.requests, status="finished")
    }
    with OtlpReceiver(grpc_port=free_port) as receiver:
        consumer = start_consumer(sqlite_url, engine, arguments=otlp)
        wait_for(
            lambda: (
                expected
                == {span.span_id for span in receiver.spans("kv_cache.request")}
            )
        )
        linked = [span for span in receiver.spans("kv_cache.request") if span.links]
        assert linked
        # Stopped in order, it leaves nothing to tell again.
        assert consumer.stop() == 0
        assert rows(sqlite_url, tables.streams)[0]["state"] == "disconnected"
        receiver.clear()
        consumer = start_consumer(sqlite_url, engine, arguments=otlp)
        wait_for(lambda: rows(sqlite_url, tables.streams, state="live"))
        assert consumer.stop() == 0
        assert receiver.spans("kv_cache.request") == []
