"""What a store URL names, for the consumer, its queries and the dashboard alike.

Nothing in it is ignored: an option that would have no effect is refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

DEFAULT_URL: Final = "sqlite:///vllm-fork.db"

SQLITE_DRIVERS: Final = ("sqlite", "sqlite+pysqlite")
POSTGRESQL_DRIVERS: Final = ("postgres", "postgresql", "postgresql+psycopg")
SQLITE_OPTIONS: Final = ("timeout",)
"""The store decides on the others of ``sqlite3.connect`` itself."""
MAX_TIMEOUT_S: Final = 3_600.0
_SECRET_OPTIONS: Final = ("password", "sslpassword", "oauth_client_secret")
_IN_THE_URL_ITSELF: Final = {
    "user": "username",
    "password": "password",
    "host": "host",
    "port": "port",
    "dbname": "database",
}
"""Options of libpq that say again what a part of the URL says, by that part."""


class StoreUrlError(ValueError):
    """Not the URL of a store.

    ``what`` is wrong with it, and the ``remedy``: parts of a sentence, which tell no
    password.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what
        self.remedy = remedy


class StoreUrl(NamedTuple):
    """A URL that was checked.

    ``name`` is the URL without its passwords, safe to show. ``path`` is the file of
    an SQLite store, None of PostgreSQL. ``timeout_s``: how long another writer of
    the file is waited for, None where the URL does not say.
    """

    url: URL
    name: str
    path: Path | None
    timeout_s: float | None


def parse_store_url(text: str) -> StoreUrl:
    """Read and check a store URL; opens nothing.

    Args:
        text: ``sqlite:///PATH`` or ``postgresql://USER@HOST/DATABASE``, with options
            after a ``?``.

    Raises:
        StoreUrlError: it is none, or part of it would have no effect.
    """
    url = _parse(text)
    if url.drivername in SQLITE_DRIVERS:
        _refuse_server(url)
        _refuse_memory(url)
        _refuse_options(text, url, list(SQLITE_OPTIONS))
        return StoreUrl(url, _shown(url), Path(url.database or ""), _timeout_s(url))
    if url.drivername in POSTGRESQL_DRIVERS:
        url = url.set(drivername="postgresql+psycopg")
        if known := _libpq_options():
            _refuse_options(text, url, known)
        _refuse_said_twice(url)
        return StoreUrl(url, _shown(url), None, None)
    try:
        kind = url.get_backend_name()
    except NoSuchModuleError:
        kind = url.drivername
    if kind in ("sqlite", "postgresql"):
        kind = url.drivername  # the database is known, its driver is not
    raise StoreUrlError(
        f"a store of kind {kind!r} is not known",
        "write sqlite:///PATH or postgresql://USER@HOST/DATABASE",
    )


def located(name: str, path: Path) -> str:
    """The ``name`` of an SQLite store, and which file a relative path is from here."""
    return name if path.is_absolute() else f"{name} (the file {path.absolute()})"


def _parse(text: str) -> URL:
    try:
        text.encode()
        if "\0" in text:
            raise ValueError(text)  # no path is like that
        return make_url(text)
    except (ArgumentError, ValueError):  # ValueError also: a port that is no number
        has_scheme = "://" in text
        example = f"sqlite:///{text}" if text.strip() and not has_scheme else None
        # What has a scheme may hold a password.
        raise StoreUrlError(
            f"{'what was given' if has_scheme else repr(text)} is not a store URL",
            f"write {example or 'sqlite:///PATH'} for a file, or "
            "postgresql://USER@HOST/DATABASE",
        ) from None


def _shown(url: URL) -> str:
    secret = [name for name in _SECRET_OPTIONS if name in url.query]
    masked = url.update_query_dict(dict.fromkeys(secret, "***"))
    return masked.render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _refuse_server(url: URL) -> None:
    """``sqlite://x.db`` is a server with the name ``x.db``."""
    if url.host or url.username or url.password or url.port:
        parts = [url.host, url.database]
        path = "/".join(part for part in parts if part) or "PATH"
        raise StoreUrlError(
            f"the store {_shown(url)} names a server, and SQLite has none",
            f"write a file with three slashes, sqlite:///{path}, or with four from "
            "the root, sqlite:////PATH",
        )


def _refuse_memory(url: URL) -> None:
    if url.database in (None, "", ":memory:"):
        raise StoreUrlError(
            f"the store {_shown(url)} is in memory, where nobody else could read it",
            f"name a file, such as {DEFAULT_URL}",
        )


def _refuse_options(text: str, url: URL, known: list[str]) -> None:
    """Drivers pass over some that they do not know, and SQLAlchemy over those without
    a value."""
    for name in (*url.query, *_options_without_value(text)):
        if name not in known:
            raise StoreUrlError(
                # A misspelt option may hold a password.
                f"the store {_shown(url.set(query={}))} has the option {name!r}, which "
                "is not known",
                _nearest(name, known),
            )
        if not url.query.get(name):
            raise StoreUrlError(
                f"the store {_shown(url)} has the option {name!r} without a value",
                f"write {name}=VALUE, or leave it out",
            )
        if not isinstance(url.query[name], str) and name not in ("host", "port"):
            raise StoreUrlError(
                f"the store {_shown(url)} has the option {name!r} twice",
                "leave one of them out",
            )


def _options_without_value(text: str) -> Iterator[str]:
    options = text.partition("?")[2]
    if "@" not in options:  # else it is part of a password
        for name, value in parse_qsl(options, keep_blank_values=True):
            if not value:
                yield name


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"write {close[0]}, or leave it out"
    if len(known) == 1:
        return f"leave it out, {known[0]} is the only one"
    return "write one of libpq's, such as connect_timeout or sslmode"


def _libpq_options() -> list[str]:
    """Empty where the driver is not installed, which is said when it is needed."""
    try:
        from psycopg.pq import Conninfo
    except ImportError:
        return []
    return [option.keyword.decode() for option in Conninfo.get_defaults()]


def _refuse_said_twice(url: URL) -> None:
    for option, part in _IN_THE_URL_ITSELF.items():
        if option in url.query and getattr(url, part):
            raise StoreUrlError(
                f"the store {_shown(url)} says its {part} twice",
                f"leave out the option {option!r}",
            )


def _timeout_s(url: URL) -> float | None:
    text = url.query.get("timeout")
    if text is None:
        return None
    try:
        timeout_s = float(str(text))
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise StoreUrlError(
            f"the store {_shown(url)} has the timeout {text!r}",
            f"write seconds from 0 to {MAX_TIMEOUT_S:.0f}, such as timeout=5",
        )
    return timeout_s
