"""Requests: every request with what it reused and what it left, filterable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import streamlit as st

from ui import downloads, reasons, request_rows, shell
from ui.components.record_table import record_table
from ui.queries import COUNT_LIMIT, DOWNLOAD_LIMIT, RETAINED, RequestFilter, Row

PAGE_ROWS: Final = 50

SORT_WORDS: Final = {
    "newest": "Newest first",
    "oldest": "Oldest first",
    "recomputed": "Most prompt tokens computed",
    "reused": "Most prompt tokens reused",
    "prompt": "Longest prompt",
}
NO_FILTER: Final[dict[str, Any]] = {
    "q": "",
    "outcome": [],
    "label": [],
    "limit": [],
    "status": [],
    "finish": [],
    "model": [],
    "engine": [],
    "computed": 0,
    "incomplete": False,
    "range": shell.DEFAULT_RANGE,
}
STATUS_WORDS: Final = {
    "open": "running",
    "finished": "finished",
    "engine_lost": "engine lost",
}


class Chosen(NamedTuple):
    """What the controls say: which requests, of which time, and in which order."""

    timeless: RequestFilter
    range_name: str
    sort: str

    def wanted(self) -> RequestFilter:
        """The filter, its time range counted back from now."""
        return replace(self.timeless, since_ns=shell.range_start(self.range_name))


def controls() -> Chosen:
    """The filter's controls, the order, and the downloads."""
    engines = shell.queries().engines()
    labels = sorted({e["label"] for e in engines})
    models = sorted({e["model_name"] for e in engines if e["model_name"]})
    by_id = {e["engine_id"]: e for e in engines}
    with st.container(horizontal=True, vertical_alignment="bottom", key="filters"):
        text = st.text_input(
            "Search",
            placeholder="part of a request, session or conversation id",
            key="q",
            bind="query-params",
            icon=":material/search:",
            help="Part of a request id, session id or conversation id.",
        )
        # The address holds what is shown, not the code: shell.outcome_words.
        outcomes = st.multiselect(
            "Left for the next turn",
            [RETAINED, *reasons.NO_CHECKPOINT, *reasons.UNSUPPORTED],
            format_func=shell.outcome_words,
            key="outcome",
            bind="query-params",
            placeholder="anything",
            help="What the request published, or why it published nothing.",
        )
        label = st.multiselect(
            "Engine",
            labels,
            format_func=lambda name: name or "unlabelled",
            key="label",
            bind="query-params",
            placeholder="any",
            help="The label that the engine was started with.",
        )
        with st.popover("More filters", icon=":material/tune:"):
            limits = st.multiselect(
                "Reuse stopped at",
                list(reasons.HIT_LIMIT),
                format_func=lambda code: reasons.hit_limit(code).short,
                key="limit",
                bind="query-params",
                help="What kept the reuse of the prompt from going deeper.",
            )
            statuses = st.multiselect(
                "Status",
                list(STATUS_WORDS),
                format_func=STATUS_WORDS.__getitem__,
                key="status",
                bind="query-params",
                help="Whether the request runs, ended, or its engine died.",
            )
            finish = st.multiselect(
                "Finish reason",
                list(reasons.FINISH),
                key="finish",
                bind="query-params",
                help="How the answer ended.",
            )
            model = st.multiselect(
                "Model",
                models,
                key="model",
                bind="query-params",
                help="The model that the engine serves.",
            )
            engine_ids = st.multiselect(
                "Engine start",
                list(by_id),
                format_func=lambda e: f"{by_id[e]['label'] or 'unlabelled'} · {e[:8]}",
                key="engine",
                bind="query-params",
                help="One start of an engine: its epoch.",
            )
            computed = st.number_input(
                "At least this many prompt tokens computed",
                min_value=0,
                step=256,
                key="computed",
                bind="query-params",
                help="Prompt tokens that were not reused.",
            )
            incomplete = st.checkbox(
                "Only requests with missing events",
                key="incomplete",
                bind="query-params",
                help="Part of the stream was lost while they ran.",
            )
    with st.container(
        horizontal=True,
        horizontal_alignment="distribute",
        vertical_alignment="bottom",
        key="second_bar",
    ):
        range_name = shell.range_picker()
        timeless = RequestFilter(
            text=text,
            labels=label,
            engine_ids=engine_ids,
            models=model,
            statuses=statuses,
            outcomes=outcomes,
            limits=limits,
            finish_reasons=finish,
            min_recomputed=int(computed),
            only_incomplete=incomplete,
        )
        with st.container(
            horizontal=True, vertical_alignment="bottom", width="content"
        ):
            sort = st.selectbox(
                "Order",
                list(SORT_WORDS),
                format_func=SORT_WORDS.__getitem__,
                key="sort",
                bind="query-params",
                width=230,
                help="Of all matching requests, not of this page only.",
            )
            chosen = Chosen(timeless, range_name, sort)
            downloads_of(chosen)
    if st.session_state.get("chosen_before") != chosen:
        st.session_state["chosen_before"] = chosen
        st.session_state["page"] = 1
    return chosen


