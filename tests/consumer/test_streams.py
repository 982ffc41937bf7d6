"""The subscriber on real sockets, against publishers that do as they please."""

from __future__ import annotations

import logging
import socketserver
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
import zmq.auth

from event_consumer import subscriber, tables
from event_consumer.store import StoreError
from vllm_fork.events import (
    EngineStarted,
    EventsDropped,
    PrefixReused,
    RequestFinished,
    seq_to_bytes,
)

CLOCK = {"time_unix_ns": 1_800_000_000_000_000_000, "monotonic_ns": 0}


def started() -> EngineStarted:
    return EngineStarted(**CLOCK, vllm_version="0", fork_version="0", retention="on")


def admitted(name: str) -> PrefixReused:
    return PrefixReused(
        **CLOCK, request_id=name, num_prompt_tokens=10, num_cached_tokens=4
    )


def finished(name: str) -> RequestFinished:
    return RequestFinished(
        **CLOCK,
        request_id=name,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=5,
        finish_reason="stop",
    )


@pytest.fixture
def stream(rows, sqlite_url):
    """The row of the only stream."""

    def read():
        found = rows(sqlite_url, tables.streams)
        return found[0] if found else {}

    return read


@pytest.fixture
def names(rows, sqlite_url):
    return lambda: [row["request_id"] for row in rows(sqlite_url, tables.requests)]


def test_what_is_missing_is_asked_for_and_put_in_its_place(
    serve, raw_publisher, stream, names, rows, sqlite_url, wait_for
):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    publisher.send(3, finished("a"))
    wait_for(lambda: stream().get("state") == "gapped")
    assert names() == []
    identity, start = publisher.asked()
    assert start == 1
    missing = {1: publisher.payload(admitted("a")), 2: publisher.payload()}
    publisher.answer(identity, missing, 0, 4)
    wait_for(lambda: stream()["applied_seq"] == 3)
    (request,) = rows(sqlite_url, tables.requests)
    assert request["status"] == "finished"
    assert not request["incomplete"]
    wait_for(lambda: stream()["state"] == "live")
    assert stream()["num_replayed"] == 2
    assert stream()["num_lost"] == 0
    (gap,) = rows(sqlite_url, tables.gaps)
    assert (gap["first_seq"], gap["end_seq"], gap["status"]) == (1, 3, "recovered")


def test_what_left_the_buffer_is_lost_and_shown(
    serve, raw_publisher, stream, rows, sqlite_url, wait_for
):
    """The requests that were open then say that they are incomplete."""
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started(), admitted("before"))
    publisher.send(5, finished("unseen"), admitted("after"))
    identity, _ = publisher.asked()
    publisher.answer(identity, {4: publisher.payload(finished("before"))}, 4, 6)
    wait_for(lambda: stream().get("applied_seq") == 5)
    assert stream()["num_lost"] == 3
    assert stream()["state"] == "live"
    (gap,) = rows(sqlite_url, tables.gaps, status="lost")
    assert (gap["first_seq"], gap["end_seq"]) == (1, 4)
    incomplete = {
        row["request_id"]: row["incomplete"]
        for row in rows(sqlite_url, tables.requests)
    }
    assert incomplete == {"before": True, "unseen": True, "after": False}


def test_a_silent_replay_is_tried_again_and_then_given_up(
    serve, raw_publisher, stream, rows, sqlite_url, wait_for
):
    publisher = raw_publisher
    serve(publisher, replay_timeout_s=0.2, replay_attempts=2)
    publisher.greet()
    publisher.send(0, started())
    publisher.send(2)
    publisher.send(2, heartbeat=True)
    assert publisher.asked()[1] == 1
    assert publisher.asked()[1] == 1
    wait_for(lambda: stream().get("applied_seq") == 2)
    assert stream()["num_lost"] == 1
    assert rows(sqlite_url, tables.gaps, status="open") == []


