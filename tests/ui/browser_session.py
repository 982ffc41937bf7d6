"""The running app, and Debian's Chromium looking at it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def chromium() -> str | None:
    """Where the browser is, None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def app_server(
    store_url: str, jaeger_url: str = "", *, as_module: bool = False
) -> Iterator[str]:
    """``streamlit run ui/app.py`` over a store; its address, with a final slash.

    Args:
        as_module: start it with ``python -m ui`` instead.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "streamlit", "run", str(ROOT / "ui" / "app.py")),
        *("--server.address", "127.0.0.1", "--server.port", str(port)),
        *("--", "--store", store_url),
    ]
    if as_module:
        module = [sys.executable, "-m", "ui"]
        command = [*module, "--port", str(port), "--store", store_url, "--wait"]
    environ = os.environ | {"VLLM_FORK_JAEGER_URL": jaeger_url}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    address = f"http://127.0.0.1:{port}/"
    try:
        _await_health(address, process)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_health(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise RuntimeError(process.stderr.read().decode()[-2000:])
        try:
            with urllib.request.urlopen(f"{address}_stcore/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError("the dashboard did not start within 60 s")
