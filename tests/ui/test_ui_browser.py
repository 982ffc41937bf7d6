"""The running app in a real browser: live, deep-linked, narrow, hostile."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import browser_session
import pytest
import seeded_store
import sqlalchemy as sa
from playwright.sync_api import Browser, Page, expect, sync_playwright

from event_consumer import tables

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>"
    "![x](http://evil.example/x.png)"
)
PAGES = ("", "requests", "request", "conversations", "compare", "health")
JAEGER = "http://127.0.0.1:16686"

expect.set_options(timeout=20_000)

pytestmark = pytest.mark.skipif(
    browser_session.chromium() is None,
    reason="NOT TESTED in a browser: apt-get install chromium",
)


class LiveStore:
    """A seeded store that the test writes to while it is looked at."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        seeded_store.seed(self.url, num_requests=300, healthy=True)
        self._engine = sa.create_engine(self.url)
        self._prod = seeded_store.engine_row(3, "prod-1", time.time_ns())
        self.add(HOSTILE, session_id=HOSTILE)

    def add(self, external_id: str, **more) -> None:
        """A request that ends now."""
        now = time.time_ns()
        row = seeded_store.request_row(
            self._prod,
            external_id,
            now,
            arrival_ns=now - 10**9,
            admitted_ns=now - 10**9,
            num_prompt_tokens=2000,
            num_cached_tokens=1056,
            num_output_tokens=10,
            hit_limited_by="prompt_end",
            no_checkpoint_reason="length",
        )
        with self._engine.begin() as connection:
            connection.execute(sa.insert(tables.requests), [row | more])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LiveStore:
    return LiveStore(tmp_path_factory.mktemp("live") / "live.db")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_session.chromium(),
            args=list(browser_session.CHROMIUM_FLAGS),
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(store: LiveStore, browser: Browser) -> Iterator[str]:
    """The app; the first thing it is ever asked for is a deep link."""
    with browser_session.app_server(store.url, JAEGER) as address:
        page = browser.new_page()
        page.goto(f"{address}request?request=chatcmpl-arm-on-turn-1")
        expect(page.get_by_role("heading", name="Token axis")).to_be_visible(
            timeout=60_000
        )
        expect(page.get_by_role("link", name="Stream health")).to_be_visible()
        page.close()
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 900},
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield page
    context.close()


def row(page: Page, name: str):
    """The table row that shows ``name``."""
    return page.locator("tr.row", has_text=name)


def test_a_new_request_appears_within_two_seconds(page, address, store):
    """The filter, the opened row, the focus and what one looks at stay as they are."""
    page.goto(f"{address}requests?outcome=ended+by+length&label=prod-1")
    looked_at = page.locator("tr.row").nth(6)
    looked_at.locator(".chevron").click()
    name = looked_at.locator("a").first.inner_text()
    opened = page.locator("tr.detail-row")
    expect(opened).to_contain_text("Raise max_tokens")
    looked_at.scroll_into_view_if_needed()
    looked_at.locator(".chevron").focus()
    top = row(page, name).bounding_box()["y"]
    waited = []
    for number in range(3):
        new = f"chatcmpl-live-{number}"
        store.add(f"chatcmpl-other-{number}", no_checkpoint_reason="aborted")
        started = time.monotonic()
        store.add(new)
        expect(row(page, new)).to_be_attached()
        waited.append(time.monotonic() - started)
        assert row(page, f"chatcmpl-other-{number}").count() == 0
    assert statistics.median(waited) < 2.0, waited
    expect(page).to_have_url(re.compile("outcome=ended.by.length"))
    expect(opened).to_have_count(1)
    assert (
        row(page, name).locator("xpath=following-sibling::tr[1]").get_attribute("class")
        == "detail-row"
    )
    focused = page.evaluate(
        "() => { let e = document.activeElement;"
        " while (e.shadowRoot) e = e.shadowRoot.activeElement;"
        " return e.closest('tr').innerText }"
    )
    assert name in focused
    assert abs(row(page, name).bounding_box()["y"] - top) < 250


