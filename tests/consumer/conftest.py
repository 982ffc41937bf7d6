"""Real engines' publishers, consumers and databases, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import msgspec
import pytest
import zmq
from sqlalchemy import create_engine, select, text

from event_consumer import tables
from event_consumer.service import Service
from event_consumer.settings import ConsumerSettings
from event_consumer.store import Store
from vllm_fork.events import (
    DEFAULT_TOPIC,
    END_OF_REPLAY,
    EventBatch,
    seq_from_bytes,
    seq_to_bytes,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]

import postgres_server  # noqa: E402

RECORDS = (tables.engines, tables.requests, tables.checkpoints)
PATIENCE_S = 30.0


def wait_for(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What ``what`` returns, once that is true."""
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


@pytest.fixture(name="wait_for", scope="session")
def wait_for_fixture() -> Callable[..., Any]:
    return wait_for


# -- databases ---------------------------------------------------------------


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[str], str]]:
    """A server of our own on a Unix socket; call it with a name for a database."""
    try:
        with postgres_server.running() as server:
            driven = server.replace("postgresql:", "postgresql+psycopg:")
            admin = create_engine(
                driven.format(database="postgres"), isolation_level="AUTOCOMMIT"
            )

            def create(database: str) -> str:
                with admin.connect() as connection:
                    connection.execute(text(f'CREATE DATABASE "{database}"'))
                return driven.format(database=database)

            yield create
            admin.dispose()
    except postgres_server.NoPostgres as error:
        pytest.skip(f"NOT TESTED on PostgreSQL: {error}")


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh store, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[-60:]
    return request.getfixturevalue("postgresql")(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[dict[str, Any]]]:
    """``rows(url, table, **equal)``: what a store holds, in the order of its key."""

    def read(url: str, table: Any, **equal: Any) -> list[dict[str, Any]]:
        try:
            with Store(url, read_only=True) as store, store.reading() as connection:
                statement = select(table).order_by(*table.primary_key.columns)
                for name, value in equal.items():
                    statement = statement.where(table.c[name] == value)
                return [dict(row) for row in connection.execute(statement).mappings()]
        except Exception as error:
            if "no store" in str(error) or "not a store" in str(error):
                return []  # not made yet
            raise

    return read


@pytest.fixture(scope="session")
def records(rows: Callable[..., Any]) -> Callable[[str], dict[str, Any]]:
    """All that a store says about engines, requests and checkpoints."""
    return lambda url: {table.name: rows(url, table) for table in RECORDS}


# -- processes ---------------------------------------------------------------


