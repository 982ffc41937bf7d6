"""What every page stands in: its settings and store, the header, the live refresh."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from ui import formatting, reasons, settings, stream_state
from ui.components.record_table import Link
from ui.connection import StoreConnection, StoreError
from ui.queries import RETAINED, Queries
from ui.recent import RecentAnswers

T = TypeVar("T")

HERE: Final = Path(__file__).parent
LOGO: Final = str(HERE / "logo.svg")
REFRESH_S: Final = 1.0
"""A new event is on the screen within this and one query."""

RANGES: Final[dict[str, int | None]] = {
    "15 min": 900,
    "1 h": 3600,
    "24 h": 86_400,
    "7 d": 604_800,
    "All": None,
}
DEFAULT_RANGE: Final = "All"

_PAGES: Final = (
    ("overview", "Overview", ":material/monitoring:"),
    ("requests", "Requests", ":material/list:"),
    ("request", "Request", ":material/linear_scale:"),
    ("conversations", "Conversations", ":material/forum:"),
    ("compare", "Compare", ":material/compare_arrows:"),
    ("health", "Stream health", ":material/sensors:"),
)


def pages() -> dict[str, Any]:
    """The pages by name, in the order of the menu."""
    return {
        name: st.Page(
            HERE / "views" / f"{name}.py",
            title=title,
            icon=icon,
            url_path=name,
            default=name == "overview",
        )
        for name, title, icon in _PAGES
    }


def configured() -> settings.UiSettings:
    """The settings of this process."""
    return settings.load(sys.argv[1:], os.environ)


@cache
def _queries(url: str) -> Queries:
    return Queries(StoreConnection(url))


def queries() -> Queries:
    """The queries over the configured store.

    Raises:
        StoreError: the configured URL is not that of a store.
    """
    return _queries(configured().store_url)


_recent = RecentAnswers()


def recent(question: Hashable, compute: Callable[[], Any]) -> Any:
    """The answer to a costly ``question`` about the store, a moment old at most."""
    return _recent.ask((configured().store_url, question), compute)


# -- links ----------------------------------------------------------------


def page_link(page: str, text: str, **params: str) -> Link:
    """A link to ``page`` of the dashboard, relative, so that a path prefix holds."""
    href = f"{page}?{urlencode(params)}" if params else page
    return Link(text, href)


def request_link(row: dict[str, Any], text: str | None = None) -> Link:
    """A link to a request's page: by the id that the client saw, where known."""
    shown = row["external_request_id"] or row["request_id"]
    return page_link("request", text or shown, request=row["request_id"])


def outcome_words(outcome: str) -> str:
    """An outcome as a filter shows it, and as the address of a filtered page has it."""
    return (
        reasons.RETAINED.short
        if outcome == RETAINED
        else reasons.no_checkpoint(outcome).short
    )


def trace_link(trace_id: str | None, text: str = "Open in Jaeger") -> Link | None:
    """A link to a trace, where Jaeger is configured and the trace is known."""
    base = configured().jaeger_url
    if not base or not trace_id:
        return None
    return Link(text, f"{base}/trace/{trace_id}", external=True)


# -- time -----------------------------------------------------------------


def local_time(ns: int | None, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in the zone of the browser; a dash where it is not known."""
    if ns is None:
        return "—"
    return datetime.fromtimestamp(ns / 1e9, browser_zone()).strftime(pattern)


def local_clock(ns: int) -> str:
    """The time of day in the zone of the browser, to the millisecond."""
    return local_time(ns, "%H:%M:%S.%f")[:-3]


def browser_zone() -> ZoneInfo:
    """The time zone of whoever looks."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")


def range_picker() -> str:
    """The time-range control; the name of the range it chooses."""
    chosen = st.segmented_control(
        "Time range",
        list(RANGES),
        default=DEFAULT_RANGE,
        required=True,
        key="range",
        bind="query-params",
        help="Requests whose last event lies in this range, up to now.",
    )
    return chosen or DEFAULT_RANGE


def range_start(name: str) -> int | None:
    """When a range that ends now begins; None for everything."""
    seconds = RANGES[name]
    return None if seconds is None else time.time_ns() - seconds * 1_000_000_000


class Figure(NamedTuple):
    """A number for a metric: ``counts`` says what it counts; ``delta`` how it changed,
    and where there is no number ``why_none``."""

    label: str
    value: str
    counts: str
    delta: str | None = None
    less_is_better: bool = False
    why_none: str | None = None


# -- the page -------------------------------------------------------------


def show(title: str, subtitle: str, body: Callable[[], None]) -> None:
    """Show a page: its header, then ``body``, again each :data:`REFRESH_S` seconds."""
    show_with_controls(title, subtitle, lambda: None, lambda _: body())


