"""The store is opened for reading only, and what is wrong with it is one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import seeded_store
import sqlalchemy as sa

from event_consumer import tables
from event_consumer.store import Store
from ui.connection import StoreConnection, StoreError
from ui.queries import Queries, RequestFilter


def test_nothing_can_be_written(store_url):
    """Neither an insert nor a drop gets through, in SQLite and PostgreSQL."""
    store = StoreConnection(store_url)
    for statement in (
        sa.insert(tables.meta).values(key="x", value="y"),
        sa.text("DROP TABLE requests"),
        sa.delete(tables.requests),
    ):
        with pytest.raises(StoreError, match=r"read.?only|cannot execute"):  # noqa: SIM117
            with store.read() as connection:
                connection.execute(statement)
    assert Queries(store).count_requests(RequestFilter()) > 0


def test_a_missing_file_is_not_made(tmp_path: Path):
    path = tmp_path / "none.db"
    with pytest.raises(StoreError) as caught:
        Queries(StoreConnection(f"sqlite:///{path}")).engines()
    assert caught.value.missing
    assert caught.value.command.startswith("event-consumer run --store sqlite:///")
    assert not path.exists()


def test_a_missing_store_is_told_by_its_whole_path(tmp_path: Path, monkeypatch):
    """A relative URL alone does not say which folder was looked in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as caught:
        Queries(StoreConnection("sqlite:///none.db")).engines()
    where = f"sqlite:///none.db (the file {tmp_path}/none.db)"
    assert str(caught.value) == f"There is no store at {where} yet."
    with pytest.raises(StoreError) as caught:
        Queries(StoreConnection(f"sqlite:///{tmp_path}/none.db")).engines()
    assert (
        str(caught.value) == f"There is no store at sqlite:///{tmp_path}/none.db yet."
    )


def test_a_file_that_is_no_database(tmp_path: Path):
    path = tmp_path / "notes.db"
    path.write_text("these are notes, not tables\n" * 100)
    with pytest.raises(StoreError, match=r"notes\.db is not an SQLite database"):
        Queries(StoreConnection(f"sqlite:///{path}")).engines()


def test_a_folder_a_missing_folder_and_a_damaged_file_each_have_a_remedy(
    empty_url, tmp_path: Path
):
    path = Path(empty_url.removeprefix("sqlite:///"))
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    for url, words, remedy in (
        (f"sqlite:///{tmp_path}", "is a folder", "Name a file in it"),
        (f"sqlite:///{tmp_path}/no/x.db", "there is no folder", "mkdir -p"),
        (empty_url, "is damaged", "move the file away"),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            Queries(StoreConnection(url)).engines()
        assert remedy in caught.value.hint
        assert not caught.value.may_come


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(empty_url):
    Path(empty_url.removeprefix("sqlite:///")).chmod(0)
    with pytest.raises(StoreError, match="cannot be read"):
        Queries(StoreConnection(empty_url)).engines()


def test_a_database_that_is_no_store(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE songs (name TEXT)")
    with pytest.raises(StoreError, match="not \\(yet\\) a store") as caught:
        Queries(StoreConnection(url)).engines()
    assert caught.value.missing


def test_a_store_that_the_consumer_made(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'made.db'}"
    with Store(url):
        assert Queries(StoreConnection(url)).engines() == []


def test_a_store_of_another_version(empty_url):
    engine = sa.create_engine(empty_url)
    with engine.begin() as connection:
        connection.execute(sa.update(tables.meta).values(value="99"))
    with pytest.raises(StoreError, match="schema version 99"):
        Queries(StoreConnection(empty_url)).engines()


def test_a_store_that_was_made_anew_is_seen(tmp_path: Path):
    """The file is replaced under the open dashboard: the new one is read."""
    path = tmp_path / "again.db"
    url = f"sqlite:///{path}"
    seeded_store.seed(url, num_requests=20)
    queries = Queries(StoreConnection(url))
    assert queries.count_requests(RequestFilter()) >= 20
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)
    with pytest.raises(StoreError) as caught:
        queries.engines()
    assert caught.value.missing
    seeded_store.write(url, [], seeded_store.Rows(), [], [])
    assert queries.count_requests(RequestFilter()) == 0


@pytest.mark.parametrize(
    "url",
    [
        "vllm-fork.db",
        "mysql://me:hunter2@db/x",
        "oops://me:hunter2@db/x",
        "postgresql://me:hunter2@db:port/x",
        "",
    ],
)
def test_a_url_that_is_none(url):
    with pytest.raises(StoreError) as caught:
        StoreConnection(url)
    said = f"{caught.value} {caught.value.hint}"
    assert "rite sqlite:///" in said
    assert "hunter2" not in said


def test_a_store_in_memory_is_another_process_s():
    with pytest.raises(StoreError, match="memory"):
        StoreConnection("sqlite://")


def test_what_the_url_says_of_the_server_is_kept(seeded_postgres):
    """A store in a schema of its own is looked for there; still nothing is written."""
    url = f"{seeded_postgres}&options=-csearch_path%3Delsewhere"
    with pytest.raises(StoreError, match="not \\(yet\\) a store"):
        Queries(StoreConnection(url)).engines()
    url = f"{seeded_postgres}&options=-cdefault_transaction_read_only%3Doff"
    with StoreConnection(url).read() as connection:
        shown = connection.scalar(sa.text("SHOW default_transaction_read_only"))
    assert shown == "on"


def test_the_timeout_of_the_url_is_how_long_a_writer_is_waited_for(empty_url):
    for option, busy_ms in (("", 5_000), ("?timeout=2.5", 2_500)):
        with StoreConnection(empty_url + option).read() as connection:
            found = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
        assert found == busy_ms


def test_an_unreachable_server_does_not_tell_the_password(tmp_path: Path):
    url = f"postgresql://me:hunter2@/x?host={tmp_path}"
    with pytest.raises(StoreError) as caught:
        Queries(StoreConnection(url)).engines()
    assert "cannot be read" in str(caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
