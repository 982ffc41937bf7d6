"""The store, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import os
import sqlite3

import msgspec
import pytest
from sqlalchemy import update

from event_consumer import tables
from event_consumer.records import (
    CheckpointRecord,
    EngineRecord,
    GapRecord,
    RequestRecord,
    StreamRecord,
)
from event_consumer.store import ChangeSet, Store, StoreError

RECORDS = {
    tables.engines: EngineRecord,
    tables.requests: RequestRecord,
    tables.checkpoints: CheckpointRecord,
    tables.streams: StreamRecord,
    tables.gaps: GapRecord,
}


def request(name: str = "r", **more) -> RequestRecord:
    return RequestRecord(engine_id="e", request_id=name, **more)


def checkpoint(number: int = 1, request_id: str = "r", **more) -> CheckpointRecord:
    return CheckpointRecord(
        engine_id="e", checkpoint_id=number, request_id=request_id, **more
    )


@pytest.mark.parametrize("table", RECORDS, ids=lambda table: table.name)
def test_records_mirror_their_tables(table):
    fields = [field.name for field in msgspec.structs.fields(RECORDS[table])]
    columns = [column.name for column in table.columns if column.name != "id"]
    assert fields == columns


def test_rows_come_back_as_they_went(store_url, rows):
    records = {
        "engines": EngineRecord(engine_id="e", label="on", async_scheduling=True),
        "requests": request(
            session_id="s", incomplete=True, num_prompt_tokens=2**31 - 1
        ),
        "checkpoints": checkpoint(2**40, stage="published", block_hash="ff" * 32),
        "streams": StreamRecord(endpoint="tcp://a:1", applied_seq=2**40),
        "gaps": GapRecord(
            endpoint="a",
            engine_id="e",
            first_seq=0,
            end_seq=2**40,
            status="open",
            detected_ns=2**62,
        ),
    }
    with Store(store_url) as store:
        store.commit(
            ChangeSet.of(**{name: [record] for name, record in records.items()})
        )
    for table, kind in RECORDS.items():
        (row,) = rows(store_url, table)
        row.pop("id", None)
        assert kind(**row) == records[table.name]


def test_the_same_rows_again_change_nothing(store_url, rows):
    changes = ChangeSet.of(
        requests=[request(arrival_ns=1)],
        checkpoints=[checkpoint(num_hits=3)],
        gaps=[
            GapRecord(
                endpoint="a",
                engine_id="e",
                first_seq=0,
                end_seq=2,
                status="lost",
                detected_ns=5,
            )
        ],
    )
    with Store(store_url) as store:
        store.commit(changes)
        before = {table: rows(store_url, table) for table in RECORDS}
        store.commit(changes)
        assert {table: rows(store_url, table) for table in RECORDS} == before


def test_what_is_known_is_not_forgotten(store_url, rows):
    """A record that was begun again from the middle of a life leaves alone what an
    earlier one knew."""
    with Store(store_url) as store:
        first = request(arrival_ns=7, num_prompt_tokens=10, incomplete=True)
        store.commit(
            ChangeSet.of(requests=[first], checkpoints=[checkpoint(num_hits=3)])
        )
        again = request(status="finished", finished_ns=9)
        store.commit(
            ChangeSet.of(requests=[again], checkpoints=[checkpoint(num_hits=1)])
        )
    (row,) = rows(store_url, tables.requests)
    known = {name: row[name] for name in ("arrival_ns", "num_prompt_tokens")}
    assert known == {"arrival_ns": 7, "num_prompt_tokens": 10}
    assert (row["status"], row["finished_ns"]) == ("finished", 9)
    assert row["incomplete"] is True
    assert rows(store_url, tables.checkpoints)[0]["num_hits"] == 3


def test_a_commit_is_all_or_nothing(store_url, rows):
    bad = ChangeSet.of(requests=[request()])
    bad = bad._replace(checkpoints=[("too", "short")])
    with Store(store_url) as store:
        with pytest.raises(StoreError, match="cannot write to the store"):
            store.commit(bad)
        assert rows(store_url, tables.requests) == []
        store.commit(bad._replace(checkpoints=[]))
    assert len(rows(store_url, tables.requests)) == 1


def test_load_brings_what_goes_on(store_url):
    """Open requests, live checkpoints and what they need; of our endpoints only."""
    engines = [
        EngineRecord(engine_id="e", endpoint="mine"),
        EngineRecord(engine_id="lost", endpoint="mine", status="lost"),
        EngineRecord(engine_id="other", endpoint="another's"),
        EngineRecord(engine_id="stopped", endpoint="mine2", status="stopped"),
    ]
    requests = [
        request("open", source_checkpoint_id=3, conversation_id="c1"),
        request("ended", status="finished", conversation_id="c2"),
        request("long ago", status="finished", conversation_id="c3"),
        RequestRecord(engine_id="other", request_id="x"),
    ]
    checkpoints = [
        checkpoint(1, stage="discarded", request_id="open"),
        checkpoint(2, stage="published", request_id="ended"),
        checkpoint(3, stage="evicted", request_id="long ago"),
        checkpoint(4, stage="evicted", request_id="long ago"),
    ]
    streams = [
        StreamRecord(endpoint="mine", engine_id="e", applied_seq=4),
        StreamRecord(endpoint="another's", engine_id="other"),
    ]
    gaps = [
        GapRecord(
            endpoint="mine",
            engine_id="e",
            first_seq=n,
            end_seq=n + 1,
            status=status,
            detected_ns=0,
        )
        for n, status in enumerate(["open", "lost", "recovered"])
    ]
    with Store(store_url) as store:
        store.commit(
            ChangeSet.of(
                engines=engines,
                requests=requests,
                checkpoints=checkpoints,
                streams=streams,
                gaps=gaps,
            )
        )
        found = store.load(["mine", "mine2"])
    assert found.streams == streams[:1]
    assert [engine.engine_id for engine in found.engines] == ["e"]
    assert [r.request_id for r in found.requests] == ["open"]
    assert sorted(c.checkpoint_id for c in found.checkpoints) == [1, 2, 3]
    assert found.conversations == {("e", "ended"): "c2"}
    assert [gap.first_seq for gap in found.gaps] == [0]


def test_old_rows_are_deleted_and_live_ones_kept(store_url, rows, monkeypatch):
    monkeypatch.setattr("event_consumer.store.DELETE_CHUNK", 3)
    old = [request(f"old {n}", last_event_ns=n, status="finished") for n in range(10)]
    with Store(store_url) as store:
        store.commit(
            ChangeSet.of(
                engines=[
                    EngineRecord(engine_id="e", last_event_ns=1),
                    EngineRecord(engine_id="gone", status="lost", last_event_ns=1),
                ],
                requests=[
                    *old,
                    request("r", last_event_ns=5, status="finished"),
                    request("new", last_event_ns=100),
                ],
                checkpoints=[
                    checkpoint(1, stage="published", last_event_ns=5),
                    checkpoint(2, stage="discarded", last_event_ns=5),
                    checkpoint(3, stage="discarded", last_event_ns=100),
                ],
                gaps=[
                    GapRecord(
                        endpoint="a",
                        engine_id="e",
                        first_seq=n,
                        end_seq=9,
                        status=status,
                        detected_ns=5,
                    )
                    for n, status in enumerate(["open", "lost"])
                ],
            )
        )
        assert store.delete_older_than(50) == 10 + 1 + 1 + 1
        assert store.delete_older_than(50) == 0
    assert {r["request_id"] for r in rows(store_url, tables.requests)} == {"r", "new"}
    left = [c["checkpoint_id"] for c in rows(store_url, tables.checkpoints)]
    assert left == [1, 3]
    assert [e["engine_id"] for e in rows(store_url, tables.engines)] == ["e"]
    assert [g["status"] for g in rows(store_url, tables.gaps)] == ["open"]


@pytest.mark.parametrize(
    ("version", "words"),
    [("99", "upgrade it"), ("0", "no migration"), ("soon", "upgrade it")],
)
def test_a_store_of_another_version_is_refused(store_url, version, words):
    with Store(store_url) as store, store.engine.begin() as connection:
        connection.execute(update(tables.meta).values(value=version))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"schema version {version}.*{words}"):
            Store(store_url, read_only=read_only)


def test_another_database_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE requests (mine TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="not a store of event-consumer"):
        Store(f"sqlite:///{path}")


def test_reading_makes_no_store(tmp_path):
    with pytest.raises(StoreError, match="there is no store"):
        Store(f"sqlite:///{tmp_path}/none.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("runs.db", "write sqlite:///runs.db for a file"),
        ("mysql://host/x", "'mysql' is not known"),
        ("nonsense://x", "'nonsense' is not known"),
        ("sqlite:////no/such/folder/x.db", "mkdir -p /no/such/folder"),
        ("sqlite:///a\0b.db", "is not a store URL"),
        ("sqlite:///\udcff.db", "is not a store URL"),
        ("sqlite:///x.db?timeout=long", "write seconds from 0 to 3600"),
        ("sqlite:///x.db?timeout=-1", "write seconds from 0 to 3600"),
        ("sqlite:///x.db?timeout=nan", "write seconds from 0 to 3600"),
        ("sqlite:///x.db?tiemout=5", "'tiemout', which is not known: write timeout"),
        ("sqlite:///x.db?tiemout", "'tiemout', which is not known: write timeout"),
        ("sqlite:///x.db?timeout=", "'timeout' without a value"),
        ("sqlite:///x.db?timeout=1&timeout=2", "'timeout' twice"),
        ("sqlite:///x.db?passwd=secret", "leave it out, timeout is the only one"),
        ("sqlite:///file:x.db?mode=ro&uri=true", "'mode', which is not known"),
        ("sqlite://", "is in memory"),
        ("sqlite:///:memory:", "is in memory"),
        ("sqlite://x.db", "three slashes, sqlite:///x.db"),
        ("sqlite://u:secret@host/x.db", "three slashes, sqlite:///host/x.db"),
        ("sqlite+aiosqlite:///x.db", "'sqlite+aiosqlite' is not known"),
        ("postgresql://u:secret@127.0.0.1:1/x", "Connection refused"),
        ("postgresql://u@127.0.0.1:1/x?password=secret", "Connection refused"),
        ("postgresql:///x?conect_timeout=5", "write connect_timeout"),
        ("postgresql:///x?connect_timeout", "'connect_timeout' without a value"),
        ("postgresql://h/x?autocommit=1", "'autocommit', which is not known"),
        ("postgresql://h/x?host=other", "says its host twice"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, url, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        Store(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "busy_ms"), [("", 1_000), ("?timeout=2.5", 2_500)])
def test_the_timeout_of_the_url_is_how_long_a_writer_is_waited_for(
    sqlite_url, option, busy_ms
):
    for read_only in (False, True):
        with (
            Store(sqlite_url + option, read_only=read_only) as store,
            store.reading() as connection,
        ):
            found = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
        assert found == busy_ms


def test_a_file_that_is_no_database_is_one_sentence(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 100)
    with pytest.raises(StoreError, match="is not an SQLite database"):
        Store(f"sqlite:///{path}")
    assert path.read_text().startswith("Dear diary")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_that_this_user_may_not_open_is_one_sentence(
    tmp_path, monkeypatch, read_only
):
    """Said by ``os.access``, for no mode keeps root out."""
    url = f"sqlite:///{tmp_path}/store.db"
    Store(url).close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match=r"may not read .*store\.db; change its mode"):
        Store(url, read_only=read_only)


def test_an_unwritable_store_is_refused_at_the_start(sqlite_url):
    """By what SQLite says of the first write: no mode keeps root out."""
    Store(sqlite_url).close()
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"cannot open the store .*: database is lock"):
        Store(f"{sqlite_url}?timeout=0")
    other.close()
    Store(f"{sqlite_url}?timeout=0").close()


@pytest.mark.parametrize("pause_s", [0.0, 61.0])
def test_a_quiet_stream_leaves_a_short_log(tmp_path, monkeypatch, pause_s):
    """Each minute what is in SQLite's log goes to the file, and the log begins anew."""
    now_s = 0.0
    monkeypatch.setattr("event_consumer.store.time.monotonic", lambda: now_s)
    with Store(f"sqlite:///{tmp_path}/quiet.db") as store:
        for number in range(100):
            now_s += pause_s
            stream = StreamRecord(endpoint="tcp://a:1", applied_seq=number)
            store.commit(ChangeSet.of(streams=[stream]))
        log_bytes = (tmp_path / "quiet.db-wal").stat().st_size
        made_bytes = 100 * 16_384
        assert (log_bytes < made_bytes) is (pause_s > 0)