def show_with_controls(
    title: str, subtitle: str, controls: Callable[[], T], body: Callable[[T], None]
) -> None:
    """Show a page whose ``controls`` stand still while its ``body`` is live.

    ``controls`` runs when something on the page is used, and when an engine came
    or went; ``body`` takes what it chose, again each :data:`REFRESH_S` seconds.
    While paused ``body`` too runs only when something is used. A store that cannot
    be read is said in a sentence and tried again.
    """
    if st.session_state.get("live", True):
        st.session_state.pop("paused_ns", None)
    else:
        st.session_state.setdefault("paused_ns", time.time_ns())
    live = _header(title, subtitle)
    if problem := configured().problem:
        st.warning(problem, icon=":material/settings_alert:")
    try:
        known = _engine_ids()
        chosen = controls()
    except StoreError:
        known, chosen = None, None  # the body says why, and is tried again

    def refresh() -> None:
        try:
            if _engine_ids() != known:
                st.rerun()
            _stream_banner()
            body(chosen)  # type: ignore[arg-type]
        except StoreError as error:
            show_store_error(error)

    st.fragment(refresh, run_every=REFRESH_S if live else None)()


def _header(title: str, subtitle: str) -> bool:
    """The title, the clock and the switch; whether the page is live."""
    with st.container(
        horizontal=True,
        horizontal_alignment="distribute",
        vertical_alignment="bottom",
        key="page_header",
    ):
        with st.container(width="content", gap=None):
            st.title(title, anchor=False)
            st.caption(subtitle)
        with st.container(
            width="content",
            horizontal=True,
            vertical_alignment="center",
            key="live_bar",
        ):
            st.fragment(_freshness, run_every=REFRESH_S)()
            return st.toggle(
                "Live",
                value=True,
                key="live",
                persist_state="session",
                help="New events appear within two seconds. Pause to read in peace: "
                "filters still answer with what is new.",
            )


def _engine_ids() -> list[str]:
    return [engine["engine_id"] for engine in queries().engines()]


def _stream_banner() -> None:
    if banner := stream_state.banner(queries().streams(), time.time_ns()):
        alert = st.error if banner.level == "error" else st.warning
        alert(f"{banner.text} · [Stream health](health)", icon=":material/sensors_off:")


def show_store_error(error: StoreError) -> None:
    """Say why there is nothing to see, and what to run."""
    with st.container(border=True, key="store_error"):
        st.subheader(
            ":material/database: Nothing here yet"
            if error.missing
            else ":material/error: The store cannot be read",
            anchor=False,
        )
        st.text(str(error))
        if error.hint:
            st.text(error.hint)
        if error.command:
            st.code(error.command, language="bash", wrap_lines=True)
        st.caption("This page tries again every second while it is live.")


def empty_state(why: str, what: str = "", command: str = "") -> None:
    """Say why a part of a page is empty, and what to do or run."""
    with st.container(border=True):
        st.markdown(f"**{formatting.markdown(why)}**")
        if what:
            st.caption(formatting.markdown(what))
        if command:
            st.code(command, language="bash", wrap_lines=True)


def _freshness() -> None:
    """The clock: how old the newest event is, or since when the page is paused."""
    try:
        newest = queries().newest_event_ns()
        paused = st.session_state.get("paused_ns")
        if paused is not None:
            changed = queries().count_events_since(paused)
            more = f" · {formatting.count(changed)} changed since" if changed else ""
            since = local_time(paused, "%H:%M:%S")
            st.caption(
                f":material/pause_circle: Paused at {since}{more}",
                help="Requests with an event after the page was paused.",
                width="content",
            )
            return
        if newest is None:
            st.caption(":material/schedule: no event yet", width="content")
            return
        age = max(0, time.time_ns() - newest)
        st.caption(
            f":material/schedule: newest event {_age(age)} ago",
            help="Age of the newest event of any request, by the engine's clock. "
            f"Read at {local_time(time.time_ns(), '%H:%M:%S')}.",
            width="content",
        )
    except StoreError:
        st.caption(":material/schedule: no data", width="content")


def _age(ns: int) -> str:
    seconds = ns / 1e9
    return f"{seconds:.0f} s" if seconds < 100 else formatting.duration(ns)


def metrics(items: Sequence[Figure]) -> None:
    """A row of figures, each with what it counts; it wraps on a narrow screen."""
    with st.container(key="metrics"):
        for figure in items:
            st.metric(
                figure.label,
                figure.value,
                delta=figure.why_none or figure.delta,
                **_delta_look(figure),
                help=figure.counts,
                border=True,
                height="stretch",
            )


def _delta_look(figure: Figure) -> dict[str, Any]:
    """No arrow and no colour where nothing went up or down."""
    if figure.why_none or not any(c in "123456789" for c in figure.delta or ""):
        return {"delta_color": "off", "delta_arrow": "off"}
    return {"delta_color": "inverse" if figure.less_is_better else "normal"}