def test_events_that_the_publisher_dropped_are_counted(
    serve, raw_publisher, stream, rows, sqlite_url, wait_for
):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started(), admitted("a"))
    publisher.send(1, EventsDropped(**CLOCK, count=7))
    wait_for(lambda: stream().get("num_dropped") == 7)
    assert rows(sqlite_url, tables.engines)[0]["events_dropped"] == 7
    assert rows(sqlite_url, tables.requests)[0]["incomplete"]


def test_what_cannot_be_read_costs_itself_and_one_warning(
    serve, raw_publisher, stream, names, wait_for, caplog
):
    """Frames that are no batch, events of unknown types, events that are broken:
    counted, and everything beside them is applied."""
    publisher = raw_publisher
    caplog.set_level(logging.WARNING)
    serve(publisher)
    publisher.greet()
    unknown = {"type": "CheckpointTeleported", "time_unix_ns": 1, "monotonic_ns": 1}
    broken = {"type": "RequestFinished", "request_id": 5}
    more_fields = msgspec.to_builtins(admitted("b")) | {"mood": "good"}
    publisher.send(0, started(), unknown, admitted("a"), broken, more_fields)
    for _ in range(3):
        publisher.send_frames(seq_to_bytes(1), b"\xc1 no msgpack")
    publisher.send_frames(b"short", publisher.payload())
    publisher.send_frames(seq_to_bytes(1))
    publisher.send_frames(seq_to_bytes(1), msgspec.msgpack.encode({"ts": 1}))
    foreign = msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}], 0])
    publisher.send_frames(seq_to_bytes(99), foreign)
    publisher.send(1, admitted("c"))
    wait_for(lambda: stream().get("applied_seq") == 1)
    assert names() == ["a", "b", "c"]
    assert stream()["num_unknown"] == 1
    assert stream()["num_undecodable"] == 1 + 3 + 4
    assert stream()["num_lost"] == 0
    assert stream()["num_restarts"] == 0
    assert len([r for r in caplog.records if "no batch" in r.message]) == 1
    assert len([r for r in caplog.records if "does not decode" in r.message]) == 1
    assert len([r for r in caplog.records if "does not know" in r.message]) == 1


@pytest.mark.parametrize("is_beat", [False, True])
@pytest.mark.parametrize("has_replay", [True, False])
def test_a_number_far_ahead_silences_nothing(
    serve,
    raw_publisher,
    stream,
    names,
    rows,
    sqlite_url,
    wait_for,
    caplog,
    is_beat,
    has_replay,
):
    """One frame in the engine's name: counted, warned of once, and without effect."""
    publisher = raw_publisher
    serve(publisher, endpoint=None if has_replay else {"replay": None})
    if has_replay:
        publisher.greet()
    else:
        wait_for(lambda: stream().get("state") == "live")
    publisher.send(0, started())
    publisher.send(
        10**12, *([] if is_beat else [admitted("forged")]), heartbeat=is_beat
    )
    for seq in range(1, 50):
        publisher.send(seq, admitted(f"r{seq:02}"))
    wait_for(lambda: stream().get("applied_seq") == 49)
    assert names() == [f"r{seq:02}" for seq in range(1, 50)]
    wait_for(lambda: stream()["state"] == "live")
    assert (stream()["num_lost"], stream()["num_undecodable"]) == (0, 1)
    assert rows(sqlite_url, tables.gaps, status="open") == []
    assert rows(sqlite_url, tables.gaps, status="lost") == []
    assert len([r for r in caplog.records if "out of all order" in r.message]) == 1


def test_a_replay_refutes_false_numbers_on_a_quiet_stream(
    serve, raw_publisher, stream, rows, sqlite_url, wait_for
):
    """The engine says nothing more by itself, but answers."""
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    publisher.send(10**12)
    publisher.send(10**12 + 1)
    wait_for(lambda: stream().get("state") == "gapped")
    while stream()["state"] == "gapped":
        identity, first = publisher.asked()
        assert first == 1
        publisher.answer(identity, {}, 0, 1)
        wait_for(lambda: stream()["state"] == "live" or publisher.router.poll(0))
    assert (stream()["applied_seq"], stream()["num_lost"]) == (0, 0)
    assert rows(sqlite_url, tables.gaps, status="lost") == []


