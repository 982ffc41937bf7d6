"""The replay side: what was missed, told without waiting for anybody."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zmq

from vllm_fork import history
from vllm_fork.events import END_OF_REPLAY, seq_to_bytes

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("one_event_a_batch"),
]


def sequence(batches) -> list[int]:
    return [seq for seq, _ in batches]


@pytest.fixture
def publish(wire):
    """Publish batches ``[first, end)`` of one event each and wait until they left."""

    def publish(publisher, first: int, end: int, padding: int = 0) -> None:
        assert publisher.stats().num_batches == first
        events = [
            wire.Padded(time_unix_ns=n, monotonic_ns=0, padding=bytes(padding))
            for n in range(max(first, 1), end)
        ]
        if first == 0:
            publisher.publish([wire.started()])
        publisher.publish(events)
        wire.wait_for(lambda: publisher.stats().num_batches == end, "all are sent")

    return publish


@pytest.mark.parametrize("start", [0, 1, 5, 9])
def test_replays_from_what_is_asked(make_publisher, context, wire, publish, start):
    publisher = make_publisher()
    publish(publisher, 0, 10)
    batches, end = wire.ReplayReader(context, publisher.replay_endpoint).replay(start)
    assert sequence(batches) == list(range(start, 10))
    assert end == {"first_buffered_seq": 0, "next_seq": 10, "engine_id": "engine-1"}


@pytest.mark.parametrize("start", [10, 11, 2**40, -1])
def test_nothing_to_replay_is_said(make_publisher, context, wire, publish, start):
    publisher = make_publisher()
    publish(publisher, 0, 10)
    batches, end = wire.ReplayReader(context, publisher.replay_endpoint).replay(start)
    assert (batches, end["next_seq"]) == ([], 10)


def test_before_batch_0(make_publisher, context, wire):
    publisher = make_publisher()
    batches, end = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    assert (batches, end["next_seq"]) == ([], 0)


def test_a_live_batch_and_its_replay_are_the_same_bytes(
    make_publisher, context, wire, publish
):
    publisher = make_publisher()
    publish(publisher, 0, 1)
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    publish(publisher, 1, 2)
    live = subscriber.frames()
    while live[1] != seq_to_bytes(1):
        live = subscriber.frames()
    reader = wire.ReplayReader(context, publisher.replay_endpoint)
    reader.ask(1)
    assert reader.socket.recv_multipart() == [b"", *live]


def test_older_than_the_buffer_starts_where_it_starts(
    make_publisher, context, wire, publish
):
    publisher = make_publisher(buffer_batches=4)
    publish(publisher, 0, 10)
    batches, end = wire.ReplayReader(context, publisher.replay_endpoint).replay(2)
    assert sequence(batches) == [6, 7, 8, 9]
    assert end["first_buffered_seq"] == 6


def test_buffer_is_bounded_in_bytes(make_publisher, context, wire, publish):
    publisher = make_publisher(buffer_bytes=35_000)
    publish(publisher, 0, 20, padding=10_000)
    assert publisher.stats().num_buffered_bytes <= 35_000
    batches, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    assert sequence(batches) == [17, 18, 19]


def test_a_batch_larger_than_the_buffer(make_publisher, context, wire, publish):
    """It goes out live and cannot be had again; the stream goes on."""
    publisher = make_publisher(buffer_bytes=20_000)
    publish(publisher, 0, 2, padding=100_000)
    assert publisher.stats().num_buffered_bytes == 0
    publish(publisher, 2, 3)
    batches, end = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
    assert sequence(batches) == [2]
    assert end["first_buffered_seq"] == 2


def test_several_readers(make_publisher, context, wire, publish):
    publisher = make_publisher()
    publish(publisher, 0, 500, padding=1000)
    readers = [wire.ReplayReader(context, publisher.replay_endpoint) for _ in range(20)]
    for start, reader in enumerate(readers):
        reader.ask(start)
    for start, reader in enumerate(readers):
        batches, _ = reader.read()
        assert sequence(batches) == list(range(start, 500))


def test_stalled_reader_holds_nobody_up(make_publisher, context, wire, publish):
    """It does not read 30 MB while the live stream and another replay go on; then it
    reads, and has every batch and its end marker."""
    publisher = make_publisher()
    publish(publisher, 0, 300, padding=100_000)
    subscriber = wire.Subscriber(context, publisher.endpoint).wait_connected()
    stalled = wire.ReplayReader(context, publisher.replay_endpoint, rcvhwm=1)
    stalled.ask(0)
    wire.wait_for(
        lambda: publisher.stats().num_replay_requests == 1, "the request is there"
    )
    publish(publisher, 300, 310)
    assert subscriber.next()[0] == 300
    other = wire.ReplayReader(context, publisher.replay_endpoint)
    assert sequence(other.replay(0)[0]) == list(range(310))
    assert publisher.stats().num_replayed_batches < 310 + 300, "it was not stalled"
    batches, _ = stalled.read()
    assert sequence(batches) == list(range(300))


def test_buffer_that_moves_past_a_stalled_reader(
    make_publisher, context, wire, publish
):
    """It sees the jump, the newest of what it asked for, and the end marker."""
    publisher = make_publisher(buffer_batches=150)
    publish(publisher, 0, 150, padding=200_000)
    stalled = wire.ReplayReader(context, publisher.replay_endpoint, rcvhwm=1)
    stalled.ask(0)
    wire.wait_for(
        lambda: publisher.stats().num_replay_requests == 1, "the request is there"
    )
    publish(publisher, 150, 280)
    batches, end = stalled.read()
    got = sequence(batches)
    assert end["first_buffered_seq"] == 130
    assert got == [*range(len(got) - 20), *range(130, 150)]
    assert len(got) < 150, "it was not stalled"


def test_second_request_replaces_the_first(make_publisher, context, wire, publish):
    publisher = make_publisher()
    publish(publisher, 0, 300, padding=100_000)
    reader = wire.ReplayReader(context, publisher.replay_endpoint, rcvhwm=1)
    reader.ask(0)
    wire.wait_for(
        lambda: publisher.stats().num_replayed_batches > 10, "the replay runs"
    )
    reader.ask(299)
    batches, _ = reader.read()
    got = sequence(batches)
    assert got == [*range(len(got) - 1), 299]
    assert not reader.socket.poll(50), "one end marker, not two"


ASK_AND_HANG = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.rcvhwm = 1
socket.connect(sys.argv[1])
socket.send_multipart([b"", bytes(8)])
socket.recv_multipart()
print(flush=True)
time.sleep(600)
"""


