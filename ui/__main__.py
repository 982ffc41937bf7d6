"""``python -m ui``: the dashboard, without Streamlit's own command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from streamlit.web import cli

from ui.settings import JAEGER_VARIABLE, STORE_VARIABLE

APP: Final = Path(__file__).parent / "app.py"


def main() -> None:
    """Start the dashboard; settings become those that ``ui.app`` reads."""
    parser = argparse.ArgumentParser(
        prog="python -m ui", description="The dashboard over an event consumer's store."
    )
    parser.add_argument("--store", help=f"store URL (or {STORE_VARIABLE})")
    parser.add_argument("--jaeger", help=f"Jaeger's URL (or {JAEGER_VARIABLE})")
    parser.add_argument("--address", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=8501)
    options = parser.parse_args()
    for variable, value in (
        (STORE_VARIABLE, options.store),
        (JAEGER_VARIABLE, options.jaeger),
    ):
        if value:
            os.environ[variable] = value
    cli.main_run(
        [str(APP), "--server.address", options.address, "--server.port", options.port],
        standalone_mode=True,
    )


if __name__ == "__main__":
    main()
