"""``python -m vllm_fork.demo.client``: play the dialog against two running servers.

The client of ``docker compose --profile dialog up``. It needs neither vLLM nor torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from vllm_fork.demo.dialog import TurnResult, play
from vllm_fork.demo.processes import DemoError
from vllm_fork.demo.table import ab_table


def run(
    off: Annotated[str, typer.Option(help="Server with retention off, http://…")],
    on: Annotated[str, typer.Option(help="Server with retention on, http://…")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One line more, the last of stdout.")
    ] = False,
) -> None:
    """Play one dialog against both servers and print the A/B table."""
    try:
        results = {
            label: _play(label, url) for label, url in (("off", off), ("on", on))
        }
    except DemoError as error:
        print(f"dialog: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"\n{ab_table(results['off'], results['on'])}\n", flush=True)
    if as_json:
        print(json.dumps({k: [_counts(t) for t in v] for k, v in results.items()}))


def _play(label: str, url: str) -> list[TurnResult]:
    print(f"Playing with retention {label}: {url}", flush=True)
    return play(
        url.rstrip("/"),
        f"dialog-{label}",
        on_turn=lambda index, turn: print(
            f"  turn {index}: {turn.cached} of {turn.prompt} prompt tokens cached, "
            f"{turn.completion} decoded   {turn.request_id}",
            flush=True,
        ),
    )


def _counts(turn: TurnResult) -> dict[str, Any]:
    """What the client saw, without the text."""
    return {name: value for name, value in asdict(turn).items() if name != "text"}


if __name__ == "__main__":
    typer.run(run)
