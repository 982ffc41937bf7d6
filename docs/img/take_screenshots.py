"""Takes the pictures of the dashboard in this folder, over a seeded store.

Each page at 1280 pixels in the light and the dark theme, and two of them at 390.

    python docs/img/take_screenshots.py [NAME]...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "ui")]

import browser_session  # noqa: E402
import seeded_store  # noqa: E402
from playwright.sync_api import Browser, sync_playwright  # noqa: E402

MAX_BYTES: Final = 300_000


class Shot(NamedTuple):
    """A picture: ``path`` of the page,."""

    name: str
    path: str
    height: int
    width: int = 1280


HEALTHY: Final = (
    Shot("overview", "", 1610),
    Shot("requests", "requests", 880),
    Shot("request", "request?request=chatcmpl-arm-on-turn-1", 1330),
    Shot(
        "conversation",
        "conversations?conversation=reference-dialog-arm-on",
        1010,
    ),
    Shot("conversations", "conversations", 780),
    Shot("compare", "compare", 1330),
    Shot("requests-narrow", "requests", 844, 390),
    Shot("request-narrow", "request?request=chatcmpl-arm-on-turn-1", 1500, 390),
)
TROUBLED: Final = (Shot("health", "health", 1150),)


def take(browser: Browser, address: str, shot: Shot, theme: str) -> Path:
    """Take one picture; return where it is.

    Raises:
        RuntimeError: it is larger than a picture in the repository may be.
    """
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height}, color_scheme=theme
    )
    page = context.new_page()
    page.goto(address + shot.path)
    page.locator("tr.row, .js-plotly-plot").first.wait_for(timeout=60_000)
    if shot.name in ("overview", "compare", "request", "conversation"):
        page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    page.wait_for_timeout(4000)  # figures and lazy parts settle
    path = HERE / f"{shot.name}-{theme}.png"
    page.screenshot(path=path)
    context.close()
    size = path.stat().st_size
    print(f"{path.name:34} {size / 1000:.0f} kB")
    if size > MAX_BYTES:
        raise RuntimeError(f"{path.name} has {size:,} bytes, more than {MAX_BYTES:,}")
    return path


def main() -> None:
    if browser_session.chromium() is None:
        sys.exit("No browser to take pictures with: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=browser_session.chromium(),
            args=list(browser_session.CHROMIUM_FLAGS),
        )
        for name, shots in (("healthy", HEALTHY), ("troubled", TROUBLED)):
            wanted = [s for s in shots if not sys.argv[1:] or s.name in sys.argv[1:]]
            if not wanted:
                continue
            url = f"sqlite:///{Path(folder) / name}.db"
            seeded_store.seed(url, num_requests=3000, healthy=name == "healthy")
            with browser_session.app_server(url, "http://127.0.0.1:16686") as address:
                for shot in wanted:
                    for theme in ("light", "dark"):
                        take(browser, address, shot, theme)
        browser.close()


if __name__ == "__main__":
    main()
