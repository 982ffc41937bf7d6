"""Opens the store for reading only, and says in one sentence why it cannot."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from event_consumer import tables
from event_consumer.store_file import Obstacle, damage, obstacle
from event_consumer.store_url import (
    DEFAULT_URL,
    StoreUrlError,
    located,
    parse_store_url,
)

__all__ = ["DEFAULT_URL", "StoreConnection", "StoreError"]

SQLITE_TIMEOUT_S: Final = 5.0
"""How long a writer is waited for, where the URL does not say."""
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
        try:
            self._url, self.name, self.path, timeout_s = parse_store_url(url)
        except StoreUrlError as error:
            raise StoreError(
                f"{_sentence(error.what)}.", hint=f"{_sentence(error.remedy)}."
            ) from None
        self._timeout_s = SQLITE_TIMEOUT_S if timeout_s is None else timeout_s
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
                connect_args=self._server_options(),
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

    def _server_options(self) -> dict[str, str]:
        """What the URL says stays; that nothing is written comes last."""
        given = self._url.query
        defaults = {"connect_timeout": "5", "application_name": "vllm-fork-dashboard"}
        wanted = {name: v for name, v in defaults.items() if name not in given}
        wanted["options"] = (
            f"-c statement_timeout={STATEMENT_TIMEOUT_S * 1000}"
            f" {given.get('options', '')} -c default_transaction_read_only=on"
        )
        return wanted

    def _connect_sqlite(self) -> sqlite3.Connection:
        assert self.path is not None
        connection = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro",
            uri=True,
            timeout=self._timeout_s,
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
                f"There is no store at {located(self.name, self.path)} yet.",
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
            hint=f"{_sentence(found.remedy)}.",
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


def _sentence(part: str) -> str:
    return f"{part[:1].upper()}{part[1:]}"
