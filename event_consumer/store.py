"""The store: SQLite or PostgreSQL, through SQLAlchemy Core.

What a set of batches produced and the positions they moved to are written in one
transaction (:meth:`Store.commit`), so that after a crash the two agree and the
stream continues where the store stands.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import (
    Connection,
    Engine,
    Table,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    inspect,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from event_consumer import tables
from event_consumer.consumer_lock import (
    PATIENCE_S,
    FileLock,
    HeldError,
    StreamLocks,
    who_we_are,
)
from event_consumer.records import (
    ENGINE_LOST,
    GAP_OPEN,
    GONE,
    LIVE_STAGES,
    OPEN,
    RUNNING,
    STOPPED,
    CheckpointRecord,
    ClosedRequest,
    EngineRecord,
    GapRecord,
    RequestRecord,
    Snapshot,
    StreamRecord,
)
from event_consumer.store_file import Obstacle, damage, obstacle
from event_consumer.store_url import (
    DEFAULT_URL,
    StoreUrlError,
    located,
    parse_store_url,
)

SQLITE_TIMEOUT_S: Final = 1.0
"""How long another writer is waited for, where the URL does not say. The consumer's
loop waits with it."""
SHORTEN_EVERY_S: Final = 60.0
BUSY_ROWS: Final = 1_000
"""Rows a commit from which on SQLite's log is left to grow to its limit."""
DELETE_CHUNK: Final = 5_000
"""Rows that one transaction of :meth:`Store.delete_older_than` removes."""
MAX_CLOSED: Final = 32_768
_MARK_PREFIX: Final = "untold:"
_SCHEMA_LOCK: Final = 5_567_5568
"""Advisory lock under which consumers of one PostgreSQL create the tables."""


class StoreError(Exception):
    """The store cannot be used; the message is one sentence for the operator."""


class ChangeSet(NamedTuple):
    """Rows to write, as tuples in column order: nothing changes them afterwards."""

    engines: list[tuple[Any, ...]]
    requests: list[tuple[Any, ...]]
    checkpoints: list[tuple[Any, ...]]
    streams: list[tuple[Any, ...]]
    gaps: list[tuple[Any, ...]]
    hits: list[tuple[Any, ...]]
    """``(num_hits, engine_id, checkpoint_id)`` of checkpoints that changed in nothing
    else: an update of one column touches no index, and hits are many."""

    @classmethod
    def of(
        cls,
        *,
        engines: Iterable[EngineRecord] = (),
        requests: Iterable[RequestRecord] = (),
        checkpoints: Iterable[CheckpointRecord] = (),
        streams: Iterable[StreamRecord] = (),
        gaps: Iterable[GapRecord] = (),
        hits: Iterable[CheckpointRecord] = (),
    ) -> ChangeSet:
        """Copy the records as they are now."""
        as_row = msgspec.structs.astuple
        return cls(
            [as_row(record) for record in engines],
            [as_row(record) for record in requests],
            [as_row(record) for record in checkpoints],
            [as_row(record) for record in streams],
            [as_row(record) for record in gaps],
            [(hit.num_hits, hit.engine_id, hit.checkpoint_id) for hit in hits],
        )

    @property
    def num_rows(self) -> int:
        return sum(map(len, self))


_RECORDS: Final[dict[Table, type]] = {
    tables.engines: EngineRecord,
    tables.requests: RequestRecord,
    tables.checkpoints: CheckpointRecord,
    tables.streams: StreamRecord,
    tables.gaps: GapRecord,
}

_GAP_KEY: Final = ("endpoint", "engine_id", "first_seq")


def _written_columns(table: Table) -> list[str]:
    """The columns of ``table`` that a record has, in its order."""
    return [field.name for field in msgspec.structs.fields(_RECORDS[table])]


def _upsert_sql(table: Table, engine: Engine) -> str:
    """One statement that inserts a row or merges it into the one that is there.

    A NULL never overwrites what is known: a record that the ledger had to begin
    in the middle of a life leaves alone what an earlier one wrote.
    """
    names = _written_columns(table)
    dialect_insert = (
        sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert
    )
    statement = dialect_insert(table)
    key = _GAP_KEY if table is tables.gaps else tuple(table.primary_key.columns.keys())
    merged: dict[str, Any] = {}
    for name in names:
        if name in key:
            continue
        old, new = table.c[name], statement.excluded[name]
        if name == "incomplete":
            merged[name] = or_(new, old)
        elif name == "num_hits":
            larger = func.max if engine.dialect.name == "sqlite" else func.greatest
            merged[name] = larger(new, old)
        elif old.nullable:
            merged[name] = func.coalesce(new, old)
        else:
            merged[name] = new
    statement = statement.on_conflict_do_update(index_elements=key, set_=merged)
    compiled = statement.compile(dialect=engine.dialect, column_keys=names)
    assert compiled.positiontup == names, compiled.positiontup
    return str(compiled)


