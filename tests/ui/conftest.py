"""A seeded store, SQLite and PostgreSQL, and the app over it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).parents[2]
APP = ROOT / "ui" / "app.py"
sys.path[:0] = [
    str(ROOT / "benchmarks"),
    str(ROOT / "tests"),
    str(Path(__file__).parent),
]

import postgres_server  # noqa: E402
import seeded_store  # noqa: E402

NUM_REQUESTS = 400


@pytest.fixture(scope="session")
def seeded_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of 400 requests with every reason, stage and stream state."""
    url = f"sqlite:///{tmp_path_factory.mktemp('store') / 'seeded.db'}"
    seeded_store.seed(url, num_requests=NUM_REQUESTS)
    return url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of an own PostgreSQL server, with ``{database}`` to fill in."""
    try:
        with postgres_server.running() as url:
            yield url
    except postgres_server.NoPostgres as error:
        pytest.skip(f"NOT TESTED on PostgreSQL: {error}")


@pytest.fixture(scope="session")
def seeded_postgres(postgres_url: str) -> str:
    """The same store in PostgreSQL."""
    admin = sa.create_engine(
        postgres_url.format(database="postgres").replace("ql:", "ql+psycopg:"),
        isolation_level="AUTOCOMMIT",
    )
    with admin.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE seeded")
    admin.dispose()
    url = postgres_url.format(database="seeded")
    seeded_store.seed(url.replace("ql:", "ql+psycopg:"), num_requests=NUM_REQUESTS)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The seeded store, in each database."""
    name = "seeded_url" if request.param == "sqlite" else "seeded_postgres"
    return str(request.getfixturevalue(name))


@pytest.fixture
def empty_url(tmp_path: Path) -> str:
    """A store that a consumer has made and no engine has filled."""
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    seeded_store.write(url, [], seeded_store.Rows(), [], [])
    return url


@pytest.fixture
def open_page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """``open_page(url, page, **query_params)`` runs a page over a store."""

    def run(url: str, page: str, **query_params: str | list[str]) -> AppTest:
        monkeypatch.setattr(sys, "argv", ["app.py"])
        # A page can be switched to after one run: of the cheapest page there is.
        monkeypatch.setenv("VLLM_FORK_STORE_URL", "sqlite:////nowhere/none.db")
        at = AppTest.from_file(APP, default_timeout=60).run()
        monkeypatch.setenv("VLLM_FORK_STORE_URL", url)
        for name, value in query_params.items():
            at.query_params[name] = value
        return at.switch_page(f"views/{page}.py").run()

    return run
