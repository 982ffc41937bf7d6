"""What the dashboard is told when it starts: its store, and where Jaeger is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ui.connection import DEFAULT_URL

STORE_VARIABLE: Final = "VLLM_FORK_STORE_URL"
JAEGER_VARIABLE: Final = "VLLM_FORK_JAEGER_URL"


class UiSettings(NamedTuple):
    """``jaeger_url`` is None where none is configured; it has no trailing slash.

    ``problem`` is one sentence about a setting that was not usable, or empty.
    """

    store_url: str
    jaeger_url: str | None
    problem: str = ""


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> UiSettings:
    """Read the settings: the command line (after ``--``) goes before the environment.

    Args:
        arguments: what follows the script, as ``["--store", URL]``.
        environ: with :data:`STORE_VARIABLE` and :data:`JAEGER_VARIABLE`.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--store")
    parser.add_argument("--jaeger")
    problem = ""
    try:
        given, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        given, unknown = argparse.Namespace(store=None, jaeger=None), []
        problem = f"The command line was not understood: {error}."
    if unknown:
        problem = f"“{unknown[0]}” is not an option: --store and --jaeger are."
    store = given.store or environ.get(STORE_VARIABLE) or DEFAULT_URL
    jaeger = (given.jaeger or environ.get(JAEGER_VARIABLE) or "").rstrip("/") or None
    if jaeger is not None and not _is_web_address(jaeger):
        problem = (
            "The Jaeger URL must begin with http:// or https://: traces not linked."
        )
        jaeger = None
    return UiSettings(store, jaeger, problem)


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that do not match
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
