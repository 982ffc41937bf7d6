"""Opens the store for reading only, and says in one sentence why it cannot."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from event_consumer import tables
from event_consumer.store_file import Obstacle, damage, obstacle

DEFAULT_URL: Final = "sqlite:///vllm-fork.db"
STATEMENT_TIMEOUT_S: Final = 15


class StoreError(Exception):
    """The store cannot be read.

    The message is one sentence; ``hint`` says what to do, ``command`` what to
    run, where there is something to run; ``missing`` tells a store that nobody
    has made yet from a broken one; ``may_come``: trying again may help.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        command: str = "",
        missing: bool = False,
        may_come: bool = False,
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.command = command
        self.missing = missing
        self.may_come = missing or may_come


class StoreConnection:
    """A store that can be read and never written.

    SQLite is opened afresh for each query (a fraction of a millisecond), so that
    a store that was deleted and made anew is seen as what it is now.
    """

    def __init__(self, url: str) -> None:
        """Prepare to read ``url``; nothing is opened before the first query.

        Args:
            url: ``sqlite:///PATH`` or ``postgresql://USER@HOST/DATABASE``.

        Raises:
            StoreError: not the URL of a database known here.
        """
        self._url = _parse(url)
        self.name = self._url.render_as_string(hide_password=True)
        """The URL without its password: safe to show."""
        self.path = _sqlite_path(self._url)
        self._verified = False
        self._engine = self._create_engine()

    def _create_engine(self) -> Engine:
        if self.path is not None:
            return create_engine(
                "sqlite://", creator=self._connect_sqlite, poolclass=NullPool
            )
        try:
            return create_engine(
                self._url,
                pool_pre_ping=True,
                pool_size=4,
                connect_args={
                    "connect_timeout": 5,
                    "application_name": "vllm-fork-dashboard",
                    "options": "-c default_transaction_read_only=on"
                    f" -c statement_timeout={STATEMENT_TIMEOUT_S * 1000}",
                },
            )
        except ImportError as error:
            raise StoreError(
                f"The store {self.name} needs {error.name}, which is not installed.",
                command="pip install 'vllm-fork[postgres]'",
            ) from None
        except (SQLAlchemyError, ValueError) as error:
            raise StoreError(
                f"The store {self.name} has an option that cannot be used: {error}."
            ) from None

    def _connect_sqlite(self) -> sqlite3.Connection:
        assert self.path is not None
        connection = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro",
            uri=True,
            timeout=5,
            check_same_thread=False,
        )
        connection.execute("PRAGMA query_only=ON")
        return connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in one transaction that cannot write.

        Raises:
            StoreError: there is no store, it cannot be reached, or it is not one.
        """
        if self.path is not None and (found := obstacle(self.path, to_write=False)):
            self._verified = False
            raise self._cannot(found)
        if self.path is not None and not self.path.exists():
            self._verified = False
            raise StoreError(
                f"There is no store at {self.name} yet.",
                hint="The event consumer makes it when it starts; this page shows "
                "what it holds as soon as it does.",
                command=f"event-consumer run --store {self.name}",
                missing=True,
            )
        try:
            with self._engine.connect() as connection:
                if not self._verified:
                    self._verify(connection)
                yield connection
        except SQLAlchemyError as error:
            self._verified = False
            raise self._in_words(error) from error

    def _verify(self, connection: Connection) -> None:
        key = tables.meta.c.key == "schema_version"
        version = connection.scalar(select(tables.meta.c.value).where(key))
        if version != str(tables.SCHEMA_VERSION):
            raise StoreError(
                f"The store {self.name} has schema version {version}, and this "
                f"dashboard reads version {tables.SCHEMA_VERSION}.",
                hint="Run the consumer and the dashboard from one release.",
            )
        self._verified = True

    def _cannot(self, found: Obstacle) -> StoreError:
        return StoreError(
            f"The store {self.name} cannot be read: {found.what}.",
            hint=f"{found.remedy[0].upper()}{found.remedy[1:]}.",
        )

    def _in_words(self, error: SQLAlchemyError) -> StoreError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        reason = " ".join(str(cause).split())[:300]
        if self.path is not None and (found := damage(self.path, reason)):
            return self._cannot(found)
        lower = reason.lower()
        if "no such table" in lower or (
            "does not exist" in lower and "relation" in lower
        ):
            return StoreError(
                f"{self.name} is a database, but not (yet) a store of event-consumer.",
                hint="Start the consumer on it, or name another store with --store.",
                command=f"event-consumer run --store {self.name}",
                missing=True,
            )
        if "locked" in lower:
            return StoreError(
                f"The store {self.name} is locked by another process.",
                hint="The page tries again by itself.",
                may_come=True,
            )
        return StoreError(
            f"The store {self.name} cannot be read: {reason}",
            hint="Check that it is a store, that this user may read it, and that "
            "the database is up.",
            may_come=True,
        )


def _parse(url: str) -> URL:
    example = "Write sqlite:///PATH or postgresql://USER@HOST/DATABASE."
    try:
        url.encode()
        parsed = make_url(url)
        if "\0" in url:
            raise ValueError(url)  # no path is like that
        backend = parsed.get_backend_name()
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        # Not shown: what was given may hold a password.
        raise StoreError("The store URL is not a URL.", hint=example) from None
    except NoSuchModuleError:
        backend = ""
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend not in ("sqlite", "postgresql"):
        raise StoreError(
            f"A store of kind “{parsed.drivername}” is not known.", hint=example
        )
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError(
            "The store is in the memory of another process.",
            hint="Give the consumer and the dashboard one file: sqlite:///PATH.",
        )
    return parsed


def _sqlite_path(url: URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or url.database is None:
        return None
    return Path(url.database)
