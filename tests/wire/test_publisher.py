"""The publisher's live side: order, loss that is counted, and an engine that never
waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from unittest.mock import Mock

import pytest
import zmq
import zmq.auth

from vllm_fork import endpoints
from vllm_fork.events import EngineStarted, EngineStopped, EventBatch, EventsDropped

pytestmark = pytest.mark.timeout(60)


def numbers(batches) -> list[int]:
    return [
        event.time_unix_ns
        for _, decoded in batches
        for event in decoded.events
        if isinstance(event, EngineStopped)
    ]


def dropped(batches) -> list[EventsDropped]:
    return [
        event
        for _, decoded in batches
        for event in decoded.events
        if isinstance(event, EventsDropped)
    ]


def is_number(number: int):
    return lambda e: isinstance(e, EngineStopped) and e.time_unix_ns == number


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def endpoint_of(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_header_and_order(make_publisher, context, wire):
    publisher = make_publisher(label="arm-on", rank=3)
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    for number in range(1, 1001):
        publisher.publish([wire.numbered(number)])
    batches = subscriber.until(is_number(1000))
    assert [seq for seq, _ in batches] == list(range(1, len(batches) + 1))
    assert numbers(batches) == list(range(1, 1001))
    header = batches[0][1].batch
    assert (header.data_parallel_rank, header.engine_id) == (3, "engine-1")
    assert (header.label, header.model_name) == ("arm-on", "tiny")
    assert abs(header.ts - time.time()) < 60


def test_engine_started_is_batch_0(make_publisher, context, wire):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    publisher.publish([wire.numbered(1)])
    wire.wait_for(lambda: publisher.stats().num_sent == 2, "both are sent")
    batches, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    seq, payload = batches[0]
    first = wire.decode(payload).events
    assert seq == 0
    assert [type(event) for event in first] == [EngineStarted]


def test_no_subscriber_costs_nothing_and_loses_nothing(make_publisher, context, wire):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    for number in range(5000):
        publisher.publish([wire.numbered(number)])
    wire.wait_for(lambda: publisher.stats().num_sent == 5001, "all are sent")
    batches, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    decoded = [(seq, wire.decode(payload)) for seq, payload in batches]
    assert numbers(decoded) == list(range(5000))
    assert publisher.stats().num_dropped == 0


@pytest.mark.parametrize(
    ("overflow", "survivors"),
    [("drop_oldest", range(15, 25)), ("drop_newest", range(10))],
)
@pytest.mark.usefixtures("quick_rebind")
def test_full_queue_drops_counts_and_announces(
    make_publisher, context, wire, taken_port, overflow, survivors
):
    """The queue fills because the port is taken; when it is free, batch 0 comes
    first all the same, then the announcement, then what survived."""
    publisher = make_publisher(
        endpoint=endpoint_of(taken_port), queue_size=10, overflow=overflow
    )
    publisher.publish([wire.started()])
    for number in range(25):
        publisher.publish([wire.numbered(number)])
    stats = publisher.stats()
    assert (stats.num_published, stats.num_dropped, stats.num_queued) == (26, 15, 11)
    taken_port.close()
    wire.wait_for(lambda: publisher.stats().num_sent == 11, "the rest is sent")
    batches, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    decoded = [(seq, wire.decode(payload)) for seq, payload in batches]
    assert isinstance(decoded[0][1].events[0], EngineStarted)
    assert isinstance(decoded[1][1].events[0], EventsDropped)
    assert numbers(decoded) == list(survivors)
    assert [event.count for event in dropped(decoded)] == [15]
    assert publisher.stats().num_dropped == 15


@pytest.mark.parametrize("bad", [object(), "\ud800", 2**70])
def test_encode_error_costs_one_event(make_publisher, context, wire, bad):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish(
        [
            wire.numbered(1),
            wire.Unencodable(time_unix_ns=0, monotonic_ns=0, thing=bad),
            wire.numbered(2),
        ]
    )
    batches = subscriber.until(lambda event: isinstance(event, EventsDropped))
    assert numbers(batches) == [1, 2]
    lost = dropped(batches)[0]
    assert (lost.count, lost.num_encode_errors) == (1, 1)
    stats = publisher.stats()
    assert (stats.num_published, stats.num_sent, stats.num_encode_errors) == (4, 3, 1)


def test_batch_of_nothing_but_encode_errors_takes_no_number(
    make_publisher, context, wire
):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish(
        [wire.Unencodable(time_unix_ns=0, monotonic_ns=0, thing=object())]
    )
    seq, decoded = subscriber.next()
    assert seq == 1
    assert [type(event) for event in decoded.events] == [EventsDropped]


@pytest.mark.parametrize("nonsense", [None, 3, [None], [object()]])
def test_publish_never_raises(make_publisher, context, wire, nonsense):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish(nonsense)
    publisher.publish([wire.numbered(7)])
    assert numbers(subscriber.until(is_number(7))) == [7]


@pytest.mark.usefixtures("quick_rebind")
def test_taken_port_is_told_and_tried_again(
    make_publisher, context, wire, taken_port, log, monkeypatch
):
    """The log says so once, not each time."""
    bind = Mock(wraps=endpoints.bind)
    monkeypatch.setattr(endpoints, "bind", bind)
    publisher = make_publisher(endpoint=endpoint_of(taken_port))
    wire.wait_for(lambda: bind.call_count > 4, "it is tried again")
    assert publisher.endpoint is None
    assert publisher.stats().error == (
        f"{endpoint_of(taken_port)} is in use by another process."
    )
    publisher.publish([wire.started()])
    taken_port.close()
    wire.wait_for(lambda: publisher.endpoint is not None, "the port is bound")
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish([wire.numbered(1)])
    assert subscriber.next()[0] == 1
    assert publisher.stats().error is None
    assert " ".join(log).count("is in use by another process") == 1


def test_taken_replay_port_leaves_the_live_stream(
    make_publisher, context, wire, taken_port
):
    publisher = make_publisher(replay_endpoint=endpoint_of(taken_port))
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish([wire.numbered(1)])
    assert subscriber.next()[0] == 1
    assert "in use" in publisher.stats().error


def test_no_replay_endpoint(make_publisher, context, wire):
    publisher = make_publisher(replay_endpoint=None)
    publisher.publish([wire.started()])
    wire.Subscriber(context, publisher.endpoint).wait_connected()
    assert publisher.replay_endpoint is None
    assert publisher.stats().error is None


@pytest.mark.usefixtures("one_event_a_batch")
def test_slow_subscriber_loses_its_own_batches_only(make_publisher, context, wire):
    """30 MB for a reader that does not read: the other one gets all of it, and the
    slow one sees the hole and gets it by asking."""
    publisher = make_publisher(send_hwm=50, heartbeat_s=0.1)
    publisher.publish([wire.started()])
    slow = wire.Subscriber(context, publisher.endpoint, rcvhwm=1).wait_connected()
    quick = wire.Subscriber(context, publisher.endpoint).wait_connected()
    for number in range(1, 301):
        pad = wire.Padded(time_unix_ns=0, monotonic_ns=0, padding=bytes(100_000))
        publisher.publish([pad, wire.numbered(number)])
        batches = quick.until(is_number(number))
        assert numbers(batches) == [number]
    seen = set()
    while slow.socket.poll(0):
        seen.add(wire.seq_from_bytes(slow.frames()[1]))
        time.sleep(0.005)  # let the network deliver what it holds
    missed = set(range(601)) - seen
    assert missed, "the subscriber was not slow enough to miss anything"
    again, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(min(missed))
    assert missed <= {seq for seq, _ in again}


READ_UNTIL_KILLED = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
    print(flush=True)
"""