def _hits_sql(engine: Engine) -> str:
    table = tables.checkpoints
    statement = (
        update(table)
        .values(num_hits=bindparam("hits"))
        .where(
            table.c.engine_id == bindparam("engine"),
            table.c.checkpoint_id == bindparam("checkpoint"),
        )
    )
    compiled = statement.compile(dialect=engine.dialect)
    assert compiled.positiontup == ["hits", "engine", "checkpoint"]
    return str(compiled)


class Store:
    """An open store. One thread at a time may write."""

    def __init__(self, url: str = DEFAULT_URL, *, read_only: bool = False) -> None:
        """Open ``url``; create the tables where there are none.

        Args:
            url: ``sqlite:///PATH`` or ``postgresql://USER@HOST/DATABASE``.
            read_only: refuse where there is no store yet, and never write. Else an
                SQLite store is held until it is closed: it has one writer.

        Raises:
            StoreError: not a URL of a database known here, unreachable, not
                writable, not a store, a store of another schema version, or one
                that has a consumer.
        """
        try:
            self._url, self.name, self._path, self._timeout_s = parse_store_url(url)
        except StoreUrlError as error:
            raise StoreError(str(error)) from None
        self._read_only = read_only
        self._marks: dict[str, int] = {}
        self._shortened = time.monotonic()
        self._stream_locks = StreamLocks()
        self._file_lock: FileLock | None = None
        self._refuse_file()
        try:
            self._hold_file()
            self.engine = self._create_engine()
            with self._sentences("open"):
                if read_only:
                    with self.engine.connect() as connection:
                        self._verify(connection)
                else:
                    self._create_or_verify()
        except BaseException:
            self.close()
            raise
        if not read_only:
            upserts = [_upsert_sql(table, self.engine) for table in _RECORDS]
            self._statements = [*upserts, _hits_sql(self.engine)]

    def _create_engine(self) -> Engine:
        try:
            if self._path is None:
                return self._create_postgresql_engine()
            timeout_s = SQLITE_TIMEOUT_S if self._timeout_s is None else self._timeout_s
            engine = create_engine(
                self._url.set(query={}), connect_args={"timeout": timeout_s}
            )
        except ImportError as error:
            raise StoreError(
                f"the store {self.name} needs {error.name or 'a driver'}, which is "
                "not installed: pip install 'vllm-fork[postgres]'"
            ) from None
        except (SQLAlchemyError, ValueError) as error:
            raise StoreError(
                f"the store {self.name} has an option that cannot be used: {error}"
            ) from None
        configure = _configure_reader if self._read_only else _configure_writer
        event.listen(engine, "connect", configure)
        return engine

    def _create_postgresql_engine(self) -> Engine:
        """A writer has one session: with that it would lose its streams, too."""
        named = {"application_name": f"event-consumer, {who_we_are()}"}
        engine = create_engine(
            self._url,
            paramstyle="format",
            pool_pre_ping=True,
            connect_args={} if "application_name" in self._url.query else named,
            **({} if self._read_only else {"pool_size": 1, "max_overflow": 0}),
        )
        if not self._read_only:
            event.listen(engine, "connect", self._begin_session)
        return engine

    def _begin_session(self, session: Any, _record: object) -> None:
        try:
            self._stream_locks.begin(session)
        except BaseException as error:
            session.close()
            if isinstance(error, HeldError):
                raise StoreError(
                    f"cannot go on with the store {self.name}: another consumer "
                    f"({error}) reads a stream of this one now; stop one of them"
                ) from None
            raise

    def _refuse_file(self) -> None:
        """Say what is wrong with the file in better words than SQLite's."""
        if self._path is None:
            return
        found = obstacle(self._path, to_write=not self._read_only)
        if found is not None:
            raise StoreError(self._cannot("open", found))
        if self._read_only and not self._path.exists():
            raise StoreError(
                f"there is no store at {located(self.name, self._path)} yet: "
                f"`event-consumer run --store {self.name}` makes it, or name another "
                "with --store"
            )

    def _hold_file(self) -> None:
        if self._path is None or self._read_only:
            return
        lock = FileLock(self._path)
        try:
            lock.acquire()
        except HeldError as error:
            raise StoreError(has_a_consumer(self.name, str(error))) from None
        except OSError as error:
            what = f"its lock file {lock.path} cannot be used ({error.strerror})"
            remedy = "see who may write it and its folder, or name another store"
            raise StoreError(self._cannot("open", Obstacle(what, remedy))) from None
        self._file_lock = lock

    def hold(
        self, endpoints: Sequence[str], patience_s: float = PATIENCE_S
    ) -> dict[str, str]:
        """Hold the streams ``endpoints``, and no others, against other consumers of
        this store. An SQLite store is held as a whole, from its opening on.

        Returns:
            Who reads it, for each of ``endpoints`` that another consumer has had for
            ``patience_s``.

        Raises:
            StoreError: the store cannot be asked.
        """
        if self._path is not None:
            return {}
        with self._sentences("write to"), self.engine.connect() as connection:
            session = connection.connection.driver_connection
            return self._stream_locks.hold(session, endpoints, patience_s)

    def _cannot(self, doing: str, found: Obstacle) -> str:
        return f"cannot {doing} the store {self.name}: {found.what}; {found.remedy}"

    @contextmanager
    def _sentences(self, doing: str) -> Iterator[None]:
        """Turn a database error into a :class:`StoreError` of one sentence."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            reason = " ".join(str(cause).split())
            found = damage(self._path, reason) if self._path is not None else None
            raise StoreError(
                self._cannot(doing, found)
                if found is not None
                else f"cannot {doing} the store {self.name}: {reason}"
            ) from error

    def _create_or_verify(self) -> None:
        with self.engine.begin() as connection:
            if self.engine.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
            found = set(inspect(connection).get_table_names())
            if found.isdisjoint(tables.metadata.tables):
                tables.metadata.create_all(connection)
                connection.execute(
                    insert(tables.meta).values(
                        key="schema_version", value=str(tables.SCHEMA_VERSION)
                    )
                )
                return
            self._verify(connection)
            # Says now, not at the first event, that nothing can be written.
            connection.execute(
                update(tables.meta)
                .where(tables.meta.c.key == "schema_version")
                .values(value=tables.meta.c.value)
            )

    def _verify(self, connection: Connection) -> None:
        found = set(inspect(connection).get_table_names())
        version = (
            connection.scalar(
                select(tables.meta.c.value).where(tables.meta.c.key == "schema_version")
            )
            if tables.meta.name in found
            else None
        )
        if version is None:
            raise StoreError(
                f"the database {self.name} is not a store of event-consumer: "
                "name another with --store"
            )
        ours = tables.SCHEMA_VERSION
        if not version.isdigit() or int(version) > ours:
            raise StoreError(
                f"the store {self.name} has schema version {version}, and this "
                f"event-consumer knows {ours}: upgrade it, or name another store"
            )
        if int(version) < ours:
            raise StoreError(
                f"the store {self.name} has schema version {version}, older than "
                f"{ours}, and there is no migration: name another store"
            )

    @property
    def is_local(self) -> bool:
        """Whether a commit is work of this process, and not of a server."""
        return self._path is not None

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.dispose()
        if self._file_lock is not None:
            self._file_lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection for queries.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._sentences("read"), self.engine.connect() as connection:
            yield connection

    def commit(
        self, changes: ChangeSet, marks: Mapping[str, int] | None = None
    ) -> None:
        """Write ``changes`` in one transaction, and ``marks``, which then are all that
        this consumer has (:mod:`event_consumer.export_marks`); None leaves them alone.

        Raises:
            StoreError: nothing was written; the same changes may be tried again.
        """
        with self._sentences("write to"), self.engine.begin() as connection:
            for sql, rows in zip(self._statements, changes, strict=True):
                if rows:
                    connection.exec_driver_sql(sql, rows)
            if marks is not None and marks != self._marks:
                self._write_marks(connection, marks)
        if marks is not None:
            self._marks = dict(marks)
        if self.is_local and changes.num_rows < BUSY_ROWS:
            self._shorten_log()

    def _shorten_log(self) -> None:
        """Move what a quiet stream left in SQLite's log into the file now and then:
        the log of a small store should be small."""
        now = time.monotonic()
        if now - self._shortened >= SHORTEN_EVERY_S:
            self._shortened = now
            with self._sentences("write to"), self.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _write_marks(self, connection: Connection, marks: Mapping[str, int]) -> None:
        meta = tables.meta
        changed = {e: ns for e, ns in marks.items() if self._marks.get(e) != ns}
        former = [
            _mark_key(engine_id)
            for engine_id in {*self._marks, *changed}
            if engine_id in changed or engine_id not in marks
        ]
        connection.execute(delete(meta).where(meta.c.key.in_(former)))
        if changed:
            connection.execute(
                insert(meta),
                [
                    {"key": _mark_key(engine_id), "value": f"{ns} {engine_id}"}
                    for engine_id, ns in changed.items()
                ],
            )

    def load_marks(self, endpoints: Sequence[str]) -> dict[str, int]:
        """The marks that a former consumer of ``endpoints`` left.

        Raises:
            StoreError: the store cannot be read.
        """
        meta, engines = tables.meta, tables.engines
        with self.reading() as connection:
            values = connection.scalars(
                select(meta.c.value).where(meta.c.key.startswith(_MARK_PREFIX))
            )
            marks = {
                engine_id: int(ns)
                for ns, engine_id in (value.split(" ", 1) for value in values)
            }
            ours = connection.scalars(
                select(engines.c.engine_id).where(
                    engines.c.engine_id.in_(list(marks)),
                    engines.c.endpoint.in_(endpoints),
                )
            )
            found = {engine_id: marks[engine_id] for engine_id in ours}
        self._marks |= found
        return found

    def load(self, endpoints: Sequence[str]) -> Snapshot:
        """What is needed to go on with ``endpoints``.

        Raises:
            StoreError: the store cannot be read.
        """
        engines, requests = tables.engines, tables.requests
        checkpoints = tables.checkpoints
        with self.reading() as connection:

            def records(table: Table, condition: Any) -> list[Any]:
                return _records(connection, table, condition)

            streams = records(tables.streams, tables.streams.c.endpoint.in_(endpoints))
            current = [stream.engine_id for stream in streams if stream.engine_id]
            of_ours = select(engines.c.engine_id).where(
                engines.c.status != STOPPED,
                or_(
                    engines.c.engine_id.in_(current),
                    and_(
                        engines.c.status == RUNNING, engines.c.endpoint.in_(endpoints)
                    ),
                ),
            )
            # An engine that was lost may speak again: what it had is taken back.
            open_here = and_(
                requests.c.engine_id.in_(of_ours),
                requests.c.status.in_((OPEN, ENGINE_LOST)),
            )

            def of_open(column: Any) -> Any:
                return select(requests.c.engine_id, column).where(open_here)

            live = and_(
                checkpoints.c.engine_id.in_(of_ours),
                checkpoints.c.stage.in_((*LIVE_STAGES, GONE)),
            )
            by_request = tuple_(checkpoints.c.engine_id, checkpoints.c.request_id)
            by_id = tuple_(checkpoints.c.engine_id, checkpoints.c.checkpoint_id)
            needed = or_(
                live,
                by_request.in_(of_open(requests.c.request_id)),
                by_id.in_(of_open(requests.c.source_checkpoint_id)),
            )
            conversations = connection.execute(
                select(
                    requests.c.engine_id,
                    requests.c.request_id,
                    requests.c.conversation_id,
                )
                .join_from(
                    checkpoints,
                    requests,
                    and_(
                        requests.c.engine_id == checkpoints.c.engine_id,
                        requests.c.request_id == checkpoints.c.request_id,
                    ),
                )
                .where(live, requests.c.conversation_id.is_not(None))
            )
            return Snapshot(
                streams=streams,
                gaps=records(
                    tables.gaps,
                    and_(
                        tables.gaps.c.endpoint.in_(endpoints),
                        tables.gaps.c.status == GAP_OPEN,
                    ),
                ),
                engines=records(engines, engines.c.engine_id.in_(of_ours)),
                requests=records(requests, open_here),
                checkpoints=records(checkpoints, needed),
                conversations={
                    (engine_id, request_id): conversation_id
                    for engine_id, request_id, conversation_id in conversations
                },
            )

    def closed_since(self, since_ns: Mapping[str, int]) -> list[ClosedRequest]:
        """Requests of each engine that ended, with their last event at that time or
        later, in the order of those; at most :data:`MAX_CLOSED` an engine.

        Raises:
            StoreError: the store cannot be read.
        """
        requests, checkpoints = tables.requests, tables.checkpoints
        found: list[ClosedRequest] = []
        with self.reading() as connection:
            for engine_id, mark_ns in since_ns.items():
                rows = _records(
                    connection,
                    requests,
                    requests.c.engine_id == engine_id,
                    requests.c.status != OPEN,
                    requests.c.last_event_ns >= mark_ns,
                    order=requests.c.last_event_ns.desc(),
                    limit=MAX_CLOSED,
                )
                names = [row.request_id for row in rows]
                sources = [row.source_checkpoint_id for row in rows]
                near = _records(
                    connection,
                    checkpoints,
                    checkpoints.c.engine_id == engine_id,
                    or_(
                        checkpoints.c.request_id.in_(names),
                        checkpoints.c.checkpoint_id.in_(
                            [source for source in sources if source is not None]
                        ),
                    ),
                    order=checkpoints.c.checkpoint_id,
                )
                by_id = {each.checkpoint_id: each for each in near}
                by_request: dict[str, list[CheckpointRecord]] = {}
                for each in near:
                    by_request.setdefault(each.request_id, []).append(each)
                found += [
                    ClosedRequest(
                        row,
                        by_request.get(row.request_id, []),
                        by_id.get(row.source_checkpoint_id),
                    )
                    for row in reversed(rows)
                ]
        return found

    def delete_older_than(self, cutoff_ns: int) -> int:
        """Delete what had its last event before ``cutoff_ns``; returns the rows.

        Live checkpoints of running engines, the requests that left them, running
        engines and open gaps stay. In chunks, so that no writer waits long.

        Raises:
            StoreError: the store cannot be written.
        """
        requests, checkpoints = tables.requests, tables.checkpoints
        engines, gaps = tables.engines, tables.gaps
        left_a_live_one = exists().where(
            checkpoints.c.engine_id == requests.c.engine_id,
            checkpoints.c.request_id == requests.c.request_id,
            checkpoints.c.stage.in_(LIVE_STAGES),
        )
        conditions = {
            checkpoints: and_(
                checkpoints.c.last_event_ns < cutoff_ns,
                checkpoints.c.stage.not_in(LIVE_STAGES),
            ),
            requests: and_(requests.c.last_event_ns < cutoff_ns, ~left_a_live_one),
            engines: and_(
                engines.c.last_event_ns < cutoff_ns, engines.c.status != RUNNING
            ),
            gaps: and_(gaps.c.detected_ns < cutoff_ns, gaps.c.status != GAP_OPEN),
        }
        num_deleted = 0
        with self._sentences("delete from"):
            for table, condition in conditions.items():
                key = tuple(table.primary_key.columns)
                oldest = select(*key).where(condition).limit(DELETE_CHUNK)
                statement = delete(table).where(tuple_(*key).in_(oldest))
                while True:
                    with self.engine.begin() as connection:
                        num_rows = connection.execute(statement).rowcount
                    num_deleted += num_rows
                    if num_rows < DELETE_CHUNK:
                        break
        return num_deleted


def _records(
    connection: Connection,
    table: Table,
    *conditions: Any,
    order: Any = None,
    limit: int | None = None,
) -> list[Any]:
    columns = [table.c[name] for name in _written_columns(table)]
    statement = select(*columns).where(*conditions).order_by(order).limit(limit)
    kind = _RECORDS[table]
    return [kind(**row) for row in connection.execute(statement).mappings()]


def _mark_key(engine_id: str) -> str:
    """Within the width of the column, whatever the id."""
    return _MARK_PREFIX + blake2b(engine_id.encode(), digest_size=16).hexdigest()


def _configure_reader(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA query_only=ON")


def _configure_writer(connection: Any, _record: object) -> None:
    # Of a new file only. Rows are wide and their indexes many: larger pages split
    # less often.
    connection.execute("PRAGMA page_size=16384")
    # KiB: the upper pages of all indexes of some million rows.
    connection.execute("PRAGMA cache_size=-65536")
    # Readers never wait for the writer, nor it for them.
    connection.execute("PRAGMA journal_mode=WAL")
    # A power cut may take the last commits, and their positions with them: the
    # publisher replays them. A crash of the process takes nothing.
    connection.execute("PRAGMA synchronous=NORMAL")
    # Pages (128 MB): one that is written again and again is moved to the file less
    # often.
    connection.execute("PRAGMA wal_autocheckpoint=8000")


def has_a_consumer(name: str, holder: str) -> str:
    """A second consumer of an SQLite store is told so."""
    return (
        f"the store {name} has a consumer already ({holder}): stop that one, or name "
        "another store with --store"
    )
