"""The demo's processes: started with a log file each, ended by their own ids."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.2


class DemoError(Exception):
    """The demo cannot go on; the message is one sentence for the person running it."""


class Service:
    """One child process in a group of its own, with its output in ``log``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Start it, with exactly this ``environment``.

        Raises:
            DemoError: the command does not exist.
        """
        self.name = name
        self.log = log
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise DemoError(
                    f"{name} cannot start: {command[0]} is not installed; "
                    "`make setup` installs it."
                ) from None

    def wait_ready(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Return as soon as ``is_ready()`` is true.

        Raises:
            DemoError: the process ended first, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self._process.poll() is not None:
                raise DemoError(
                    f"{self.name} ended with exit code {self._process.returncode} "
                    f"before it was ready: {self.last_line()} (see {self.log})"
                )
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{self.name} was not ready within {timeout_s:.0f} s: "
                    f"{self.last_line()} (see {self.log})"
                )
            time.sleep(POLL_S)

    def wait_success(self, timeout_s: float) -> None:
        """Wait for its end.

        Raises:
            DemoError: it failed, or did not end in time.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            how = f"failed with exit code {code}" if code else "took too long"
            raise DemoError(f"{self.name} {how}: {self.last_line()} (see {self.log})")

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_line(self) -> str:
        """The last thing it said."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else "it said nothing"

    def interrupt(self) -> None:
        """Ask it to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask it to end, wait, and end what is left of its group."""
        self.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def answers(url: str) -> bool:
    """Whether an HTTP GET of ``url`` is answered with a success."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status < 400)
    except (urllib.error.URLError, OSError):
        return False


def require_free(ports: Mapping[str, int]) -> None:
    """Check that each port can be bound.

    Args:
        ports: what for, to which port.

    Raises:
        DemoError: names the first port that is taken.
    """
    for purpose, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise DemoError(
                    f"port {port} for {purpose} cannot be used ({error.strerror}): end "
                    "what listens there, or choose another first port with "
                    "`make demo DEMO_PORT=…`."
                ) from None