def test_killed_reader_is_forgotten(make_publisher, wire, publish):
    publisher = make_publisher()
    publish(publisher, 0, 300, padding=100_000)
    victim = subprocess.Popen(
        [sys.executable, "-c", ASK_AND_HANG, publisher.replay_endpoint],
        stdout=subprocess.PIPE,
    )
    victim.stdout.readline()
    assert publisher.stats().num_replay_readers == 1
    victim.kill()
    victim.wait()
    victim.stdout.close()
    wire.wait_for(
        lambda: publisher.stats().num_replay_readers == 0, "the reader is forgotten"
    )


def test_unfinished_replays_are_bounded(
    make_publisher, context, wire, publish, monkeypatch
):
    """The one that was asked for first goes; it asks again when nothing comes."""
    monkeypatch.setattr(history, "MAX_READERS", 2)
    publisher = make_publisher()
    publish(publisher, 0, 300, padding=100_000)
    readers = []
    for number in range(1, 4):
        reader = wire.ReplayReader(context, publisher.replay_endpoint, rcvhwm=1)
        reader.ask(0)
        readers.append(reader)
        wire.wait_for(
            lambda n=number: publisher.stats().num_replay_requests == n, "it asked"
        )
    assert publisher.stats().num_replay_readers == 2
    for reader in readers[1:]:
        assert sequence(reader.read()[0]) == list(range(300))
    readers[0].ask(299)
    got = sequence(readers[0].read()[0])
    assert got == [*range(len(got) - 1), 299]


@pytest.mark.parametrize(
    "request_frames", [[b"", b"short"], [b"no delimiter!"], [b"", b"", bytes(8), b""]]
)
def test_nonsense_is_answered_with_the_end(
    make_publisher, context, wire, publish, request_frames
):
    publisher = make_publisher()
    publish(publisher, 0, 10)
    reader = wire.ReplayReader(context, publisher.replay_endpoint)
    reader.socket.send_multipart(request_frames)
    assert reader.read()[0] == []
    assert sequence(reader.replay(8)[0]) == [8, 9]


def test_a_req_socket_gets_the_first_batch(make_publisher, context, wire, publish):
    """As with vLLM's own publisher: a REQ socket takes one reply a request."""
    publisher = make_publisher()
    publish(publisher, 0, 3)
    request = context.socket(zmq.REQ)
    request.connect(publisher.replay_endpoint)
    request.send(seq_to_bytes(1))
    assert request.poll(5000)
    assert request.recv_multipart()[1] == seq_to_bytes(1)


def test_vllm_s_own_reader_understands_it(make_publisher, context, wire, publish):
    """The loop of vLLM's example subscriber, with its frame count."""
    publisher = make_publisher()
    publish(publisher, 0, 5)
    replay = context.socket(zmq.DEALER)
    replay.connect(publisher.replay_endpoint)
    replay.send_multipart((b"", (2).to_bytes(8, "big")))
    got = []
    while True:
        _, _, seq_bytes, _ = replay.recv_multipart()
        if seq_bytes == END_OF_REPLAY:
            break
        got.append(int.from_bytes(seq_bytes, "big"))
    assert got == [2, 3, 4]