def test_an_epoch_that_false_batches_silenced_recovers_by_itself(
    serve, raw_publisher, stream, names, rows, sqlite_url, wait_for
):
    """Two of them, and no replay that could refute them."""
    publisher = raw_publisher
    serve(publisher, endpoint={"replay": None})
    wait_for(lambda: stream().get("state") == "live")
    publisher.send(0, started())
    publisher.send(10**12)
    publisher.send(10**12 + 1)
    wait_for(lambda: stream().get("num_lost") == 10**12 - 1)
    for seq in range(1, 50):
        publisher.send(seq, admitted(f"r{seq:02}"))
    wait_for(lambda: stream().get("applied_seq") == 49)
    assert names() == [f"r{seq:02}" for seq in range(1, 50)]
    assert stream()["num_lost"] == 0
    assert rows(sqlite_url, tables.gaps, status="lost") == []


def test_a_frame_of_100_mb_is_skipped(serve, raw_publisher, stream, names, wait_for):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    publisher.send_frames(seq_to_bytes(1), bytes(100_000_000))
    publisher.send(2, admitted("a"))
    identity, start = publisher.asked()
    assert start == 1
    publisher.answer(identity, {1: bytes(100_000_000)}, 0, 3)
    wait_for(lambda: stream().get("applied_seq") == 2)
    assert names() == ["a"]
    assert stream()["num_undecodable"] == 2
    assert stream()["num_lost"] == 1


def test_the_end_of_a_quiet_stream_is_recovered(
    serve, raw_publisher, stream, names, wait_for
):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    publisher.send(1, heartbeat=True)
    identity, start = publisher.asked()
    assert start == 1
    publisher.answer(identity, {1: publisher.payload(admitted("a"))}, 0, 2)
    wait_for(lambda: stream().get("applied_seq") == 1)
    assert names() == ["a"]


def test_lag_is_the_age_of_the_last_live_batch(serve, raw_publisher, stream, wait_for):
    publisher = raw_publisher
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    lag = wait_for(lambda: stream().get("lag_ns"))
    assert 0 < lag < 5e9
    assert abs(time.time_ns() - stream()["last_batch_ns"]) < 60e9


def test_ipc_endpoints(serve, make_publisher, tmp_path, stream, wait_for):
    publisher = make_publisher(at=f"ipc://{tmp_path}/{{}}")
    serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    wait_for(lambda: stream().get("applied_seq") == 0)
    assert stream()["endpoint"].startswith("ipc://")


@pytest.fixture
def keys():
    public, secret = zmq.curve_keypair()
    server = {
        "curve_server": True,
        "curve_publickey": public,
        "curve_secretkey": secret,
    }
    return public.decode(), server


@pytest.mark.parametrize("form", [lambda key, file: key, lambda key, file: str(file)])
def test_curve_keys_let_us_in(
    serve, make_publisher, keys, tmp_path, stream, wait_for, form
):
    """The engine's public key as text, or as the file that pyzmq writes."""
    key, server = keys
    publisher = make_publisher(**server)
    file = Path(zmq.auth.create_certificates(tmp_path, "engine")[0])
    another = file.read_text().partition('public-key = "')[2].partition('"')[0]
    file.write_text(file.read_text().replace(another, key))
    serve(publisher, endpoint={"curve_server_key": form(key, file)})
    publisher.greet()
    publisher.send(0, started())
    wait_for(lambda: stream().get("applied_seq") == 0)


@pytest.mark.parametrize("ours", [None, "another"])
def test_without_the_right_curve_key_nothing_comes(
    serve, make_publisher, keys, ours, stream, wait_for, caplog
):
    publisher = make_publisher(**keys[1])
    another = zmq.curve_keypair()[0].decode()
    serve(publisher, endpoint={"curve_server_key": another} if ours else None)
    wait_for(lambda: "refused the connection" in caplog.text)
    wait_for(lambda: stream().get("state") == "disconnected")
    publisher.send(0, started())
    assert stream()["num_batches"] == 0


