"""Overview: how much is reused, what is kept, and what to look at."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple

import streamlit as st

from ui import formatting, reasons, shell
from ui.charts import layout, overview
from ui.queries import DEPTH_EDGES, RETAINED, Breakdown, RequestFilter, Row

NUM_BUCKETS: Final = 90
MIN_SPAN_NS: Final = 9_000_000_000  # an axis of one event would show nanoseconds


class Figures(NamedTuple):
    """What the page shows; ``pinned`` and ``buckets`` by time bucket.

    ``before`` is the range of the same length before this one, None for everything.
    """

    start_ns: int
    width_ns: int
    breakdown: Breakdown
    buckets: list[Row]
    pinned: list[int]
    pinned_now: Row
    use: Row
    before: Breakdown | None


def gather(wanted: RequestFilter, whole_ns: int | None) -> Figures | None:
    """Ask the store; None where it holds no request at all.

    Args:
        wanted: labels and the time range.
        whole_ns: the oldest event where the range is everything.
    """
    queries = shell.queries()
    now_ns = time.time_ns()
    start_ns = wanted.since_ns if wanted.since_ns is not None else whole_ns
    if start_ns is None:
        return None
    newest_ns = queries.newest_event_ns() or now_ns
    last_ns = newest_ns + 1 if wanted.since_ns is None else now_ns
    end_ns = max(last_ns, start_ns + MIN_SPAN_NS)
    width_ns = -(-(end_ns - start_ns) // NUM_BUCKETS)
    return Figures(
        start_ns,
        width_ns,
        queries.breakdown(wanted),
        queries.tokens_over_time(wanted, start_ns, width_ns),
        queries.pinned_over_time(
            start_ns,
            width_ns,
            NUM_BUCKETS,
            everything=wanted.since_ns is None,
            labels=wanted.labels,
        ),
        queries.pinned_now(wanted.labels),
        queries.published_use(wanted.since_ns, wanted.labels),
        range_before(wanted, now_ns),
    )


def range_before(wanted: RequestFilter, now_ns: int) -> Breakdown | None:
    """The sums over the range of the same length before the chosen one."""
    if wanted.since_ns is None:
        return None
    length_ns = now_ns - wanted.since_ns
    earlier = replace(
        wanted, since_ns=wanted.since_ns - length_ns, until_ns=wanted.since_ns
    )
    return shell.queries().breakdown(earlier)


def rate_change(figures: Figures) -> str | None:
    """How the hit rate changed against the range before; None where not known."""
    now, before = figures.breakdown, figures.before
    if before is None or not before.total("prompt") or not now.total("prompt"):
        return None
    rates = [cells.total("cached") / cells.total("prompt") for cells in (before, now)]
    return f"{(rates[1] - rates[0]) * 100:+.1f} points"


class Chosen(NamedTuple):
    """What the controls say; ``range_name`` stays the same while time goes on."""

    labels: tuple[str, ...]
    range_name: str


def controls() -> Chosen:
    """The time range and the engines."""
    labels = sorted({e["label"] for e in shell.queries().engines()})
    with st.container(horizontal=True, vertical_alignment="bottom", key="filters"):
        range_name = shell.range_picker()
        chosen = st.multiselect(
            "Engine",
            labels,
            format_func=lambda name: name or "unlabelled",
            key="label",
            bind="query-params",
            placeholder="any",
            help="The label that the engine was started with.",
        )
    return Chosen(tuple(chosen), range_name)


def body(chosen: Chosen) -> None:
    """The figures of the chosen range and engines."""
    wanted = RequestFilter(
        labels=chosen.labels, since_ns=shell.range_start(chosen.range_name)
    )
    question = ("overview", chosen)
    figures = shell.recent(
        question, lambda: gather(wanted, shell.queries().oldest_event_ns())
    )
    if figures is None or not figures.breakdown.cells:
        nothing(figures is None)
        return
    headline(figures)
    over_time(figures)
    left, right = st.columns(2, gap="medium")
    with left:
        what_they_left(figures.breakdown)
    with right:
        what_they_reused(figures.breakdown)
    left, right = st.columns(2, gap="medium")
    with left:
        pinned(figures)
    with right:
        worth_a_look(figures)


def nothing(store_is_empty: bool) -> None:
    """Why there is nothing to show."""
    if store_is_empty:
        shell.empty_state(
            "No request has been seen yet",
            "The store is there, and no engine has reported a request. Serve a model "
            "and send one; Stream health shows whether the consumer hears the engine.",
            "vllm-fork serve MODEL",
        )
    else:
        shell.empty_state(
            "No request in this time range",
            "The store holds older ones, or ones of other engines: choose a longer "
            "range, or take the engine filter away.",
        )


def headline(figures: Figures) -> None:
    """The six numbers that matter most."""
    cells, use = figures.breakdown, figures.use
    prompt, cached = cells.total("prompt"), cells.total("cached")
    ended = sum(number for _, number in cells.outcomes())
    retained = dict(cells.outcomes()).get(RETAINED, 0)
    shell.metrics(
        [
            shell.Figure(
                "Hit rate",
                formatting.percent(cached, prompt),
                "Prompt tokens served from the prefix cache at the first admission, "
                "of all prompt tokens of admitted requests; the change is against the "
                "range of the same length before.",
                delta=rate_change(figures),
                why_none=None if prompt else "none admitted",
            ),
            shell.Figure(
                "Tokens reused",
                formatting.compact(cached),
                f"{cached:,} prompt tokens that did not have to be computed, of "
                f"{prompt:,}.",
            ),
            shell.Figure(
                "Requests",
                formatting.compact(cells.total("num_requests")),
                f"{cells.total('num_requests'):,} requests with an event in the range; "
                f"{cells.by_status('open'):,} of them run now.",
            ),
            shell.Figure(
                "Left a checkpoint",
                formatting.percent(retained, ended),
                f"{retained:,} of {ended:,} ended requests published a state for the "
                "next turn.",
                why_none=None if ended else "none ended",
            ),
            shell.Figure(
                "Checkpoints used",
                formatting.percent(use["hit"], use["published"]),
                f"{use['hit']:,} of {use['published']:,} published checkpoints were "
                "resumed from at least once; those of engines that are no more count.",
                why_none=None if use["published"] else "none published",
            ),
            shell.Figure(
                "Pinned now",
                f"{figures.pinned_now['blocks']:,}",
                f"KV-cache blocks held by {figures.pinned_now['checkpoints']:,} "
                "checkpoints of running requests at this moment.",
            ),
        ]
    )


def over_time(figures: Figures) -> None:
    """Hit rate and prompt tokens by time."""
    st.subheader(
        "Reuse over time",
        anchor=False,
        help="By the time of each request's last event. Above: reused prompt tokens "
        "of all prompt tokens. Below: the tokens themselves.",
    )
    times = bucket_times(figures)
    prompt, cached = [0] * NUM_BUCKETS, [0] * NUM_BUCKETS
    for row in figures.buckets:
        if 0 <= row["bucket"] < NUM_BUCKETS:
            prompt[row["bucket"]] = int(row["prompt"] or 0)
            cached[row["bucket"]] = int(row["cached"] or 0)
    st.plotly_chart(
        overview.tokens_over_time(times, prompt, cached),
        config=layout.CONFIG,
        key="reuse_over_time",
        alt="Hit rate and prompt tokens, reused and prefilled, by time.",
    )


def bucket_times(figures: Figures) -> list[datetime]:
    """The start of each bucket, in the browser's zone."""
    zone = shell.browser_zone()
    return [
        datetime.fromtimestamp(
            (figures.start_ns + index * figures.width_ns) / 1e9, zone
        ).replace(tzinfo=None)
        for index in range(NUM_BUCKETS)
    ]


