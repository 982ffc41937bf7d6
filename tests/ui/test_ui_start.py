"""How the dashboard starts, and what it needs to."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import browser_session
import pytest

UI = Path(__file__).parents[2] / "ui"


@pytest.mark.parametrize("as_module", [False, True])
def test_it_starts_without_a_store(tmp_path, as_module):
    """The page says that there is none yet; the server answers."""
    url = f"sqlite:///{tmp_path / 'none.db'}"
    with (
        browser_session.app_server(url, as_module=as_module) as address,
        urllib.request.urlopen(f"{address}request?request=x", timeout=10) as answer,
    ):
        assert answer.status == 200
    assert not (tmp_path / "none.db").exists()


def test_it_needs_neither_the_engine_nor_its_stream():
    """No vLLM, no torch, no ZMQ: the store is all it reads."""
    modules = sorted(
        ".".join(("ui", *path.relative_to(UI).with_suffix("").parts))
        for path in UI.rglob("*.py")
        if path.parent.name != "views" and path.stem not in ("__main__", "app")
    )
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
print({{"vllm", "vllm_fork", "torch", "zmq"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == "set()"


def test_only_the_queries_read_the_store():
    """No page, figure or component asks the database by itself."""
    for path in UI.rglob("*.py"):
        if path.name in ("queries.py", "connection.py"):
            continue
        source = path.read_text()
        assert "sqlalchemy" not in source, path
        assert "event_consumer" not in source, path


def test_a_wrong_option_is_one_sentence_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "ui", "--stoer", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=UI.parent,
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --stoer" in done.stderr
    assert "Traceback" not in done.stderr
