"""Stream health: what is heard of each engine, and what is missing."""

from __future__ import annotations

import time
from typing import Any, Final

import streamlit as st

from ui import formatting, reasons, shell, stream_state
from ui.components import record_table as table
from ui.components.record_table import Detail, TableColumn, TableRow, record_table

STREAM_COLUMNS: Final = (
    TableColumn(
        "Stream", "Label of the engine, and the endpoint it is read from.", "lead"
    ),
    TableColumn("State", "Whether everything that the engine sent has arrived."),
    TableColumn("Last batch", "When the consumer received the last batch."),
    TableColumn("Lag", "From made to received, of the last batch.", "right"),
    TableColumn(
        "Events", "Events applied, since the consumer knows the stream.", "right"
    ),
    TableColumn("Replayed", "Batches that were fetched again after a gap.", "right"),
    TableColumn("Lost", "Batches that nobody holds any more.", "right"),
    TableColumn("Dropped", "Events that the engine itself had to drop.", "right"),
)
GAP_COLUMNS: Final = (
    TableColumn("Batches", "First and one past the last missing sequence.", "lead"),
    TableColumn("Stream", "The endpoint."),
    TableColumn("Status", "Open: asked for again. Lost: nobody holds them any more."),
    TableColumn("Missing", "Batches in the range.", "right"),
    TableColumn("Detected", "When the gap was seen."),
    TableColumn("Closed after", "Until it was recovered or given up.", "right"),
)
ENGINE_COLUMNS: Final = (
    TableColumn("Engine", "Label and id of one start of an engine.", "lead"),
    TableColumn("Status", "Running, stopped in order, or lost."),
    TableColumn("Retention", "Whether decode checkpoints are kept, or why not."),
    TableColumn("Exact tail", "Whether the last executed token is kept."),
    TableColumn("Copy interval", "Tokens between rolling copies; 0: none.", "right"),
    TableColumn("Block", "Tokens a KV-cache block.", "right"),
    TableColumn("Blocks", "KV-cache blocks of the pool.", "right"),
    TableColumn("Started", "When it started."),
)
_GAP_MARKS: Final = {
    "open": ("bad", "cross"),
    "lost": ("warning", "triangle"),
    "recovered": ("good", "circle"),
}
_ENGINE_MARKS: Final = {
    "running": ("good", "circle"),
    "stopped": ("quiet", "pause"),
    "lost": ("bad", "plus"),
}


def body() -> None:
    """Figures, streams, gaps, and engines."""
    streams = shell.queries().streams()
    if not streams:
        shell.empty_state(
            "The consumer reads no stream",
            "It has made this store, but was given no endpoint, or has not heard of "
            "one. Name the engine's endpoints:",
            "event-consumer run --endpoint tcp://127.0.0.1:5567 "
            "--replay tcp://127.0.0.1:5568",
        )
        return
    now_ns = time.time_ns()
    headline(streams, now_ns)
    st.subheader("Streams", anchor=False, help="One a publisher: an engine's rank.")
    record_table(
        STREAM_COLUMNS,
        [stream_row(stream, now_ns) for stream in streams],
        key="streams_table",
        caption="Event streams",
    )
    gap_table()
    engine_table()


def headline(streams: list[dict[str, Any]], now_ns: int) -> None:
    """How many streams are well, and what is missing in all."""
    states = [stream_state.judge(stream, now_ns).code for stream in streams]
    well = sum(code in ("live", "lossy") for code in states)
    lags = [s["lag_ns"] for s in streams if s["lag_ns"] is not None]
    shell.metrics(
        [
            shell.Figure(
                "Live",
                f"{well} of {len(streams)}",
                "Streams that are connected and complete at this moment.",
            ),
            shell.Figure(
                "Largest lag",
                formatting.duration(max(lags, default=None)),
                "From made to received, of the last batch of the slowest stream.",
            ),
            shell.Figure(
                "Events",
                formatting.compact(sum(s["num_events"] for s in streams)),
                "Events applied to the store, of all streams.",
            ),
            shell.Figure(
                "Replayed",
                formatting.count(sum(s["num_replayed"] for s in streams)),
                "Batches that were fetched again after a gap: nothing of them is lost.",
            ),
            shell.Figure(
                "Lost",
                formatting.count(sum(s["num_lost"] for s in streams)),
                "Batches that nobody holds any more: counts are too low by them.",
            ),
            shell.Figure(
                "Dropped",
                formatting.count(sum(s["num_dropped"] for s in streams)),
                "Events that an engine dropped because its queue was full: the engine "
                "never waits for its readers.",
            ),
        ]
    )