def what_they_left(cells: Breakdown) -> None:
    """Retained against each reason why not."""
    st.subheader(
        "What requests left",
        anchor=False,
        help="Ended requests: those that published a checkpoint, and the reasons of "
        "those that did not.",
    )
    counted = cells.outcomes()
    if not counted:
        shell.empty_state("No request has ended in this range")
        return
    st.plotly_chart(
        overview.outcomes(counted),
        config=layout.CONFIG,
        key="outcomes",
        alt="; ".join(f"{outcome}: {number}" for outcome, number in counted[:12]),
    )


def what_they_reused(cells: Breakdown) -> None:
    """The distribution of the reuse depth."""
    st.subheader(
        "Reuse depth",
        anchor=False,
        help="Admitted requests by how many of their prompt tokens were reused.",
    )
    st.plotly_chart(
        overview.reuse_depths(cells.depths(), DEPTH_EDGES),
        config=layout.CONFIG,
        key="reuse_depths",
        alt=f"Requests by reuse depth, bins from {DEPTH_EDGES}: {cells.depths()}.",
    )


def pinned(figures: Figures) -> None:
    """Blocks that pins held over time."""
    st.subheader(
        "Pinned blocks",
        anchor=False,
        help="KV-cache blocks that checkpoints of running requests held: from pinned "
        "until published or discarded. A published block is an ordinary cache entry.",
    )
    st.plotly_chart(
        overview.pinned_blocks(bucket_times(figures), figures.pinned),
        config=layout.CONFIG,
        key="pinned_blocks",
        alt=f"Blocks held by pins over time, at most {max(figures.pinned)}.",
    )


def worth_a_look(figures: Figures) -> None:
    """What an operator can do something about, with the way to the requests."""
    st.subheader(
        "Worth a look",
        anchor=False,
        help="The most frequent reasons for which something can be done.",
    )
    findings = [
        (
            number,
            reasons.no_checkpoint(outcome),
            {"outcome": shell.outcome_words(outcome)},
        )
        for outcome, number in figures.breakdown.outcomes()
        if outcome not in (None, RETAINED) and reasons.no_checkpoint(outcome).advice
    ][:4]
    use = figures.use
    with st.container(border=True):
        if use["evicted_unused"]:
            st.markdown(
                f"**{use['evicted_unused']:,}** checkpoints were evicted before anyone "
                "used them.",
                help="Of published checkpoints with an event in the range.",
            )
            st.caption(reasons.eviction("lru").advice)
        for number, reason, query in findings:
            with st.container(
                horizontal=True,
                horizontal_alignment="distribute",
                vertical_alignment="center",
            ):
                st.markdown(f"**{number:,}** {reason.short}", help=reason.sentence)
                st.page_link(
                    shell.pages()["requests"],
                    label="show",
                    icon=":material/arrow_forward:",
                    icon_position="right",
                    query_params=query,
                )
            st.caption(reason.advice)
        if not findings and not use["evicted_unused"]:
            st.markdown("Nothing: no reason in this range has a remedy.")


shell.show_with_controls(
    "Overview", "How much of each prompt was reused, and what was kept.", controls, body
)
