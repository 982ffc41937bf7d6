"""Compare: two arms side by side, and the reference's table of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple

import streamlit as st

from ui import comparison, formatting, shell
from ui.charts import layout
from ui.charts.comparison import computed_by_turn
from ui.components import record_table as table
from ui.components.record_table import TableColumn, TableRow, record_table
from ui.queries import RequestFilter

MAX_DRAWN: Final = 40
MAX_TURNS: Final = 200
AUTOMATIC: Final = "automatic"
BY_CONVERSATION: Final = "of each conversation"
BY_ARRIVAL: Final = "in order of arrival"


class Arm(NamedTuple):
    """One side: what it is called, and which requests it is."""

    name: str
    wanted: RequestFilter


class Chosen(NamedTuple):
    """What the controls say."""

    a: Arm
    b: Arm
    turns_are: str


def controls() -> Chosen | None:
    """The choice of two arms, and of what a turn is; None where there is no engine."""
    engines = shell.queries().engines()
    options = arm_options(engines)
    if not options:
        return None
    first, second = default_arms(engines, list(options))
    left, right = st.columns(2, gap="medium")
    with left:
        a = arm_picker("A", "a", options, first)
    with right:
        b = arm_picker("B", "b", options, second)
    return Chosen(a, b, turn_order())


def body(chosen: Chosen | None) -> None:
    """What the two arms show."""
    if chosen is None:
        shell.empty_state(
            "No engine has reported yet, so there is nothing to compare",
            "Play one dialog against an engine with retention off and one with it on; "
            "the demo does both.",
            "make demo",
        )
        return
    by_arrival = chosen.turns_are == BY_ARRIVAL
    if chosen.turns_are == AUTOMATIC:
        by_arrival = any(needs_arrival(arm.wanted) for arm in (chosen.a, chosen.b))
    compare(chosen.a, chosen.b, one_conversation=by_arrival)


def needs_arrival(wanted: RequestFilter) -> bool:
    """Whether an arm's requests can only be turns in the order of their arrival.

    As those of a dialog without a session id on an engine with retention off: none
    reused another's answer, so each is a conversation of its own.
    """

    def ask() -> bool:
        queries = shell.queries()
        requests = queries.count_requests(wanted)
        if not 1 < requests <= MAX_TURNS:
            return False
        return queries.count_conversations(wanted) == requests

    answer: bool = shell.recent(("needs_arrival", wanted), ask)
    return answer


def arm_options(engines: list[dict[str, Any]]) -> dict[str, str]:
    """What can be an arm: ``label:…`` and ``engine:…``, with its words."""
    labels = list(dict.fromkeys(engine["label"] for engine in engines))
    options = {f"label:{name}": name or "unlabelled" for name in labels}
    for engine in engines:
        started = shell.local_time(engine["started_ns"], "%m-%d %H:%M")
        options[f"engine:{engine['engine_id']}"] = (
            f"{engine['label'] or 'unlabelled'} · {engine['engine_id'][:8]} · {started}"
        )
    return options


def default_arms(engines: list[dict[str, Any]], options: list[str]) -> tuple[str, str]:
    """Retention off against on, where there is one of each; else the first two."""
    off = [e for e in engines if e["retention"] == "off"]
    on = [e for e in engines if e["retention"] == "on"]
    if off and on:
        arm = off[0]
        family = arm["label"].split("-")[0]
        partners = [e for e in on if e["label"].split("-")[0] == family] or on
        return f"label:{arm['label']}", f"label:{partners[0]['label']}"
    return options[0], options[min(1, len(options) - 1)]


def arm_picker(title: str, key: str, options: dict[str, str], default: str) -> Arm:
    """The controls of one arm: engine or label, and a time range."""
    names = list(options)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox(
            f"Arm {title}",
            names,
            index=names.index(default),
            format_func=options.__getitem__,
            key=key,
            bind="query-params",
            help="A label takes every engine of that name; an engine is one start.",
        )
        with st.popover("Time", icon=":material/schedule:"):
            start = st.datetime_input(
                "From",
                value=None,
                key=f"{key}_from",
                help="Requests whose last event is not before this.",
            )
            end = st.datetime_input(
                "Until",
                value=None,
                key=f"{key}_until",
                help="Requests whose last event is before this.",
            )
    kind, _, value = chosen.partition(":")
    wanted = RequestFilter(
        labels=[value] if kind == "label" else [],
        engine_ids=[value] if kind == "engine" else [],
        since_ns=_ns(start),
        until_ns=_ns(end),
    )
    name = options[chosen]
    if start or end:
        name += f" · {start or '…'} to {end or '…'}"
    return Arm(name, wanted)


def _ns(at: datetime | None) -> int | None:
    if at is None:
        return None
    return int(at.replace(tzinfo=shell.browser_zone()).timestamp() * 1e9)


def turn_order() -> str:
    """What a turn is."""
    chosen = st.segmented_control(
        "Turns are those",
        [AUTOMATIC, BY_CONVERSATION, BY_ARRIVAL],
        default=AUTOMATIC,
        required=True,
        key="turns",
        bind="query-params",
        help="Of each conversation: the n-th requests of all conversations of an arm "
        "are summed. In order of arrival: all requests of an arm are one dialog. "
        "Automatic: of each conversation, unless an arm's requests have neither a "
        "session id nor reuse that would tie them together.",
    )
    return chosen or AUTOMATIC


def compare(a: Arm, b: Arm, *, one_conversation: bool) -> None:
    """The headline, the figure, the table, and the table as text."""
    rows = [turns_of(arm, one_conversation) for arm in (a, b)]
    for arm, found in zip((a, b), rows, strict=True):
        if not found:
            shell.empty_state(
                "An arm has no requests",
                "Choose another engine, label or time range for this one:",
            )
            st.text(formatting.visible(arm.name))
            return
    total_a, total_b = comparison.total(rows[0]), comparison.total(rows[1])
    headline(total_a, total_b)
    pairs = comparison.pair_turns(*rows)
    st.subheader(
        "Prompt tokens computed, by turn",
        anchor=False,
        help="Lower is better. The figure on a bar is the share that was reused.",
    )
    if len(pairs) > MAX_DRAWN:
        st.caption(f"The first {MAX_DRAWN} of {len(pairs)} turns are drawn.")
    st.plotly_chart(
        computed_by_turn(pairs[:MAX_DRAWN], a.name, b.name),
        config=layout.CONFIG,
        key="computed_by_turn",
        alt="Prompt tokens computed by turn; the table below holds the numbers.",
    )
    st.subheader(
        "Table",
        anchor=False,
        help="As in vLLM pull request 50551: cached / prompt / completion tokens.",
    )
    several = max(total_a["num_requests"], total_b["num_requests"]) > len(pairs)
    if one_conversation:
        st.caption("Turns are the requests of an arm in the order of their arrival.")
    if several:
        st.caption(
            f"Sums over {total_a['num_requests']:,} (A) and "
            f"{total_b['num_requests']:,} (B) requests."
        )
    ab_table(pairs, a, b, total_a, total_b)
    text = comparison.as_text(
        formatting.visible(a.name), formatting.visible(b.name), *rows
    )
    with st.expander("As text", icon=":material/content_copy:", expanded=True):
        st.code(text, language=None)
        st.download_button(
            "Download",
            text,
            "comparison.tsv",
            "text/tab-separated-values",
            icon=":material/download:",
            on_click="ignore",
        )


def turns_of(arm: Arm, one_conversation: bool) -> list[dict[str, Any]]:
    """The tokens of an arm by turn."""

    def ask() -> list[dict[str, Any]]:
        return shell.queries().by_turn(
            arm.wanted, one_conversation=one_conversation, limit=MAX_TURNS
        )

    found: list[dict[str, Any]] = shell.recent(
        ("by_turn", arm.wanted, one_conversation), ask
    )
    return found


def headline(a: dict[str, int], b: dict[str, int]) -> None:
    """Hit rates of both arms, and what lies between."""
    rate_a = a["cached"] / a["prompt"] if a["prompt"] else 0.0
    rate_b = b["cached"] / b["prompt"] if b["prompt"] else 0.0
    computed_a, computed_b = a["prompt"] - a["cached"], b["prompt"] - b["cached"]
    change = f"{(computed_b - computed_a) / computed_a:+.0%}" if computed_a else None
    shell.metrics(
        [
            shell.Figure(
                "Hit rate A",
                f"{rate_a:.1%}",
                f"{a['cached']:,} of {a['prompt']:,} prompt tokens reused.",
            ),
            shell.Figure(
                "Hit rate B",
                f"{rate_b:.1%}",
                f"{b['cached']:,} of {b['prompt']:,} prompt tokens reused; the "
                "difference to A in percentage points.",
                delta=f"{(rate_b - rate_a) * 100:+.1f} points",
            ),
            shell.Figure(
                "Computed A",
                f"{computed_a:,}",
                "Prompt tokens that arm A had to compute.",
            ),
            shell.Figure(
                "Computed B",
                f"{computed_b:,}",
                "Prompt tokens that arm B had to compute; the change against A. Each "
                "arm generates its own answers, so their prompts differ in length.",
                delta=change,
                less_is_better=True,
            ),
        ]
    )


def ab_table(
    pairs: list[comparison.TurnPair],
    a: Arm,
    b: Arm,
    total_a: dict[str, int],
    total_b: dict[str, int],
) -> None:
    """The reference's table, with each turn's hit rate beside."""
    what = "Cached / prompt / completion tokens."
    columns = (
        TableColumn("Turn", "From 0.", "lead"),
        TableColumn(f"A: {formatting.visible(a.name)}", what, "right"),
        TableColumn("A reused", "Cached of prompt tokens.", "right"),
        TableColumn(f"B: {formatting.visible(b.name)}", what, "right"),
        TableColumn("B reused", "Cached of prompt tokens.", "right"),
    )
    rows = [
        TableRow(str(pair.turn), ab_cells(str(pair.turn), pair.a, pair.b))
        for pair in pairs
    ]
    rows.append(TableRow("total", ab_cells("Total", total_a, total_b), strong=True))
    record_table(columns, rows, key="ab_table", caption="A and B by turn")


def ab_cells(
    name: str, a: dict[str, Any] | None, b: dict[str, Any] | None
) -> list[table.Cell]:
    """The cells of one row."""
    return [
        table.text(name),
        table.number_text(comparison.triple(a)),
        table.number_text(comparison.hit_rate(a)),
        table.number_text(comparison.triple(b)),
        table.number_text(comparison.hit_rate(b)),
    ]


shell.show_with_controls(
    "Compare", "Two engines, labels or time ranges, turn by turn.", controls, body
)
