"""One consumer a store (SQLite), or a stream of it (PostgreSQL); readers, and a restart
after whatever end, are never held up. Processes, files and servers are real."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import create_engine, text

from event_consumer import tables
from event_consumer.consumer_lock import (
    FileLock,
    HeldError,
    StreamLocks,
    holder,
    lock_path,
)
from event_consumer.store import Store, StoreError
from ui.connection import StoreConnection
from ui.queries import Queries


def consumes(rows, url: str, engine, num_events: int = 200) -> bool:
    found = rows(url, tables.streams, endpoint=engine.endpoint)
    return bool(found) and found[0]["num_events"] >= num_events


def refusal(consumer) -> str:
    """The one sentence with which a consumer ends."""
    assert consumer.process.wait(30) == 1
    consumer.process.stderr.close()
    (sentence,) = [line for line in consumer.log if " INFO " not in line]
    assert sentence.startswith("event-consumer: ")
    return sentence


def test_a_second_consumer_is_told_who_is_there_and_nobody_else_is_held_up(
    start_engine, start_consumer, sqlite_url, rows, wait_for, tmp_path
):
    engine = start_engine(events=200)
    first = start_consumer(sqlite_url, engine)
    wait_for(lambda: consumes(rows, sqlite_url, engine))
    by_link = tmp_path / "elsewhere" / "link.db"
    by_link.parent.mkdir()
    by_link.symlink_to(sqlite_url.removeprefix("sqlite:///"))
    for url in (sqlite_url, f"sqlite:///{by_link}"):
        told = refusal(start_consumer(url, engine))
        assert f"{url} has a consumer already (pid {first.process.pid} on " in told
        assert socket.gethostname() in told
        assert "another store with --store" in told
    # Readers do not ask.
    asked = subprocess.run(
        [sys.executable, "-m", "event_consumer.cli", "health", "--store", sqlite_url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0, asked.stderr
    assert len(Queries(StoreConnection(sqlite_url)).streams()) == 1
    assert first.process.poll() is None
    assert first.stop() == 0
    assert not lock_path(by_link).exists()


def test_a_restart_right_after_a_kill_is_let_in(
    start_engine, start_consumer, store_url, rows, wait_for
):
    """Nobody waits for the former process: it may still be dying."""
    engine = start_engine(events=200)
    consumer = start_consumer(store_url, engine)
    for _ in range(3):
        wait_for(lambda: rows(store_url, tables.streams, state="live"))
        os.kill(consumer.process.pid, signal.SIGKILL)
        consumer = start_consumer(store_url, engine)
        wait_for(partial(consumer.says, "Reading 1 endpoint"))
    wait_for(lambda: rows(store_url, tables.streams, state="live"))
    assert rows(store_url, tables.streams)[0]["num_events"] == 200
    assert consumer.stop() == 0


def test_one_that_takes_the_same_port_is_told_of_the_store(
    start_engine, start_consumer, sqlite_url, free_port, rows, wait_for
):
    """Another port would not help it."""
    engine = start_engine(events=200)
    http = f"127.0.0.1:{free_port}"
    start_consumer(sqlite_url, engine, http=http)
    wait_for(lambda: consumes(rows, sqlite_url, engine))
    told = refusal(start_consumer(sqlite_url, engine, http=http))
    assert "has a consumer already" in told
    assert "--http" not in told


def test_a_stream_in_postgresql_has_one_consumer(
    start_engine, start_consumer, postgresql, rows, wait_for
):
    """Also after the server cut its session: it takes the stream again."""
    url = postgresql("one consumer")
    engine = start_engine(events=200)
    first = start_consumer(url, engine)
    wait_for(lambda: consumes(rows, url, engine))
    told = refusal(start_consumer(url, engine))
    assert f"{engine.endpoint} has a consumer already" in told
    assert f"pid {first.process.pid} on {socket.gethostname()}" in told
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    by = text("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")
    with admin.connect() as connection:
        session = connection.scalar(by)
        connection.execute(text(f"SELECT pg_terminate_backend({session})"))
        wait_for(lambda: connection.scalar(by) not in (None, session))
    admin.dispose()
    assert "has a consumer already" in refusal(start_consumer(url, engine))
    assert first.stop() == 0
    again = start_consumer(url, engine)
    wait_for(lambda: rows(url, tables.streams, state="live"))
    assert again.stop() == 0


def test_an_endpoint_that_comes_later_is_left_to_who_has_it(
    start_engine, start_consumer, postgresql, rows, wait_for, tmp_path
):
    """The others are read meanwhile, and it is taken once it is free."""
    url = postgresql("comes later")
    first, second, third = (start_engine(seed=seed, events=200) for seed in range(3))
    other = start_consumer(url, second)
    wait_for(lambda: consumes(rows, url, second))
    config = tmp_path / "consumer.toml"

    def write(*engines) -> None:
        tables_of = [
            f'[[endpoints]]\nendpoint = "{e.endpoint}"\nreplay = "{e.replay}"\n'
            for e in engines
        ]
        config.write_text("\n".join(tables_of))

    write(first)
    ours = start_consumer(url, arguments=("--config", str(config)), dns_refresh_s=0.1)
    wait_for(lambda: consumes(rows, url, first))
    write(first, second, third)
    ours.process.send_signal(signal.SIGHUP)
    wait_for(lambda: consumes(rows, url, third))
    wait_for(lambda: ours.says(f"{second.endpoint} has a consumer already"))
    assert other.stop() == 0
    wait_for(lambda: rows(url, tables.streams, endpoint=second.endpoint, state="live"))
    # What it leaves, another may have.
    write(first)
    ours.process.send_signal(signal.SIGHUP)
    wait_for(lambda: ours.says(f"Leaving {second.endpoint}"))
    other = start_consumer(url, second)
    wait_for(lambda: rows(url, tables.streams, endpoint=second.endpoint, state="live"))
    assert other.stop() == 0
    refused = [line for line in ours.log if "has a consumer already" in line]
    assert len(refused) == 1, refused


def test_a_session_that_lost_its_stream_writes_nothing(postgresql, rows):
    """Another consumer was faster when the server came back."""
    url = postgresql("lost its stream")
    with Store(url) as ours, Store(url) as another:
        assert ours.hold(["tcp://a:1"], 0) == {}
        with another.reading() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks "
                    "WHERE locktype = 'advisory'"
                )
            )
        assert another.hold(["tcp://a:1", "tcp://b:1"], 30) == {}
        with pytest.raises(StoreError, match=r"another consumer .* reads a stream"):
            ours.hold(["tcp://b:1"], 0)
    with Store(url) as ours:
        assert ours.hold(["tcp://a:1", "tcp://b:1"], 30) == {}


def test_one_at_a_time_holds_a_store(tmp_path):
    """The lock file is removed and made again all the time; at most one is inside."""
    path = tmp_path / "store.db"
    inside: list[int] = []
    most = 0

    def work(number: int) -> None:
        nonlocal most
        for _ in range(50):
            lock = FileLock(path)
            lock.acquire(patience_s=30)
            inside.append(number)
            most = max(most, len(inside))
            inside.remove(number)
            lock.release()

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_somebody_removed_is_made_again(tmp_path):
    """It names nobody who is no more, and a file alone holds nobody up."""
    path = tmp_path / "store.db"
    lock_path(path).write_text("pid 1 on a machine that died")
    assert holder(path) is None
    lock = FileLock(path)
    lock.acquire(0)
    assert holder(path) == f"pid {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(HeldError, match=f"pid {os.getpid()} on"):
        FileLock(path).acquire(0)
    lock_path(path).unlink()
    lock.release()
    FileLock(path).acquire(0)


def test_a_store_where_there_are_no_locks_is_opened_with_a_warning(
    sqlite_url, monkeypatch, caplog
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Store(sqlite_url).close()
    assert "would not be noticed" in caplog.text


def test_a_lock_file_that_cannot_be_used_is_one_sentence(sqlite_url):
    lock = lock_path(Path(sqlite_url.removeprefix("sqlite:///")))
    lock.symlink_to("elsewhere")
    with pytest.raises(StoreError, match=r"its lock file .*store\.db\.lock cannot be"):
        Store(sqlite_url)
    assert not lock.parent.joinpath("elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be another user")
def test_a_lock_file_of_another_user_does_not_keep_a_restart_out():
    folder = Path(tempfile.mkdtemp(prefix="lock-"))
    folder.chmod(0o777)
    path = folder / "store.db"
    lock_path(path).write_text("root's")
    lock_path(path).chmod(0o644)
    os.seteuid(65_534)
    try:
        lock = FileLock(path)
        lock.acquire(0)
        with pytest.raises(HeldError):
            FileLock(path).acquire(0)
        lock.release()
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


class Pooled:
    """A session behind a pooler: what the server says it is was told by another."""

    def __init__(self, session) -> None:
        self._session = session
        self.info = SimpleNamespace(backend_pid=session.info.backend_pid + 1)

    def __getattr__(self, name: str):
        return getattr(self._session, name)


def test_behind_a_pooler_nothing_is_held_and_that_is_said(postgresql, caplog):
    """It would keep the lock of a consumer that is no more."""
    url = postgresql("pooled")
    with Store(url) as store, store.reading() as connection:
        session = Pooled(connection.connection.driver_connection)
        locks = StreamLocks()
        locks.begin(session)
        assert locks.hold(session, ["tcp://a:1"], 0) == {}
        held = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        assert connection.scalar(held) == 0
    assert "would not be noticed" in caplog.text


def test_two_streams_of_one_name_in_two_schemas_are_two(postgresql):
    url = postgresql("two schemas")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE SCHEMA second"))
    admin.dispose()
    with Store(url) as first, Store(f"{url}&options=-csearch_path%3Dsecond") as second:
        assert first.hold(["tcp://a:1"], 0) == {}
        assert second.hold(["tcp://a:1"], 0) == {}
