"""Conversations: which there are, and one of them turn by turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import streamlit as st

from ui import formatting, request_rows, shell
from ui.charts import layout
from ui.charts.waterfall import MAX_TURNS, alternative, waterfall
from ui.components import record_table as table
from ui.components.record_table import TableColumn, TableRow, record_table
from ui.queries import RequestFilter

TURN_LIMIT: Final = 200
LIST_LIMIT: Final = 50

LIST_COLUMNS: Final = (
    TableColumn(
        "Conversation",
        "The session id that came with its requests; without one, the chain of "
        "requests that reused each other.",
        "lead",
    ),
    TableColumn("Last event", "How long ago anything happened in it."),
    TableColumn("Engine", "The label of the engine that served it."),
    TableColumn("Turns", "Requests of the conversation.", "right"),
    TableColumn(
        "Prompt: reused | prefilled",
        "Prompt tokens of all turns: taken from the prefix cache, and computed.",
    ),
    TableColumn("Output", "Output tokens of all turns.", "right"),
    TableColumn("Left a state", "Turns that published a checkpoint.", "right"),
)


class Chosen(NamedTuple):
    """What the controls of the list say."""

    text: str
    labels: tuple[str, ...]
    range_name: str


def controls() -> Chosen | None:
    """The filter of the list; None where the address names one conversation."""
    if st.query_params.get("conversation"):
        return None
    labels = sorted({e["label"] for e in shell.queries().engines()})
    with st.container(horizontal=True, vertical_alignment="bottom", key="filters"):
        text = st.text_input(
            "Search",
            placeholder="part of a session or conversation id",
            key="q",
            bind="query-params",
            icon=":material/search:",
            help="Part of a session id, conversation id or request id.",
        )
        chosen = st.multiselect(
            "Engine",
            labels,
            format_func=lambda name: name or "unlabelled",
            key="label",
            bind="query-params",
            placeholder="any",
            help="The label that the engine was started with.",
        )
        range_name = shell.range_picker()
    return Chosen(text, tuple(chosen), range_name)


def body(chosen: Chosen | None) -> None:
    """The conversation that the address names, or the list."""
    wanted = st.query_params.get("conversation", "")
    if wanted:
        one(wanted, st.query_params.get("of"))
    elif chosen is not None:
        every(chosen)


def every(chosen: Chosen) -> None:
    """The conversations with the newest matching requests."""
    wanted = RequestFilter(
        text=chosen.text,
        labels=chosen.labels,
        since_ns=shell.range_start(chosen.range_name),
    )
    rows = shell.queries().conversations(wanted, LIST_LIMIT)
    if not rows:
        if shell.queries().newest_event_ns() is None:
            shell.empty_state(
                "No conversation has been seen yet",
                "Send requests to an engine that is served with events on. Give them a "
                "session_id, or let each turn replay the one before.",
                "vllm-fork serve MODEL",
            )
        else:
            shell.empty_state(
                "No conversation matches",
                "Take a filter away, or choose a longer range.",
            )
        return
    if len(rows) == LIST_LIMIT:
        st.caption(f"The {LIST_LIMIT} with the newest events; search for others.")
    record_table(
        LIST_COLUMNS,
        [conversation_row(row) for row in rows],
        key="conversations_table",
        caption="Conversations with the newest requests",
    )


def conversation_row(row: dict[str, Any]) -> TableRow:
    """A conversation's row in the list."""
    shown = row["session_id"] or first_request(row["conversation_id"])
    link = shell.page_link(
        "conversations", shown, conversation=row["conversation_id"], of=row["label"]
    )
    prompt, cached = int(row["prompt"]), int(row["cached"])
    return TableRow(
        key=f"{row['label']}/{row['conversation_id']}",
        name=shown,
        stamp=row["last_ns"] // 1_000_000,
        cells=(
            table.identifier(
                link,
                row["conversation_id"],
                None if row["session_id"] else "without a session id",
            ),
            table.when(row["last_ns"]),
            table.text(row["label"] or "unlabelled", quiet=not row["label"]),
            table.number(row["num_turns"]),
            table.share(
                (("reused", cached), ("prefilled", prompt - cached)),
                f"{formatting.compact(cached)} of {formatting.compact(prompt)} · "
                f"{formatting.percent(cached, prompt)}",
                f"reused {cached:,} of {prompt:,} prompt tokens",
            ),
            table.number(int(row["output"])),
            table.text(f"{row['num_retained']} of {row['num_turns']}"),
        ),
    )


def first_request(conversation_id: str) -> str:
    """What to call a conversation without a session id: its first request."""
    return conversation_id.partition("/")[2] or conversation_id