def stream_row(stream: dict[str, Any], now_ns: int) -> TableRow:
    """A stream's row, with every counter when opened."""
    state = stream_state.judge(stream, now_ns)
    name = stream["label"] or "unlabelled"
    return TableRow(
        key=stream["endpoint"],
        name=name,
        stamp=stream["num_lost"],
        cells=(
            table.two_lines(name, stream["endpoint"]),
            table.tag(state.word, state.shape, state.tone, help=state.sentence),
            table.when(stream["last_batch_ns"]),
            table.text(formatting.duration(stream["lag_ns"])),
            table.number(stream["num_events"]),
            table.number(stream["num_replayed"]),
            table.number(stream["num_lost"]),
            table.number(stream["num_dropped"]),
        ),
        detail=Detail(
            [
                ("State", state.sentence, False),
                ("Replay endpoint", stream["replay_endpoint"] or "none", False),
                ("Engine id", stream["engine_id"] or "—", bool(stream["engine_id"])),
                ("Rank", formatting.count(stream["data_parallel_rank"]), False),
                ("Applied sequence", formatting.count(stream["applied_seq"]), False),
                ("Batches", formatting.count(stream["num_batches"]), False),
                ("Duplicates", _duplicates(stream), False),
                ("Unknown events", _unknown(stream), False),
                ("Undecodable", _undecodable(stream), False),
                ("Restarts", _restarts(stream), False),
            ]
        ),
    )


def _duplicates(stream: dict[str, Any]) -> str:
    return f"{stream['num_duplicates']:,} batches came twice and were applied once"


def _unknown(stream: dict[str, Any]) -> str:
    return f"{stream['num_unknown']:,} events of types newer than this consumer"


def _undecodable(stream: dict[str, Any]) -> str:
    return f"{stream['num_undecodable']:,} events or frames could not be read"


def _restarts(stream: dict[str, Any]) -> str:
    return f"{stream['num_restarts']:,} times an engine started anew at this endpoint"


def gap_table() -> None:
    """Ranges of batches that did not come by themselves."""
    st.subheader(
        "Gaps",
        anchor=False,
        help="Ranges of batches that did not arrive, and what became of them.",
    )
    gaps = shell.queries().gaps()
    if not gaps:
        shell.empty_state("No gap was ever seen", "Every batch arrived in order.")
        return
    rows = []
    for gap in gaps:
        tone, mark = _GAP_MARKS.get(gap["status"], ("quiet", "circle-open"))
        closed = gap["closed_ns"]
        rows.append(
            TableRow(
                key=str(gap["id"]),
                cells=(
                    table.text(f"[{gap['first_seq']:,}, {gap['end_seq']:,})"),
                    table.text(gap["endpoint"], quiet=True),
                    table.tag(gap["status"], mark, tone),
                    table.number(gap["end_seq"] - gap["first_seq"]),
                    table.when(gap["detected_ns"]),
                    table.text(
                        formatting.duration(closed - gap["detected_ns"])
                        if closed
                        else "still open"
                    ),
                ),
            )
        )
    record_table(GAP_COLUMNS, rows, key="gaps_table", caption="Gaps, the newest first")


def engine_table() -> None:
    """Each start of an engine, with what it was told to keep."""
    st.subheader("Engines", anchor=False, help="Each start of an engine, newest first.")
    rows = []
    for engine in shell.queries().engines(100):
        tone, mark = _ENGINE_MARKS.get(engine["status"], ("quiet", "circle-open"))
        on = engine["retention"] == "on"
        rows.append(
            TableRow(
                key=engine["engine_id"],
                name=engine["label"],
                cells=(
                    table.two_lines(
                        engine["label"] or "unlabelled", engine["model_name"]
                    ),
                    table.tag(engine["status"], mark, tone),
                    table.tag(
                        engine["retention"] or "—",
                        "diamond" if on else "bar",
                        "good" if on else "quiet",
                        help=engine["retention_reason"] or "",
                    ),
                    exact_tail_cell(engine["exact_tail"]),
                    table.number(engine["copy_interval"]),
                    table.number(engine["block_size"]),
                    table.number(engine["num_blocks"]),
                    table.when(engine["started_ns"]),
                ),
                detail=Detail(_engine_items(engine)),
            )
        )
    record_table(ENGINE_COLUMNS, rows, key="engines_table", caption="Engines")


def exact_tail_cell(value: str | None) -> table.Cell:
    """``on``, ``off``, or why it cannot be on."""
    if not value or value in ("on", "off"):
        return table.text(value or "—")
    reason = reasons.no_checkpoint(value)
    return table.text(reason.short, help=reason.in_full)


def _engine_items(engine: dict[str, Any]) -> list[tuple[str, str, bool]]:
    mode = {True: "async", False: "sync"}.get(engine["async_scheduling"], "—")
    items = [
        ("Engine id", engine["engine_id"], True),
        ("Why", engine["retention_reason"] or "—", False),
        ("Publishes on", engine["publish_on"] or "—", False),
        ("Hash unit", f"{formatting.count(engine['hash_unit'])} tokens", False),
        ("Mamba groups", formatting.count(engine["num_mamba_groups"]), False),
        ("Scheduling", mode, False),
        ("vLLM", engine["vllm_version"] or "—", False),
        ("vllm-fork", engine["fork_version"] or "—", False),
        ("Events dropped", formatting.count(engine["events_dropped"]), False),
    ]
    return items


shell.show("Stream health", "What is heard of each engine, and what is missing.", body)
