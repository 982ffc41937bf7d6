"""A process that holds a whole stream in memory, encoded, and sends it on a word.

Nothing is dropped on its side (no high-water mark), so that what is measured is the
reader. Speaks like scripted_engine.py: one line of JSON once it is bound, then sends
when a line comes on stdin, and says when; stays up until stdin closes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec
import zmq
from lifecycles import Lifecycles, batches

from vllm_fork.events import DEFAULT_TOPIC, END_OF_REPLAY, EventBatch, seq_to_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stream", type=Path, help="file that write_stream() made")
    parser.add_argument("--events", type=int, help="at most so many")
    parser.add_argument("--rate", type=float, default=0, help="events/s; 0: no pause")
    args = parser.parse_args()

    stream = read_stream(args.stream)
    engine_id = stream.engine_id
    topic = DEFAULT_TOPIC.encode()
    num_frames = len(stream.payloads)
    if args.events is not None:
        num_frames = min(num_frames, args.events // stream.events_a_frame + 1)
    frames = [
        (topic, seq_to_bytes(seq), payload)
        for seq, payload in enumerate(stream.payloads[:num_frames])
    ]
    beat = payload_of([], engine_id, heartbeat=True)
    context = zmq.Context()
    publish, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    for socket in (publish, router):
        socket.sndhwm = 0
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
    say(
        endpoint=publish.getsockopt_string(zmq.LAST_ENDPOINT),
        replay=router.getsockopt_string(zmq.LAST_ENDPOINT),
        engine_id=engine_id,
        frames=len(frames),
    )
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    sent = 0
    times: list[float] = []
    begin: float | None = None
    while True:
        due = len(frames) if not args.rate else 0
        if begin is not None and args.rate:
            due = int((time.monotonic() - begin) * args.rate / stream.events_a_frame)
        while begin is not None and sent < min(due, len(frames)):
            frame = frames[sent]
            if args.rate:  # what is read on arrival is the time of sending
                frame = restamp(frame)
                times.append(time.time())
            publish.send_multipart(frame)
            sent += 1
            if sent == len(frames):
                say(seconds=time.monotonic() - begin, times=times)
        wait_ms = 2 if begin is not None and sent < len(frames) else 200
        ready = dict(poller.poll(wait_ms))
        if sys.stdin.fileno() in ready:
            if not sys.stdin.readline():
                return
            begin = time.monotonic()
            say(started=time.time())
        if router in ready:
            identity, _, start = router.recv_multipart()
            for frame in frames[int.from_bytes(start, "big") : sent]:
                router.send_multipart((identity, b"", *frame))
            summary = {
                "first_buffered_seq": 0,
                "next_seq": sent,
                "engine_id": engine_id,
            }
            end = msgspec.msgpack.encode(summary)
            router.send_multipart((identity, b"", b"", END_OF_REPLAY, end))
        elif sent == len(frames):
            publish.send_multipart((topic, seq_to_bytes(sent - 1), beat))


class Stream(msgspec.Struct):
    """A whole stream, encoded. The first frame holds one step, the others
    ``events_a_frame`` events each."""

    engine_id: str
    events_a_frame: int
    num_events: int
    payloads: list[bytes]


def write_stream(path: Path, num_events: int, events_a_frame: int = 16) -> Stream:
    """Script ``num_events`` events, and keep them encoded in ``path``."""
    lives = Lifecycles(seed=0, cache=20_000)
    payloads = [
        payload_of(batch, lives.engine_id())
        for batch in batches(lives, num_events, events_a_frame)
    ]
    stream = Stream(lives.engine_id(), events_a_frame, num_events, payloads)
    path.write_bytes(msgspec.msgpack.encode(stream))
    return stream


def read_stream(path: Path) -> Stream:
    return msgspec.msgpack.decode(path.read_bytes(), type=Stream)


def payload_of(events: list, engine_id: str, *, heartbeat: bool = False) -> bytes:
    batch = EventBatch(
        time.time(),
        events,
        0,
        engine_id=engine_id,
        label="feed",
        model_name="scripted",
        heartbeat=heartbeat,
    )
    return msgspec.msgpack.encode(batch)


def restamp(frame: tuple[bytes, bytes, bytes]) -> tuple[bytes, bytes, bytes]:
    """The same batch, made now."""
    batch = msgspec.msgpack.decode(frame[2])
    batch[0] = time.time()
    return frame[0], frame[1], msgspec.msgpack.encode(batch)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
