"""``python -m ui``: the dashboard, without Streamlit's own command line.

What cannot work is refused at once, in one sentence and with exit code 2.
"""

from __future__ import annotations

import argparse
import difflib
import os
import socket
from pathlib import Path
from typing import Final, NoReturn

from ui import settings
from ui.connection import StoreConnection, StoreError
from ui.settings import JAEGER_VARIABLE, STORE_VARIABLE

APP: Final = Path(__file__).parent / "app.py"
MAX_PORT: Final = 65_535


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage, which would hide the sentence."""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}.\n")


def main() -> None:
    """Start the dashboard; settings become those that ``ui.app`` reads."""
    parser = _Parser(
        prog="python -m ui", description="The dashboard over an event consumer's store."
    )
    parser.add_argument("--store", help=f"store URL (or {STORE_VARIABLE})")
    parser.add_argument("--jaeger", help=f"Jaeger's URL (or {JAEGER_VARIABLE})")
    parser.add_argument("--address", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=_port, default=8501)
    parser.add_argument(
        "--wait",
        action="store_true",
        help="start although there is no store yet, or its server is away",
    )
    options, unknown = parser.parse_known_args()
    if unknown:
        parser.error(_why_unknown(unknown[0], [f"--{name}" for name in vars(options)]))
    for variable, value in (
        (STORE_VARIABLE, options.store),
        (JAEGER_VARIABLE, options.jaeger),
    ):
        if value is not None:
            os.environ[variable] = value
    configured = settings.load([], os.environ)
    problem = (
        configured.problem
        or _why_no_store(configured.store_url, may_wait=options.wait)
        or _why_no_port(options.address, options.port)
    )
    if problem:
        parser.error(problem)

    from streamlit.web import cli  # takes a second

    cli.main_run(
        [str(APP), "--server.address", options.address, "--server.port", options.port],
        standalone_mode=True,
    )


def _why_unknown(given: str, known: list[str]) -> str:
    """One sentence about an argument that nothing takes, with the nearest option."""
    near = difflib.get_close_matches(given.partition("=")[0], known, n=1)
    hint = f"write {near[0]}" if near else f"known are {', '.join(known)}"
    return f"{given} is not an option: {hint}"


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port: give a number from 1 to {MAX_PORT}"
        )
    return int(text)


def _why_no_store(url: str, *, may_wait: bool) -> str:
    """One sentence about a store that cannot be read, or nothing."""
    try:
        with StoreConnection(url).read():
            return ""
    except StoreError as error:
        if error.may_come and may_wait:
            return ""
        remedy = (error.hint[:1].lower() + error.hint[1:]).rstrip(".")
        if error.command:
            remedy = f"run `{error.command}`"
        if error.may_come:
            remedy += ", or start the dashboard with --wait"
        return f"{str(error).rstrip('.')}: {remedy}" if remedy else str(error)


def _why_no_port(address: str, port: int) -> str:
    """One sentence about an address that cannot be listened on, or nothing."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return (
            f"{address} port {port} cannot be listened on ({reason}): choose another "
            "--port or --address"
        )
    return ""


if __name__ == "__main__":
    main()