@dataclass
class Engine:
    """A scripted engine; see benchmarks/scripted_engine.py."""

    process: subprocess.Popen[str]
    endpoint: str
    replay: str
    engine_id: str

    def said(self) -> dict[str, Any]:
        """The next thing it says."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Consumer:
    """``event-consumer run``. ``log`` grows as it speaks."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    http: str = "off"

    def get(self, path: str) -> tuple[int, str]:
        """Status and body that its HTTP server answers."""
        try:
            with urlopen(f"http://{self.http}{path}", timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except URLError:
            return 0, "it does not listen yet"

    def metric(self, name: str) -> float | None:
        """The value of a metric that has one series."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{name}{{"):
                return float(line.rpartition(" ")[2])
        return None

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def says(self, words: str) -> bool:
        return any(words in line for line in self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """``start_engine(events=1000, seed=0, …)``: the options of the script."""
    started: list[subprocess.Popen[str]] = []

    def start(**options: Any) -> Engine:
        command = [sys.executable, str(BENCHMARKS / "scripted_engine.py")]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return Engine(process, **json.loads(process.stdout.readline()))

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def start_consumer() -> Iterator[Callable[..., Consumer]]:
    """``start_consumer(store, engine, …, http="off")``."""
    started: list[Consumer] = []

    def start(
        store: str, *engines: Any, arguments: tuple[str, ...] = (), **settings: Any
    ) -> Consumer:
        command = [sys.executable, "-m", "event_consumer.cli", "run", "--store", store]
        for engine in engines:
            command += ["--endpoint", engine.endpoint, "--replay", engine.replay]
        environ = {
            "EVENT_CONSUMER_HTTP": "off",
            "EVENT_CONSUMER_FLUSH_INTERVAL_S": ".05",
        }
        for name, value in settings.items():
            environ[f"EVENT_CONSUMER_{name.upper()}"] = str(value)
        consumer = Consumer(
            subprocess.Popen(
                [*command, *arguments],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environ,
            ),
            http=environ["EVENT_CONSUMER_HTTP"],
        )
        started.append(consumer)
        threading.Thread(target=consumer.read_log, daemon=True).start()
        return consumer

    yield start
    for consumer in started:
        consumer.kill()


# -- in this process ---------------------------------------------------------


class RawPublisher:
    """A publisher of which every frame can be chosen; its replays are answered by
    :meth:`answer`, or never."""

    def __init__(self, context: zmq.Context, at: str = "", **options: Any) -> None:
        """``at``: where to bind, with ``{}`` for what tells the sockets apart."""
        self.engine_id = str(uuid.uuid4())
        where = at or "tcp://127.0.0.1:*"
        self.publish = self._bind(context, zmq.PUB, where.format("pub"), options)
        self.router = self._bind(context, zmq.ROUTER, where.format("replay"), options)
        self.endpoint = self.publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self.router.getsockopt_string(zmq.LAST_ENDPOINT)

    @staticmethod
    def _bind(
        context: zmq.Context, kind: int, where: str, options: dict[str, Any]
    ) -> Any:
        bound = context.socket(kind)
        bound.linger = 0
        bound.sndhwm = 0
        for name, value in options.items():
            setattr(bound, name, value)
        bound.bind(where)
        return bound

    def payload(self, *sent: Any, **header: Any) -> bytes:
        batch = EventBatch(
            time.time(), list(sent), 0, engine_id=self.engine_id, **header
        )
        return msgspec.msgpack.encode(batch)

    def send(self, seq: int, *sent: Any, **header: Any) -> None:
        self.send_frames(seq_to_bytes(seq), self.payload(*sent, **header))

    def send_frames(self, *frames: bytes) -> None:
        self.publish.send_multipart((DEFAULT_TOPIC.encode(), *frames))

    def asked(self, patience_s: float = PATIENCE_S) -> tuple[bytes, int]:
        """Who asks for a replay, and from where."""
        assert self.router.poll(patience_s * 1000), "nobody asks for a replay"
        identity, _, start = self.router.recv_multipart()
        return identity, seq_from_bytes(start)

    def answer(
        self, identity: bytes, payloads: dict[int, bytes], first: int, end: int
    ) -> None:
        topic = DEFAULT_TOPIC.encode()
        for seq, payload in payloads.items():
            self.router.send_multipart(
                (identity, b"", topic, seq_to_bytes(seq), payload)
            )
        summary = {
            "first_buffered_seq": first,
            "next_seq": end,
            "engine_id": self.engine_id,
        }
        self.router.send_multipart(
            (identity, b"", b"", END_OF_REPLAY, msgspec.msgpack.encode(summary))
        )

    def greet(self) -> None:
        """Answer the first replay: there is nothing yet."""
        identity, _ = self.asked()
        self.answer(identity, {}, 0, 0)


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def make_publisher(zmq_context: zmq.Context) -> Callable[..., RawPublisher]:
    return lambda **options: RawPublisher(zmq_context, **options)


@pytest.fixture
def raw_publisher(make_publisher: Callable[..., RawPublisher]) -> RawPublisher:
    return make_publisher()


class Serving:
    """A service on a thread."""

    def __init__(self, settings: ConsumerSettings, sinks: Sequence[Any] = ()) -> None:
        self.settings = settings
        self._sinks = sinks
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.error: Exception | None = None
        """What ended it before its time."""

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            with Store(self.settings.store) as store:
                self.service = Service(self.settings, store, self._sinks)
                self._started.set()
                await self.service.run(self._stop)
        except Exception as error:
            self.error = error
        finally:
            self._started.set()

    def __enter__(self) -> Serving:
        self._thread.start()
        self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(sqlite_url: str) -> Iterator[Callable[..., Serving]]:
    """``serve(publisher, …, endpoint={…}, flush_interval_s=…)``."""
    with ExitStack() as stack:

        def start(
            *publishers: Any,
            sinks: Sequence[Any] = (),
            endpoint: dict[str, Any] | None = None,
            **settings: Any,
        ) -> Serving:
            streams = [
                {"endpoint": each.endpoint, "replay": each.replay, **(endpoint or {})}
                for each in publishers
            ]
            given = {"store": sqlite_url, "flush_interval_s": 0.02, **settings}
            made = ConsumerSettings(endpoints=streams, **given)
            return stack.enter_context(Serving(made, sinks))

        yield start