def test_pause_keeps_the_page_and_resume_catches_up(page, address, store):
    page.goto(f"{address}requests?q=chatcmpl-pause")
    expect(page.get_by_text("No request matches")).to_be_visible()
    page.get_by_test_id("stCheckbox").locator("label").click()
    expect(page.get_by_text("Paused at")).to_be_visible()
    store.add("chatcmpl-pause-1")
    expect(page.get_by_text("1 changed since")).to_be_visible()
    assert row(page, "chatcmpl-pause-1").count() == 0
    page.get_by_test_id("stCheckbox").locator("label").click()
    expect(row(page, "chatcmpl-pause-1")).to_be_attached()
    expect(page.get_by_text("newest event")).to_be_visible()


def test_links_stay_in_the_session_and_go_back(page, address):
    """At any moment of the refresh: a switch that raced with it once blanked pages."""
    errors = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(f"{address}requests?q=arm-on-turn")
    loads = page.evaluate("performance.timeOrigin")
    figure = page.get_by_test_id("stMetricValue").nth(1)
    for moment_ms in (0, 350, 700):
        first = row(page, "chatcmpl-arm-on-turn-2").locator("a").first
        first.wait_for()
        page.wait_for_timeout(moment_ms)
        first.click()
        expect(figure).to_have_text("7,392")
        expect(page).to_have_url(
            re.compile(r"/request\?request=chatcmpl-arm-on-turn-2")
        )
        page.wait_for_timeout(moment_ms)
        row(page, "chatcmpl-arm-on-turn-1").locator("a").first.click()
        expect(figure).to_have_text("3,168")
        page.go_back()
        expect(figure).to_have_text("7,392")
        page.go_back()
        expect(page.locator("tr.row")).to_have_count(5)
    row(page, "chatcmpl-arm-on-turn-2").locator("a").first.click()
    page.get_by_role("link", name="Conversation", exact=True).click()
    expect(page.get_by_text("Computed again")).to_be_visible()
    expect(page).to_have_url(re.compile("conversation=reference-dialog-arm-on"))
    page.get_by_role("link", name="Requests", exact=True).click()
    expect(page.get_by_role("heading", name="Requests")).to_be_visible()
    assert page.evaluate("performance.timeOrigin") == loads
    assert [e for e in errors if "404" not in e] == []


def test_a_filter_is_in_the_address(page, address):
    page.goto(f"{address}requests")
    expect(page.locator("tr.row").first).to_be_visible()
    page.get_by_role("textbox", name="Search").fill("arm-off-turn")
    page.get_by_role("textbox", name="Search").press("Enter")
    expect(page.locator("tr.row")).to_have_count(5)
    expect(page).to_have_url(re.compile("q=arm-off-turn"))
    page.reload()
    expect(page.locator("tr.row")).to_have_count(5)
    page.get_by_role("textbox", name="Search").fill("nobody is called this")
    page.get_by_role("textbox", name="Search").press("Enter")
    page.get_by_role("button", name="Clear all filters").click()
    expect(page.locator("tr.row")).to_have_count(50)
    expect(page.get_by_role("textbox", name="Search")).to_have_value("")
    expect(page).not_to_have_url(re.compile("q="))


@pytest.mark.parametrize(
    ("path", "width"), [*((path, 390) for path in PAGES), ("requests", 1280)]
)
def test_nothing_is_cut_off(page, address, path, width):
    """No page scrolls sideways, in the dark theme as in the light one."""
    scheme = "dark" if width == 390 else "light"
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(f"{address}{path}")
    expect(page.locator("tr.row, .js-plotly-plot").first).to_be_visible(timeout=60_000)
    for box in ("stAppViewContainer", "stMain", "stMainBlockContainer"):
        wide = page.get_by_test_id(box).evaluate("e => e.scrollWidth - e.clientWidth")
        assert wide <= 0, box
    for table in page.locator(".records").all():
        assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    ground = page.get_by_test_id("stApp").evaluate(
        "e => getComputedStyle(e).backgroundColor"
    )
    assert ground == ("rgb(17, 22, 28)" if scheme == "dark" else "rgb(255, 255, 255)")


BOXES = """() => {
  const box = e => { const b = e.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom] };
  const plot = document.querySelector(".js-plotly-plot");
  const all = s => [...plot.querySelectorAll(s)].map(box);
  return { legend: all(".legend .traces"), others: [
    ...all(".xy path, .x2y2 path"), ...all(".xtick text, .ytick text"),
    ...all(".g-ytitle, .g-y2title")].filter(b => b[2] > b[0]) };
}"""