@pytest.fixture
def no_zmq():
    """A port where another protocol is spoken, and how often it was called."""
    calls = []

    class HangsUp(socketserver.BaseRequestHandler):
        def handle(self):
            calls.append(self.client_address)

    with socketserver.TCPServer(("127.0.0.1", 0), HangsUp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}", calls
        server.shutdown()
        thread.join()


def test_a_port_without_zmq_does_not_flood_the_log(
    serve, no_zmq, wait_for, caplog, monkeypatch
):
    """Only changes are told; that nobody ever answered, once."""
    monkeypatch.setattr(subscriber, "CONNECT_WARNING_S", 0.3)
    caplog.set_level(logging.INFO)
    endpoint, calls = no_zmq
    serve(SimpleNamespace(endpoint=endpoint, replay=None))
    wait_for(lambda: "has not connected within 0.3 s" in caplog.text)
    seen = len(calls)
    wait_for(lambda: len(calls) >= seen + 5)
    assert "is disconnected" not in caplog.text
    assert caplog.text.count("has not connected") == 1


def test_who_answered_is_not_said_to_have_not(
    serve, raw_publisher, wait_for, caplog, monkeypatch
):
    monkeypatch.setattr(subscriber, "CONNECT_WARNING_S", 0.3)
    caplog.set_level(logging.INFO)
    serving = serve(raw_publisher)
    wait_for(lambda: "is connected" in caplog.text)
    since = time.monotonic()
    wait_for(lambda: time.monotonic() - since > 0.5)
    raw_publisher.publish.close()
    wait_for(lambda: "is disconnected" in caplog.text)
    assert "has not connected" not in caplog.text
    assert serving.error is None


def test_a_curve_key_that_cannot_be_read_is_one_sentence(
    serve, raw_publisher, wait_for
):
    serving = serve(raw_publisher, endpoint={"curve_server_key": "/no/such.key"})
    wait_for(lambda: serving.error)
    assert "A CURVE key of" in str(serving.error)
    assert "cannot be read" in str(serving.error)


class Sink:
    """Remembers what it is told, slowly."""

    def __init__(self) -> None:
        self.closed = []
        self.evicted = []

    def request_closed(self, request, checkpoints, source):
        self.closed.append((request, checkpoints, source))

    def checkpoint_evicted(self, checkpoint):
        self.evicted.append(checkpoint)

    def untold(self):
        return {}


def test_sinks_are_told_after_the_commit(serve, raw_publisher, names, stream, wait_for):
    publisher = raw_publisher
    sink = Sink()
    serve(publisher, sinks=[sink])
    publisher.greet()
    publisher.send(0, started(), admitted("a"), finished("a"), admitted("b"))
    wait_for(lambda: sink.closed)
    assert names() == ["a", "b"]
    ((request, checkpoints, source),) = sink.closed
    assert (request.request_id, request.status) == ("a", "finished")
    assert checkpoints == []
    assert source is None


def test_while_the_store_refuses_nothing_is_read_and_nothing_lost(
    serve, raw_publisher, names, monkeypatch, wait_for
):
    """A commit that fails is tried again; the batches behind it wait."""
    publisher = raw_publisher
    monkeypatch.setattr("event_consumer.service.MAX_CHANGES", 3)
    monkeypatch.setattr("event_consumer.service.RETRY_S", 0.05)
    serving = serve(publisher)
    publisher.greet()
    publisher.send(0, started())
    wait_for(lambda: serving.service.intake.states[publisher.endpoint].applied_seq == 0)
    store = serving.service._store
    commit = store.commit
    refused = []

    def refuse(changes, marks):
        refused.append(changes)
        raise StoreError("the disk is full")

    monkeypatch.setattr(store, "commit", refuse)
    for seq in range(1, 200):
        publisher.send(seq, admitted(f"r{seq:03}"))
    wait_for(lambda: refused and serving.service.store_error)
    assert serving.service.problems() == ["the disk is full"]
    assert serving.service.intake.ledger.num_changes < 100
    monkeypatch.setattr(store, "commit", commit)
    wait_for(lambda: len(names()) == 199)
    assert serving.service.problems() == []
