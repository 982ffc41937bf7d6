"""How the dashboard starts, and what it needs to."""

from __future__ import annotations

import ast
import socket
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import browser_session
import pytest

UI = Path(__file__).parents[2] / "ui"


@pytest.mark.parametrize("as_module", [False, True])
def test_it_starts_without_a_store(tmp_path, as_module):
    """The page says that there is none yet; the server answers. ``python -m ui`` is
    told to wait for it."""
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


@pytest.mark.parametrize(
    "path", [UI / "app.py", *sorted(UI.glob("views/*.py"))], ids=lambda path: path.name
)
def test_no_page_holds_a_sentence_that_streamlit_would_print(path):
    """Its magic prints an expression that stands alone, a string after a constant
    too; only a docstring and a call may."""
    body = ast.parse(path.read_text()).body
    alone = [node.value for node in body[1:] if isinstance(node, ast.Expr)]
    assert [ast.unparse(each) for each in alone if not isinstance(each, ast.Call)] == []


def test_streamlit_prints_nothing_by_itself():
    options = tomllib.loads((UI / ".streamlit" / "config.toml").read_text())
    assert options["runner"]["magicEnabled"] is False


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ui", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=UI.parent,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stoer", "x"], "--stoer is not an option: write --store."),
        (["--stoer=x"], "write --store."),
        (["extra"], "extra is not an option: known are --store, --jaeger"),
        (["--port", "99999"], "'99999' is no port: give a number from 1 to 65535"),
        (["--port", "0"], "'0' is no port"),
        (["--port", "http"], "'http' is no port"),
        (["--port", "TAKEN"], "Address already in use"),
        (["--address", "no.such.host.invalid"], "choose another --port or --address"),
        (["--store", "vllm-fork.db"], "write sqlite:///vllm-fork.db for a file"),
        (["--store", "postgresql://me:hunter2@db:port/x"], "is not a store URL"),
        (["--store", "sqlite:///x.db?tiemout=5", "--wait"], "write timeout, or leave"),
        (["--store", "sqlite://x.db", "--wait"], "three slashes, sqlite:///x.db"),
        (["--store", "sqlite:////no/such/folder/x.db"], "mkdir -p /no/such/folder"),
        (["--store", "FOLDER", "--wait"], "is a folder: name a file in it"),
        (["--store", "NOTES", "--wait"], "is not an SQLite database"),
        (["--store", "MISSING"], "run `event-consumer run --store sqlite:///"),
        (["--store", "MISSING"], "or start the dashboard with --wait"),
        (["--store", "postgresql://me:hunter2@127.0.0.1:1/x"], "cannot be read"),
        (["--jaeger", "localhost:16686"], "must begin with http://"),
        (["--jaeger", "http://["], "must begin with http://"),
        (["--store", "sqlite:///\udcff.db"], "is not a store URL"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    empty_url, tmp_path, arguments, words
):
    (tmp_path / "notes.txt").write_text("these are notes, not tables\n" * 100)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {
            "TAKEN": str(taken.getsockname()[1]),
            "FOLDER": f"sqlite:///{tmp_path}",
            "NOTES": f"sqlite:///{tmp_path}/notes.txt",
            "MISSING": f"sqlite:///{tmp_path}/none.db",
        }
        given = [places.get(each, each) for each in arguments]
        done = start(*([] if "--store" in given else ["--store", empty_url]), *given)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "hunter2" not in done.stderr
    assert done.stdout == ""
