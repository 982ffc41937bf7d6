"""Real sockets around a real publisher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from vllm_fork import publisher as publisher_module
from vllm_fork.config import EventSettings
from vllm_fork.events import (
    END_OF_REPLAY,
    DecodedBatch,
    EngineStarted,
    EngineStopped,
    Event,
    decode_batch,
    seq_from_bytes,
    seq_to_bytes,
)
from vllm_fork.publisher import CheckpointPublisher

WAIT_S = 10.0


def started() -> EngineStarted:
    return EngineStarted(
        time_unix_ns=1,
        monotonic_ns=1,
        vllm_version="0",
        fork_version="0",
        retention="on",
    )


def numbered(number: int) -> Event:
    """An event that can be told from the others."""
    return EngineStopped(time_unix_ns=number, monotonic_ns=0)


class Padded(Event, tag="Padded", kw_only=True):
    """An event of any size, unknown to every decoder."""

    padding: bytes


class Unencodable(Event, tag="Unencodable", kw_only=True):
    thing: Any


class Subscriber:
    """A SUB socket that is connected once :meth:`wait_connected` returns."""

    def __init__(self, context: zmq.Context, endpoint: str, **options: Any) -> None:
        self.socket = context.socket(zmq.SUB)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.subscribe(b"")
        self.socket.connect(endpoint)

    def frames(self, timeout_s: float = WAIT_S) -> list[bytes]:
        if not self.socket.poll(timeout_s * 1000):
            raise TimeoutError("no batch came")
        return self.socket.recv_multipart()

    def wait_connected(self) -> Subscriber:
        """Needs batch 0 to be out: the heartbeat that follows is waited for."""
        self.frames()
        return self

    def next(self) -> tuple[int, DecodedBatch]:
        """The next batch that is no heartbeat."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            _, seq, payload = self.frames()
            decoded = decode_batch(payload)
            if not decoded.batch.heartbeat:
                return seq_from_bytes(seq), decoded
        raise TimeoutError("nothing but heartbeats came")

    def until(self, last: Callable[[Event], bool]) -> list[tuple[int, DecodedBatch]]:
        batches = []
        while not batches or not any(map(last, batches[-1][1].events)):
            batches.append(self.next())
        return batches


class ReplayReader:
    """A DEALER socket that asks for a replay."""

    def __init__(self, context: zmq.Context, endpoint: str, **options: Any) -> None:
        self.socket = context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)

    def ask(self, start: int) -> None:
        self.socket.send_multipart([b"", seq_to_bytes(start)])

    def read(self) -> tuple[list[tuple[int, bytes]], dict[str, Any]]:
        """The batches up to the end marker, and what that says."""
        batches = []
        while True:
            if not self.socket.poll(WAIT_S * 1000):
                raise TimeoutError(f"no end marker after {len(batches)} batches")
            empty, _, seq, payload = self.socket.recv_multipart()
            assert empty == b""
            if seq == END_OF_REPLAY:
                return batches, msgspec.msgpack.decode(payload)
            batches.append((seq_from_bytes(seq), payload))

    def replay(self, start: int) -> tuple[list[tuple[int, bytes]], dict[str, Any]]:
        self.ask(start)
        return self.read()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll ``condition``; a test waits for a fact, not for a time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"never came true: {what}")
        time.sleep(0.002)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def make_publisher() -> Iterator[Callable[..., CheckpointPublisher]]:
    """Publishers on ports of the system's choice, quick heartbeats, shut down after."""
    made: list[CheckpointPublisher] = []

    def make(
        rank: int = 0, engine_id: str = "engine-1", **settings: Any
    ) -> CheckpointPublisher:
        given: dict[str, Any] = {
            "enabled": True,
            "endpoint": "tcp://127.0.0.1:0",
            "replay_endpoint": "tcp://127.0.0.1:0",
            "heartbeat_s": 0.02,
        }
        publisher = CheckpointPublisher(
            EventSettings(**(given | settings)),
            engine_id=engine_id,
            data_parallel_rank=rank,
            model_name="tiny",
        )
        made.append(publisher)
        return publisher

    yield make
    for publisher in made:
        publisher.shutdown(timeout_s=0)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What the publisher says, whatever vLLM has made of the log meanwhile."""
    logger = publisher_module.logger
    level = logger.level
    logger.setLevel(logging.INFO)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def one_event_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_EVENTS_PER_BATCH", 1)


@pytest.fixture
def quick_rebind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BIND_RETRY_S", 0.02)


class Wire:
    """What the tests of this folder share."""

    Padded = Padded
    ReplayReader = ReplayReader
    Subscriber = Subscriber
    Unencodable = Unencodable
    decode = staticmethod(decode_batch)
    numbered = staticmethod(numbered)
    seq_from_bytes = staticmethod(seq_from_bytes)
    started = staticmethod(started)
    wait_for = staticmethod(wait_for)


@pytest.fixture(scope="session")
def wire() -> type[Wire]:
    return Wire