def test_subscriber_killed_while_reading(make_publisher, context, wire):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    survivor = wire.Subscriber(context, publisher.endpoint).wait_connected()
    victim = subprocess.Popen(
        [sys.executable, "-c", READ_UNTIL_KILLED, publisher.endpoint],
        stdout=subprocess.PIPE,
    )
    victim.stdout.readline()
    for number in range(1, 2001):
        pad = wire.Padded(time_unix_ns=0, monotonic_ns=0, padding=bytes(2000))
        publisher.publish([pad, wire.numbered(number)])
        if number == 1000:
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
    assert numbers(survivor.until(is_number(2000))) == list(range(1, 2001))
    victim.stdout.close()


def test_heartbeat_repeats_the_last_number(make_publisher, context, wire):
    """One that missed the last batch learns it from the heartbeat."""
    publisher = make_publisher()
    publisher.publish([wire.started()])
    publisher.publish([wire.numbered(1)])
    wire.wait_for(lambda: publisher.stats().num_sent == 2, "both are sent")
    last = publisher.stats().num_batches - 1
    late = wire.Subscriber(context, publisher.endpoint)
    for _ in range(2):
        _, seq, payload = late.frames()
        batch: EventBatch = wire.decode(payload).batch
        assert wire.seq_from_bytes(seq) == last
        assert batch.heartbeat
        assert batch.events == []
    assert publisher.stats().num_batches == last + 1