@pytest.mark.parametrize("width", [1280, 1400, 1920])
def test_a_legend_overlaps_nothing(page, address, width):
    page.set_viewport_size({"width": width, "height": 1000})
    page.goto(address)
    expect(page.locator(".legend .traces").first).to_be_visible(timeout=60_000)
    found = page.evaluate(BOXES)
    assert len(found["legend"]) == 2
    assert len(found["others"]) > 20
    for left, top, right, bottom in found["legend"]:
        for other in found["others"]:
            apart = (
                other[2] <= left
                or other[0] >= right
                or other[3] <= top
                or other[1] >= bottom
            )
            assert apart, (other, (left, top, right, bottom))


def test_narrow_rows_are_cards(page, address):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}requests?q=arm-on-turn-1")
    card = row(page, "chatcmpl-arm-on-turn-1")
    expect(card.get_by_text("3,168 of 3,634")).to_be_visible()
    expect(card.get_by_text("7,392")).to_be_visible()
    assert card.bounding_box()["height"] > 100
    assert not page.locator("thead").is_visible()


def test_a_hostile_id_is_shown_and_does_nothing(page, address):
    """It is read as it is, and nothing is fetched from anywhere else."""
    hosts, dialogs = set(), []
    page.on("request", lambda r: hosts.add(r.url.split("/")[2].split(":")[0]))
    page.on("dialog", lambda d: (dialogs.append(d.message), d.dismiss()))
    asked = quote(HOSTILE, safe="")
    for path in (
        f"requests?q={quote('onerror')}",
        f"request?request={asked}",
        f"conversations?conversation={asked}",
    ):
        page.goto(address + path)
        expect(page.get_by_text(HOSTILE).first).to_be_visible()
    page.goto(f"{address}request?request={asked}")
    expect(page.get_by_role("heading", name="Token axis")).to_be_visible()
    assert page.title() != "owned"
    assert page.locator("img[src='x']").count() == 0
    assert not dialogs
    assert {h for h in hosts if h} == {"127.0.0.1"}


def test_an_id_is_copied(page, address):
    page.goto(f"{address}requests?q=arm-on-turn-1")
    page.get_by_role("button", name="Copy chatcmpl-arm-on-turn-1").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "chatcmpl-arm-on-turn-1"


def test_by_keyboard(page, address):
    """Tab reaches the rows; Enter opens one; arrows go from row to row."""
    page.goto(f"{address}requests?q=arm-on-turn")
    expect(page.locator("tr.row")).to_have_count(5)
    page.get_by_role("button", name="JSON").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.locator(".chevron:focus").count():
            break
    expect(page.locator(".chevron:focus")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator("tr.detail-row")).to_have_count(1)
    expect(page.locator(".chevron").first).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".chevron").nth(1)).to_be_focused()


def test_open_in_jaeger(page, address):
    page.goto(f"{address}request?request=chatcmpl-arm-on-turn-1")
    link = page.get_by_role("link", name="Open in Jaeger")
    expect(link).to_have_attribute("target", "_blank")
    assert link.get_attribute("href").startswith(f"{JAEGER}/trace/")


def test_downloads_hold_the_filtered_rows(page, address):
    page.goto(f"{address}requests?q=arm-on-turn")
    expect(page.locator("tr.row")).to_have_count(5)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 6
    assert "external_request_id" in lines[0]


def test_a_gapped_stream_raises_a_banner_while_one_looks(page, address, store):
    page.goto(f"{address}requests")
    expect(page.locator("tr.row").first).to_be_visible()
    assert page.get_by_test_id("stAlert").count() == 0
    first = sa.select(sa.func.min(tables.streams.c.endpoint)).scalar_subquery()
    for state, count in (("gapped", 1), ("live", 0)):
        with store._engine.begin() as connection:
            connection.execute(
                sa.update(tables.streams)
                .where(tables.streams.c.endpoint == first)
                .values(state=state)
            )
        expect(page.get_by_test_id("stAlert")).to_have_count(count)
