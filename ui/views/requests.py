"""Requests: every request with what it reused and what it left, filterable."""

from __future__ import annotations

from typing import Final

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
STATUS_WORDS: Final = {
    "open": "running",
    "finished": "finished",
    "engine_lost": "engine lost",
}


def filter_bar() -> RequestFilter:
    """The filter's controls; what they choose."""
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
    since_ns = shell.range_picker()
    return RequestFilter(
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
        since_ns=since_ns,
    )


def download(wanted: RequestFilter, sort: str) -> list[Row]:
    """The matching rows, as many as a download holds."""
    return shell.queries().find_requests(wanted, sort=sort, limit=DOWNLOAD_LIMIT)


def body() -> None:
    """The filters, how many match, the rows, and the downloads."""
    wanted = filter_bar()
    with st.container(
        horizontal=True,
        horizontal_alignment="distribute",
        vertical_alignment="center",
        key="result_bar",
    ):
        total = shell.queries().count_requests(wanted)
        shown = f"{COUNT_LIMIT:,}+" if total > COUNT_LIMIT else f"{total:,}"
        st.markdown(
            f"**{shown}** request{'' if total == 1 else 's'}",
            help="Requests that match the filter and the time range.",
            width="content",
        )
        with st.container(
            horizontal=True, vertical_alignment="center", width="content"
        ):
            sort = st.selectbox(
                "Order",
                list(SORT_WORDS),
                format_func=SORT_WORDS.__getitem__,
                key="sort",
                bind="query-params",
                label_visibility="collapsed",
                width=250,
            )
            last_page = max(1, -(-min(total, COUNT_LIMIT) // PAGE_ROWS))
            page = st.number_input(
                "Page",
                min_value=1,
                max_value=last_page,
                key="page",
                label_visibility="collapsed",
                width=110,
                help=f"Page of {PAGE_ROWS} requests.",
            )
            st.download_button(
                "CSV",
                lambda: downloads.as_csv(download(wanted, sort)),
                "requests.csv",
                "text/csv",
                icon=":material/download:",
                on_click="ignore",
                help=f"The matching requests, at most {DOWNLOAD_LIMIT:,}.",
            )
            st.download_button(
                "JSON",
                lambda: downloads.as_json(download(wanted, sort)),
                "requests.json",
                "application/json",
                icon=":material/download:",
                on_click="ignore",
                help=f"The matching requests, at most {DOWNLOAD_LIMIT:,}.",
            )
    if total == 0:
        no_rows(wanted)
        return
    rows = shell.queries().find_requests(
        wanted, sort=sort, limit=PAGE_ROWS, offset=(page - 1) * PAGE_ROWS
    )
    opened = record_table(
        request_rows.COLUMNS,
        [request_rows.request_row(row) for row in rows],
        key="requests_table",
        caption="Requests that match the filter",
    )
    shell.follow(opened)


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


shell.show("Requests", "What each request reused, and what it left behind.", body)
