"""Names and numbers that no store takes, from a publisher that is not ours."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import msgspec
import pytest

from event_consumer import tables
from event_consumer.storable import make_names_storable, make_storable, storable
from vllm_fork.events import (
    AnyEvent,
    CheckpointDiscarded,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPublished,
    EngineStarted,
    EventBatch,
    EventsDropped,
    PrefixReused,
    RequestEvent,
    RequestFinished,
    seq_to_bytes,
)

CLOCK = {"time_unix_ns": 1_800_000_000_000_000_000, "monotonic_ns": 0}
BAD = "\0\x1b[31m" + "x" * 3_000


def hostile(request_id: str) -> list[AnyEvent]:
    """A life whose every text is more than a store takes."""
    request = {**CLOCK, "request_id": request_id, "traceparent": BAD, "tracestate": BAD}
    named = {**request, "external_request_id": BAD, "session_id": BAD}
    checkpoint = {**named, "boundary": 16, "boundary_kind": BAD}
    return [
        EngineStarted(
            **CLOCK,
            vllm_version=BAD,
            fork_version=BAD,
            retention=BAD,
            retention_reason=BAD,
            exact_tail=BAD,
            publish_on=[BAD],
        ),
        PrefixReused(
            **named,
            num_prompt_tokens=10,
            num_cached_tokens=4,
            hit_limited_by=BAD,
            source_kind=BAD,
            source_request_id=BAD,
            source_external_request_id=BAD,
            source_checkpoint_id=7,
        ),
        CheckpointPinned(**checkpoint, checkpoint_id=1, num_blocks=1),
        CheckpointPublished(**checkpoint, checkpoint_id=1, block_hash=b"\0" * 5_000),
        CheckpointDiscarded(**checkpoint, checkpoint_id=2, reason=BAD),
        CheckpointEvicted(**checkpoint, checkpoint_id=1, reason=BAD, age_s=math.nan),
        RequestFinished(
            **named,
            num_prompt_tokens=10,
            num_cached_tokens=4,
            num_output_tokens=5,
            finish_reason=BAD,
            stop_reason=BAD,
            retained_kind=BAD,
            no_checkpoint_reason=BAD,
        ),
        EventsDropped(**CLOCK, count=2**63 - 1),
        EventsDropped(**CLOCK, count=2**63 - 1),
    ]


def test_every_text_is_made_storable():
    """Each field of each event, and the header: no NUL, and no wider than the column
    that it is written to (:func:`hostile` names every one of them)."""
    events = hostile(BAD)
    batch = EventBatch(1.0, list(events), 0, engine_id=BAD, label=BAD, model_name=BAD)
    make_storable(batch, events)
    for event in events:
        if isinstance(event, RequestEvent):
            make_names_storable(event)
    assert b"\\u0000" not in msgspec.json.encode(batch)
    assert len(batch.engine_id) == 64
    for event in events:
        for field in msgspec.structs.fields(event):
            value = getattr(event, field.name)
            for table in (tables.requests, tables.checkpoints, tables.engines):
                column = table.c.get(field.name)
                width = getattr(getattr(column, "type", None), "length", None)
                if width is not None and isinstance(value, str):
                    assert 0 < len(value) <= width, field.name


def test_names_that_differ_stay_different():
    one, other = (storable("x" * 600 + end, 512) for end in "ab")
    assert one != other
    assert len(one) == len(other) == 512
    assert storable("x" * 512, 512) == "x" * 512


def test_a_hostile_life_is_stored_and_shown(
    raw_publisher, start_consumer, store_url, rows, wait_for
):
    """In SQLite and PostgreSQL alike, and the batches after it are read."""
    publisher = raw_publisher
    consumer = start_consumer(store_url, publisher)
    publisher.greet()
    publisher.send(0, *hostile("\0evil\u202e"), label=BAD, model_name=BAD)
    publisher.send(1, *hostile(BAD), label=BAD, model_name=BAD)
    publisher.send(2, PrefixReused(**CLOCK, request_id=" ", **DEPTHS))
    wait_for(lambda: rows(store_url, tables.streams, applied_seq=2))
    assert consumer.process.poll() is None
    names = [row["request_id"] for row in rows(store_url, tables.requests)]
    assert sorted(names) == sorted(["\ufffdevil\u202e", storable(BAD, 512), " "])
    (stream,) = rows(store_url, tables.streams)
    assert stream["num_undecodable"] == 0
    (engine,) = rows(store_url, tables.engines)
    assert engine["events_dropped"] == 2**62
    for command in ("requests", "traces", "conversations"):
        told = ask(command, store_url)
        assert told.returncode == 0, told.stderr
        assert "\x1b" not in told.stdout
        assert "\u202e" not in told.stdout
    # Without an external id the engine's own is shown, and a blank one is seen.
    assert "' '" in ask("requests", store_url).stdout
    found = json.loads(ask("traces", store_url, "--json").stdout.splitlines()[-1])
    assert found["num_matched"] == 3


DEPTHS = {"num_prompt_tokens": 10, "num_cached_tokens": 0}


def ask(command: str, url: str, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "event_consumer.cli", command, "--store", url, *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("time_s", [math.inf, math.nan, 1e300, -1e300])
def test_a_time_that_is_none_costs_nothing_else(
    serve, raw_publisher, rows, sqlite_url, wait_for, time_s
):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    batch = EventBatch(time_s, [], 0, engine_id=publisher.engine_id)
    publisher.send_frames(seq_to_bytes(0), msgspec.msgpack.encode(batch))
    publisher.send(0)
    publisher.send(1)
    wait_for(lambda: rows(sqlite_url, tables.streams, applied_seq=1))


def test_a_number_that_no_store_takes_is_no_batch(
    serve, raw_publisher, rows, sqlite_url, wait_for
):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0)
    publisher.send(2**63 - 1)
    publisher.send(2**63 - 1, heartbeat=True)
    publisher.send(1)
    wait_for(lambda: rows(sqlite_url, tables.streams, applied_seq=1))
    assert rows(sqlite_url, tables.streams)[0]["num_undecodable"] == 2