def one(conversation_id: str, label: str | None) -> None:
    """One conversation: its figures, the waterfall, its turns."""
    st.page_link(
        shell.pages()["conversations"],
        label="All conversations",
        icon=":material/arrow_back:",
        query_params={},
    )
    turns = shell.queries().turns(conversation_id, label, TURN_LIMIT)
    if not turns:
        shell.empty_state(
            "No such conversation in this store",
            "It may have been removed by age, or its events may have been lost. "
            "Looked for:",
        )
        st.code(formatting.visible(conversation_id), language=None, wrap_lines=True)
        return
    turns = choose_label(turns)
    shown = turns[0]["session_id"] or first_request(conversation_id)
    st.code(formatting.visible(shown), language=None, width="content")
    if not turns[0]["session_id"]:
        st.caption("No session id came with it: these requests reused each other.")
    figures(turns)
    st.subheader(
        "Turns",
        anchor=False,
        help="Each turn's tokens; a diamond where it left a state, a dotted line to "
        "the turn that resumed from it.",
    )
    drawn = turns[-MAX_TURNS:]
    if len(drawn) < len(turns):
        st.caption(f"The last {len(drawn)} of {len(turns)} turns are drawn.")
    if len(turns) == TURN_LIMIT:
        st.caption(f"Only the first {TURN_LIMIT} turns are shown.")
    st.plotly_chart(
        waterfall(drawn, len(turns) - len(drawn)),
        config=layout.CONFIG,
        key="waterfall",
        alt=alternative(drawn),
    )
    record_table(
        (TableColumn("Turn", "Order of arrival, from 0."), *request_rows.COLUMNS),
        [turn_row(index, turn) for index, turn in enumerate(turns)],
        key="turns_table",
        caption="Turns of the conversation in the order of arrival",
    )


def choose_label(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where engines of several labels served one id, let one be chosen."""
    labels = sorted({turn["label"] for turn in turns})
    if len(labels) == 1:
        return turns
    chosen = st.segmented_control(
        "Engine",
        labels,
        default=labels[0],
        required=True,
        format_func=lambda name: name or "unlabelled",
        key="conversation_label",
        help="Engines of several labels served requests of this conversation.",
    )
    return [turn for turn in turns if turn["label"] == (chosen or labels[0])]


def turn_row(index: int, turn: dict[str, Any]) -> TableRow:
    """A request's row with its turn in front."""
    row = request_rows.request_row(turn)
    return row._replace(cells=(table.text(str(index), quiet=True), *row.cells))


def computed_again(turns: Sequence[dict[str, Any]]) -> int:
    """Prompt tokens that an earlier turn had already computed, computed once more.

    What a turn's prompt shares with the turn before is taken to be all of that
    one's tokens, as when the whole message is replayed; it is an upper bound.
    """
    again = 0
    for before, turn in itertools.pairwise(turns):
        prompt, cached = turn["num_prompt_tokens"], turn["num_cached_tokens"]
        if prompt is None or cached is None:
            continue
        known = (before["num_prompt_tokens"] or 0) + (before["num_output_tokens"] or 0)
        again += max(0, min(known, prompt) - cached)
    return again


def figures(turns: Sequence[dict[str, Any]]) -> None:
    """The conversation in numbers."""
    admitted = [turn for turn in turns if turn["num_cached_tokens"] is not None]
    prompt = sum(turn["num_prompt_tokens"] or 0 for turn in admitted)
    cached = sum(turn["num_cached_tokens"] for turn in admitted)
    output = sum(turn["num_output_tokens"] or 0 for turn in turns)
    left = sum(turn["retained_boundary"] is not None for turn in turns)
    shell.metrics(
        [
            shell.Figure("Turns", f"{len(turns):,}", "Requests of the conversation."),
            shell.Figure(
                "Hit rate",
                formatting.percent(cached, prompt),
                f"{cached:,} of {prompt:,} prompt tokens of all turns were reused.",
            ),
            shell.Figure(
                "Computed again",
                formatting.count(computed_again(turns)),
                "Prompt tokens that the turn before had already computed and that were "
                "not reused; at most, where a prompt does not replay all of it.",
            ),
            shell.Figure(
                "Output", formatting.count(output), "Output tokens of all turns."
            ),
            shell.Figure(
                "Left a state",
                f"{left} of {len(turns)}",
                "Turns that published a checkpoint for the next.",
            ),
        ]
    )


shell.show_with_controls(
    "Conversations", "Turn by turn: what each carried over.", controls, body
)
