"""A seeded store, and the app over it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).parents[2]
APP = ROOT / "ui" / "app.py"
sys.path.insert(0, str(ROOT / "benchmarks"))

import seeded_store  # noqa: E402


@pytest.fixture(scope="session")
def seeded_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of 400 requests with every reason, stage and stream state."""
    url = f"sqlite:///{tmp_path_factory.mktemp('store') / 'seeded.db'}"
    seeded_store.seed(url, num_requests=400)
    return url


@pytest.fixture
def open_page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """``open_page(url, page, **query_params)`` runs a page over a store."""

    def run(url: str, page: str, **query_params: str) -> AppTest:
        monkeypatch.setenv("VLLM_FORK_STORE_URL", url)
        at = AppTest.from_file(APP, default_timeout=20).run()
        for name, value in query_params.items():
            at.query_params[name] = value
        return at.switch_page(f"views/{page}.py").run()

    return run