def test_no_heartbeat_before_batch_0(make_publisher, context, wire):
    publisher = make_publisher()
    subscriber = wire.Subscriber(context, publisher.endpoint)
    with pytest.raises(TimeoutError):
        subscriber.frames(timeout_s=0.2)


def test_a_sleeping_thread_is_woken(make_publisher, wire):
    """With a heartbeat a minute away, nothing else would."""
    publisher = make_publisher(heartbeat_s=60)
    for number in range(1, 4):
        publisher.publish([wire.numbered(number)])
        wire.wait_for(lambda n=number: publisher.stats().num_sent == n, "it is sent")
        wire.wait_for(lambda: publisher._asleep, "the thread sleeps")


def test_shutdown_sends_what_is_queued(make_publisher, context, wire):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publisher.publish([wire.numbered(number) for number in range(20_000)])
    publisher.shutdown(timeout_s=5)
    assert numbers(subscriber.until(is_number(19_999))) == list(range(20_000))
    assert publisher.stats().num_queued == 0


@pytest.mark.usefixtures("one_event_a_batch")
def test_shutdown_is_bounded_by_its_time(make_publisher, context, wire):
    """A subscriber that does not read holds it up for no longer than asked for."""
    publisher = make_publisher(queue_size=1000)
    publisher.publish([wire.started()])
    stalled = wire.Subscriber(context, publisher.endpoint, rcvhwm=1).wait_connected()
    for _ in range(200):
        publisher.publish(
            [wire.Padded(time_unix_ns=0, monotonic_ns=0, padding=bytes(100_000))]
        )
    begin = time.monotonic()
    publisher.shutdown(timeout_s=0.3)
    assert 0.2 < time.monotonic() - begin < 1.2
    assert not stalled.socket.closed
    stats = publisher.stats()
    assert stats.num_published == stats.num_sent + stats.num_dropped


def test_shutdown_counts_what_it_could_not_send(make_publisher, wire, taken_port):
    publisher = make_publisher(endpoint=endpoint_of(taken_port))
    publisher.publish([wire.started()])
    publisher.publish([wire.numbered(1)])
    publisher.shutdown(timeout_s=0.05)
    publisher.publish([wire.numbered(2)])
    publisher.shutdown()
    stats = publisher.stats()
    assert (stats.num_published, stats.num_sent, stats.num_dropped) == (3, 0, 3)


def test_shutdown_frees_the_ports(make_publisher, wire):
    publisher = make_publisher()
    publisher.publish([wire.started()])
    publisher.shutdown()
    endpoints.check_free(publisher.endpoint)
    endpoints.check_free(publisher.replay_endpoint)


