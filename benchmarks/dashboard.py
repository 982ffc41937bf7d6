"""How fast the dashboard is over a large store: first paint, and a filter.

A real Chromium opens the Requests page of a warm server (``first_paint_s``: from
navigation to the first table row shown), then changes a filter (``filter_s``:
from the change to the first row of the new result), several times each; medians.

    python benchmarks/dashboard.py --requests 100000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "ui")]

import browser_session  # noqa: E402
import seeded_store  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

WAIT_MS: Final = 30_000
ABSENT: Final = "nothing-is-called-this"
SEARCHES: Final = ("arm-on-turn-1", "user-4", "chat-001", ABSENT)
"""Parts of ids: rare, frequent, middling, and absent."""

OUTCOMES: Final = ("length", "preempted", "error", "aborted")


def log(text: str) -> None:
    print(text, file=sys.stderr)


def rows_with(page: Page, text: str) -> None:
    """Wait until there are rows and each of them shows ``text``."""
    deadline = time.perf_counter() + WAIT_MS / 1000
    only = "(rows, t) => rows.length > 0 && rows.every(r => r.innerText.includes(t))"
    while not page.locator("tr.row").evaluate_all(only, text):
        if time.perf_counter() > deadline:
            raise TimeoutError(f"no table of rows with {text!r} within 30 s")
        page.wait_for_timeout(10)


def first_paint(page: Page, address: str, path: str, shown: str) -> float:
    """Seconds from navigation until ``shown`` (a selector) is on the screen."""
    started = time.perf_counter()
    page.goto(address + path, wait_until="commit")
    page.locator(shown).first.wait_for(state="visible", timeout=WAIT_MS)
    return time.perf_counter() - started


def search(page: Page, text: str) -> float:
    """Seconds from entering a search until its result is on the screen."""
    box = page.get_by_role("textbox", name="Search")
    box.fill(text)
    started = time.perf_counter()
    box.press("Enter")
    if text == ABSENT:
        page.get_by_text("No request matches").wait_for(timeout=WAIT_MS)
    else:
        rows_with(page, text)
    return time.perf_counter() - started


def choose_outcome(page: Page, words: str) -> float:
    """Seconds from choosing an outcome until only its rows are on the screen."""
    page.get_by_test_id("stMultiSelect").first.locator("input").click()
    option = page.get_by_role("option", name=words, exact=True)
    option.wait_for(timeout=WAIT_MS)
    started = time.perf_counter()
    option.click()
    rows_with(page, words)
    return time.perf_counter() - started


def measure(address: str, page: Page, rounds: int) -> dict[str, list[float]]:
    """All timings, in seconds, by what was timed."""
    timings: dict[str, list[float]] = {
        name: [] for name in ("requests", "overview", "search", "outcome")
    }
    first_paint(page, address, "requests", "tr.row")  # warms server and browser
    first_paint(page, address, "", ".js-plotly-plot")
    for _ in range(rounds):
        timings["requests"].append(first_paint(page, address, "requests", "tr.row"))
        for text in SEARCHES:
            timings["search"].append(search(page, text))
        timings["overview"].append(first_paint(page, address, "", ".js-plotly-plot"))
    from ui import shell

    for outcome in OUTCOMES:
        first_paint(page, address, "requests", "tr.row")
        timings["outcome"].append(choose_outcome(page, shell.outcome_words(outcome)))
    return timings


def run(num_requests: int, rounds: int, store: str | None) -> dict[str, Any]:
    """Seed a store, start the app and the browser, and time them."""
    with tempfile.TemporaryDirectory() as folder:
        url = store or f"sqlite:///{Path(folder) / 'store.db'}"
        if store is None:
            started = time.perf_counter()
            seeded_store.seed(url, num_requests=num_requests, hours=48, healthy=True)
            log(f"seeded {num_requests:,} requests in {_s(started)}")
        with browser_session.app_server(url) as address, sync_playwright() as play:
            browser = play.chromium.launch(
                executable_path=browser_session.chromium(),
                args=list(browser_session.CHROMIUM_FLAGS),
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            started = time.perf_counter()
            timings = measure(address, page, rounds)
            log(f"measured for {_s(started)}")
            browser.close()
    for name, values in timings.items():
        shown = " ".join(f"{value:.2f}" for value in values)
        log(f"{name:9} median {statistics.median(values):.2f} s of {shown}")
    return {
        "first_paint_s": round(statistics.median(timings["requests"]), 3),
        "filter_s": round(statistics.median(timings["search"] + timings["outcome"]), 3),
        "overview_s": round(statistics.median(timings["overview"]), 3),
        "slowest_filter_s": round(max(timings["search"] + timings["outcome"]), 3),
    }


def _s(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", help="measure over this store instead of a new one")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    options = parser.parse_args()
    if browser_session.chromium() is None:
        log("No browser to measure with: apt-get install chromium")
        return 1
    result = run(options.requests, options.rounds, options.store)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