def downloads_of(chosen: Chosen) -> None:
    """Buttons that make a file of the matching rows when they are used."""
    for name, mime, make in (
        ("CSV", "text/csv", downloads.as_csv),
        ("JSON", "application/json", downloads.as_json),
    ):
        st.download_button(
            name,
            lambda make=make: make(  # type: ignore[misc]
                shell.queries().find_requests(
                    chosen.wanted(), sort=chosen.sort, limit=DOWNLOAD_LIMIT
                )
            ),
            f"requests.{name.lower()}",
            mime,
            icon=":material/download:",
            on_click="ignore",
            help=f"The matching requests, at most {DOWNLOAD_LIMIT:,}.",
        )


def body(chosen: Chosen) -> None:
    """How many match, and a page of them."""
    wanted = chosen.wanted()
    page, rows, total = matches(wanted, chosen.sort)
    with st.container(
        horizontal=True,
        horizontal_alignment="distribute",
        vertical_alignment="center",
        key="result_bar",
    ):
        shown = f"{COUNT_LIMIT:,}+" if total > COUNT_LIMIT else f"{total:,}"
        st.markdown(
            f"**{shown}** request{'' if total == 1 else 's'}",
            help="Requests that match the filter and the time range.",
            width="content",
        )
        page_picker(page, num_pages(total))
    if not rows:
        no_rows(wanted)
        return
    record_table(
        request_rows.COLUMNS,
        [request_rows.request_row(row) for row in rows],
        key="requests_table",
        caption="Requests that match the filter",
    )


def matches(wanted: RequestFilter, sort: str) -> tuple[int, list[Row], int]:
    """The page that is looked at, its rows, and how many match in all.

    A page that is not full tells the number by itself; a page beyond the last one
    is the last one.
    """
    queries = shell.queries()
    page = int(st.session_state.get("page", 1))
    while True:
        offset = (page - 1) * PAGE_ROWS
        rows = queries.find_requests(wanted, sort=sort, limit=PAGE_ROWS, offset=offset)
        if 0 < len(rows) < PAGE_ROWS or (page == 1 and not rows):
            return page, rows, offset + len(rows)
        total = queries.count_requests(wanted)
        if rows:
            return page, rows, total
        page = min(page - 1, num_pages(total))


def num_pages(total: int) -> int:
    """Pages that can be turned to: as far as matches are counted."""
    return max(1, -(-min(total, COUNT_LIMIT) // PAGE_ROWS))


def page_picker(page: int, last_page: int) -> None:
    """Turns pages; not shown where there is only one."""
    if last_page == 1:
        return
    st.session_state["page"] = page
    with st.container(horizontal=True, vertical_alignment="center", width="content"):
        st.caption(f"page of {last_page:,}", width="content")
        st.number_input(
            "Page",
            min_value=1,
            max_value=max(page, last_page),
            key="page",
            label_visibility="collapsed",
            width=120,
            help=f"Page of {PAGE_ROWS} requests.",
        )


def no_rows(wanted: RequestFilter) -> None:
    """Why there are no rows: no request yet, or none that matches."""
    if shell.queries().newest_event_ns() is None:
        shell.empty_state(
            "No request has been seen yet",
            "The store is there, and no engine has reported a request. Send one to an "
            "engine that is served with events on, or look at Stream health to see "
            "whether the consumer hears it.",
            "vllm-fork serve MODEL",
        )
    elif wanted == RequestFilter(since_ns=wanted.since_ns):
        shell.empty_state(
            "No request in this time range",
            "The store holds older ones: choose a longer range above.",
        )
    else:
        shell.empty_state(
            "No request matches these filters",
            "The store holds others: take a filter away, or choose a longer range.",
        )
        if st.button(
            "Clear all filters",
            icon=":material/filter_alt_off:",
            on_click=clear_filters,
        ):
            st.rerun()


def clear_filters() -> None:
    """Every filter back to what it is when the page is opened."""
    for key, nothing in NO_FILTER.items():
        st.session_state[key] = nothing


shell.show_with_controls(
    "Requests", "What each request reused, and what it left behind.", controls, body
)