def test_ranks_offset_their_ports(make_publisher, wire):
    base = free_port_pair()
    publishers = [
        make_publisher(rank=rank, endpoint=f"tcp://127.0.0.1:{base}") for rank in (0, 1)
    ]
    assert [p.endpoint for p in publishers] == [
        f"tcp://127.0.0.1:{base}",
        f"tcp://127.0.0.1:{base + 1}",
    ]


def free_port_pair() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
                return port
            except OSError:
                continue


@pytest.fixture
def ipc(tmp_path) -> str:
    # pytest's own folder may be too deep for a Unix socket.
    path = f"/tmp/vllm-fork-test-{uuid.uuid4().hex[:12]}"
    yield f"ipc://{path}"
    for suffix in ("", "_dp1", "-replay"):
        if os.path.exists(path + suffix):
            os.unlink(path + suffix)


def test_ipc(make_publisher, context, wire, ipc):
    publisher = make_publisher(endpoint=ipc, replay_endpoint=f"{ipc}-replay")
    publisher.publish([wire.started()])
    subscriber = wire.Subscriber(context, ipc).wait_connected()
    publisher.publish([wire.numbered(1)])
    assert subscriber.next()[0] == 1
    assert len(wire.ReplayReader(context, f"{ipc}-replay").replay(0)[0]) == 2
    assert make_publisher(rank=1, endpoint=ipc).endpoint == f"{ipc}_dp1"


def test_ipc_path_in_use_is_not_stolen(make_publisher, context, wire, ipc):
    """libzmq itself would unlink the path and take the first one's readers."""
    first = make_publisher(endpoint=ipc)
    second = make_publisher(endpoint=ipc)
    assert second.endpoint is None
    assert second.stats().error == f"{ipc} is in use by another process."
    first.publish([wire.started()])
    wire.Subscriber(context, ipc).wait_connected()


def test_ipc_path_left_by_a_dead_engine_is_reused(make_publisher, ipc):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(ipc.removeprefix("ipc://"))
    assert make_publisher(endpoint=ipc).endpoint == ipc


def test_curve_admits_known_keys_only(make_publisher, context, wire, tmp_path):
    _, engine_secret = zmq.auth.create_certificates(tmp_path, "engine")
    (tmp_path / "clients").mkdir()
    zmq.auth.create_certificates(tmp_path / "clients", "friend")
    zmq.auth.create_certificates(tmp_path, "stranger")
    server_key, _ = zmq.auth.load_certificate(tmp_path / "engine.key")

    def keys(path):
        public, secret = zmq.auth.load_certificate(path)
        return {
            "curve_serverkey": server_key,
            "curve_publickey": public,
            "curve_secretkey": secret,
        }

    publisher = make_publisher(
        curve_secret_key_file=engine_secret,
        curve_client_keys_dir=str(tmp_path / "clients"),
    )
    publisher.publish([wire.started()])
    friend_keys = keys(tmp_path / "clients" / "friend.key_secret")
    plain = wire.Subscriber(context, publisher.endpoint)
    stranger = wire.Subscriber(
        context, publisher.endpoint, **keys(tmp_path / "stranger.key_secret")
    )
    friend = wire.Subscriber(context, publisher.endpoint, **friend_keys)
    friend.wait_connected()
    publisher.publish([wire.numbered(1)])
    assert friend.next()[0] == 1
    reader = wire.ReplayReader(context, publisher.replay_endpoint, **friend_keys)
    assert len(reader.replay(0)[0]) == 2
    for _ in range(5):
        friend.frames()  # heartbeats: time enough for the others
    assert not plain.socket.poll(0)
    assert not stranger.socket.poll(0)


def test_check_free(taken_port, ipc, make_publisher):
    with pytest.raises(endpoints.EndpointError, match="in use by another process"):
        endpoints.check_free(endpoint_of(taken_port))
    make_publisher(endpoint=ipc)
    with pytest.raises(endpoints.EndpointError, match="in use by another process"):
        endpoints.check_free(ipc)
    with pytest.raises(endpoints.EndpointError, match="cannot be bound"):
        endpoints.check_free("tcp://192.0.2.1:5567")
    endpoints.check_free("tcp://[::1]:0")
