"""One consumer a store: a second one is told who is there, and ends.

An SQLite store is held by a lock on a file beside it, PostgreSQL stream by stream, by
advisory locks. Kernel and server release them with the process and its connection,
however it ended: nothing is left behind that a restart would have to wait for.
Readers do not ask.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeVar

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 2.0
"""How long a former consumer may take to end."""
LOOK_AGAIN_S: Final = 0.05
MAX_HOLDER_CHARS: Final = 200
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has no locks."""

T = TypeVar("T")


class HeldError(Exception):
    """Another consumer is there; the message says who, as far as is known."""


def who_we_are() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _patiently(attempt: Callable[[], T], patience_s: float) -> T:
    """What ``attempt`` returns; while it raises :class:`HeldError`, tried so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return attempt()
        except HeldError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(LOOK_AGAIN_S)


# -- SQLite ------------------------------------------------------------------


class FileLock:
    """Holds the SQLite store at ``path``, under whatever name, for this process."""

    def __init__(self, path: Path) -> None:
        self.path = lock_path(path)
        self._fd: int | None = None

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Hold it until :meth:`release`, or the end of the process.

        Raises:
            HeldError: another process holds it, and did for ``patience_s``.
            OSError: the lock file cannot be made or opened.
        """
        self._fd = _patiently(self._attempt, patience_s)

    def _attempt(self) -> int:
        while True:
            fd = _open_lock(self.path)
            try:
                _lock(fd)
                if _is_at(fd, self.path):  # not one that was removed meanwhile
                    _write_holder(fd)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def release(self) -> None:
        """May be called again. The file goes first: who waits for it looks again."""
        if self._fd is None:
            return
        try:
            if _is_at(self._fd, self.path):
                self.path.unlink(missing_ok=True)
        except OSError as error:  # it holds nobody up
            logger.debug("%s stays: %s", self.path, error)
        finally:
            os.close(self._fd)
            self._fd = None


def lock_path(path: Path) -> Path:
    """The lock file of a store: the same for all symbolic links to it."""
    return Path(f"{os.path.realpath(path)}.lock")


def holder(path: Path) -> str | None:
    """Who consumes the SQLite store at ``path``; None where nobody does."""
    try:
        fd = os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _lock(fd)
    except HeldError as error:
        return str(error)
    finally:
        os.close(fd)
    return None


def _open_lock(path: Path) -> int:
    """Made by another user, it may be one that this one can only read: it will do."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR)
    except FileNotFoundError:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeldError(_read_holder(fd)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "The file system of the store has no locks (%s): a second consumer on it "
            "would not be noticed.",
            error.strerror,
        )


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _write_holder(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, who_we_are().encode(), 0)
    except OSError as error:  # only told by name: the lock holds all the same
        logger.debug("The lock file does not say who holds it: %s", error)


def _read_holder(fd: int) -> str:
    said = os.pread(fd, MAX_HOLDER_CHARS, 0).decode(errors="replace")
    return "".join(c for c in said if c.isprintable()) or "another process"


# -- PostgreSQL --------------------------------------------------------------


class StreamLocks:
    """Holds streams for the one session that writes to PostgreSQL.

    Every method takes that session, a psycopg connection, and ends the transaction
    that it begins: an advisory lock of a session outlives it.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._is_pooled = False

    def begin(self, session: Any) -> None:
        """A new session holds nothing: take again what the former one held.

        Raises:
            HeldError: another consumer was faster.
        """
        with session.cursor() as cursor:
            (pid,) = cursor.execute("SELECT pg_backend_pid()").fetchone()
            # A pooler would keep the lock of a process that is no more.
            self._is_pooled = pid != session.info.backend_pid
            if self._is_pooled:
                logger.warning(
                    "There is a pooler before PostgreSQL: a second consumer of the "
                    "same stream would not be noticed."
                )
            else:
                # The server notices within 25 s that the machine of a consumer died.
                cursor.execute("SET tcp_keepalives_idle = 10")
                cursor.execute("SET tcp_keepalives_interval = 5")
                cursor.execute("SET tcp_keepalives_count = 3")
        session.commit()
        for endpoint in sorted(self._held):
            self._take(session, endpoint)

    def hold(
        self, session: Any, endpoints: Sequence[str], patience_s: float
    ) -> dict[str, str]:
        """Hold ``endpoints`` and nothing else.

        Returns:
            Who reads it, for each of ``endpoints`` that another consumer has.
        """
        for endpoint in self._held.difference(endpoints):
            self._ask(session, "SELECT pg_advisory_unlock(%s)", endpoint)
            self._held.discard(endpoint)
        refused: dict[str, str] = {}
        deadline = time.monotonic() + patience_s
        for endpoint in endpoints:
            if endpoint in self._held:
                continue
            try:
                attempt = partial(self._take, session, endpoint)
                _patiently(attempt, deadline - time.monotonic())
            except HeldError as error:
                refused[endpoint] = str(error)
            else:
                self._held.add(endpoint)
        return refused

    def _take(self, session: Any, endpoint: str) -> None:
        if self._is_pooled:
            return
        if not self._ask(session, "SELECT pg_try_advisory_lock(%s)", endpoint):
            raise HeldError(
                self._ask(session, _HOLDER_SQL, endpoint) or "another process"
            )

    def _ask(self, session: Any, sql: str, endpoint: str) -> Any:
        with session.cursor() as cursor:
            (schema,) = cursor.execute("SELECT current_schema()").fetchone()
            row = cursor.execute(sql, [_lock_key(schema, endpoint)]).fetchone()
        session.commit()
        return row and row[0]


_HOLDER_SQL: Final = """
WITH wanted AS (SELECT %s::bigint AS key)
SELECT coalesce(nullif(application_name, ''), 'pid ' || pid || ' of PostgreSQL')
FROM wanted CROSS JOIN pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND datname = current_database()
AND classid::bigint = (key >> 32) & 4294967295 AND objid::bigint = key & 4294967295
"""


def _lock_key(schema: str | None, endpoint: str) -> int:
    """A stream's number among the advisory locks of a database, which may hold a
    store in each of its schemas."""
    digest = blake2b(f"{schema} {endpoint}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
