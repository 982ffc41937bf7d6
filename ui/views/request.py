"""Request: one request from its first token to what it left, with each reason."""

from __future__ import annotations

import json
import time
from typing import Any

import streamlit as st

from ui import formatting, palette, reasons, request_rows, shell
from ui.charts import layout
from ui.charts.stage_timeline import MAX_LANES, stage_timeline, stage_times
from ui.charts.token_axis import alternative, token_axis
from ui.components import record_table as table
from ui.components.record_table import TableColumn, TableRow, record_table
from ui.queries import RequestFilter

CHECKPOINT_LIMIT = 500

CHECKPOINT_COLUMNS = (
    TableColumn("Boundary", "The state is exact after this many tokens.", "lead"),
    TableColumn("Kind", "What made the boundary."),
    TableColumn("Stage", "How far the checkpoint's life has come."),
    TableColumn("Why", "Why it was discarded or evicted."),
    TableColumn("Pinned", "From arrival until its blocks were reserved.", "right"),
    TableColumn("Held", "From pinned until published or discarded.", "right"),
    TableColumn("Blocks", "KV-cache blocks that the pin held.", "right"),
    TableColumn("Hits", "Admissions that resumed from it.", "right"),
)


def controls() -> str:
    """The id that the address names; a box to name one where it names none."""
    wanted = st.query_params.get("request", "").strip()
    if wanted and shell.queries().requests_by_id(wanted):
        return wanted
    with (
        st.form("find", border=False),
        st.container(horizontal=True, vertical_alignment="bottom"),
    ):
        typed = st.text_input(
            "Request id",
            placeholder="chatcmpl-…",
            help="The id that the client saw, or the engine core's.",
        )
        sent = st.form_submit_button("Open", type="primary")
    if sent and typed.strip():
        st.query_params["request"] = typed.strip()
        st.rerun()
    return wanted


def body(wanted: str) -> None:
    """The request that the address names, or the newest ones."""
    if not wanted:
        newest()
        return
    found = shell.queries().requests_by_id(wanted)
    engine_id = st.query_params.get("engine")
    if engine_id:
        found = [row for row in found if row["engine_id"] == engine_id] or found
    if not found:
        not_found(wanted)
        return
    if len(found) > 1:
        several(found)
    show(found[0])


def newest() -> None:
    """The newest requests, to choose from."""
    rows = shell.queries().find_requests(RequestFilter(), limit=10)
    if not rows:
        shell.empty_state(
            "No request has been seen yet",
            "Send one to an engine that is served with events on.",
            "vllm-fork serve MODEL",
        )
        return
    st.subheader("Newest requests", anchor=False)
    record_table(
        request_rows.COLUMNS,
        [request_rows.request_row(row) for row in rows],
        key="newest_table",
        caption="The newest requests",
    )


def not_found(wanted: str) -> None:
    """Say that there is no such request, and why that may be."""
    shell.empty_state(
        "No such request in this store",
        "It may have been removed by age, been served by an engine without events, or "
        "its events may have been lost (Stream health names lost ranges). Looked for:",
    )
    st.code(formatting.visible(wanted), language=None, wrap_lines=True)
    newest()


def several(found: list[dict[str, Any]]) -> None:
    """Say that the id is not unique, and lead to the others."""
    st.info(
        f"{len(found)} requests have this id, from different engine starts: the newest "
        "is shown.",
        icon=":material/content_copy:",
    )
    links = [
        shell.page_link(
            "request",
            f"{row['label'] or 'unlabelled'} · {row['engine_id'][:8]} · "
            f"{shell.local_time(row['last_event_ns'])}",
            request=row["request_id"],
            engine=row["engine_id"],
        )
        for row in found
    ]
    rows = [
        TableRow(
            f"{row['engine_id']}/{row['request_id']}",
            (
                table.identifier(link, row["request_id"]),
                request_rows.reuse_cell(row),
                request_rows.outcome_cell(row),
            ),
        )
        for link, row in zip(links, found, strict=True)
    ]
    columns = [TableColumn("Engine start", "", "lead"), *request_rows.COLUMNS[3:7:3]]
    record_table(columns, rows, key="several_table", caption="Requests of this id")


def show(request: dict[str, Any]) -> None:
    """Everything about one request, from the headline to the raw record."""
    checkpoints = shell.queries().checkpoints_of(request, CHECKPOINT_LIMIT)
    headline(request)
    in_words(request)
    figures(request)
    axis(request, checkpoints)
    neighbours(request, checkpoints)
    stages(request, checkpoints)
    raw(request, checkpoints)


def headline(request: dict[str, Any]) -> None:
    """The ids, what the request was, and the ways on from here."""
    shown = request["external_request_id"] or request["request_id"]
    with st.container(
        horizontal=True,
        horizontal_alignment="distribute",
        vertical_alignment="center",
        key="headline",
    ):
        st.code(formatting.visible(shown), language=None, width="content")
        with st.container(
            horizontal=True, width="content", vertical_alignment="center"
        ):
            if request["conversation_id"]:
                st.page_link(
                    shell.pages()["conversations"],
                    label="Conversation",
                    icon=":material/forum:",
                    query_params={"conversation": request["conversation_id"]},
                )
            jaeger_button(request)
    facts = [
        request["label"] or "unlabelled engine",
        request["model_name"],
        shell.local_time(request["arrival_ns"] or request["last_event_ns"]),
        {"open": "running", "engine_lost": "engine lost"}.get(request["status"], ""),
        f"ended by {request['finish_reason']}" if request["finish_reason"] else "",
        f"preempted {request['num_preemptions']} times"
        if request["num_preemptions"]
        else "",
    ]
    st.caption(" · ".join(formatting.markdown(fact) for fact in facts if fact))


def jaeger_button(request: dict[str, Any]) -> None:
    """Open the request's trace, or say what is missing for it."""
    trace = shell.trace_link(request["trace_id"])
    if trace:
        st.link_button(trace.text, trace.href, icon=":material/open_in_new:")
        return
    why = (
        "No trace id is recorded for this request."
        if shell.configured().jaeger_url
        else "Set VLLM_FORK_JAEGER_URL to open traces from here."
    )
    st.button("Open in Jaeger", disabled=True, help=why, icon=":material/open_in_new:")


def in_words(request: dict[str, Any]) -> None:
    """What it reused and what it left, each in a sentence."""
    left, right = st.columns(2, gap="small")
    with left.container(border=True, height="stretch"):
        st.markdown("**What it reused**")
        st.text(request_rows.reuse_sentence(request))
    with right.container(border=True, height="stretch"):
        st.markdown("**What it left for the next turn**")
        st.text(request_rows.outcome_sentence(request))
    if request["incomplete"]:
        st.warning(reasons.EVENTS_MISSING.in_full, icon=":material/warning:")


def figures(request: dict[str, Any]) -> None:
    """The request in numbers."""
    prompt, cached = request["num_prompt_tokens"], request["num_cached_tokens"]
    known = prompt is not None and cached is not None
    arrived, admitted = request["arrival_ns"], request["admitted_ns"]
    finished = request["finished_ns"]
    shell.metrics(
        [
            shell.Figure(
                "Prompt", formatting.count(prompt), "Prompt tokens of the request."
            ),
            shell.Figure(
                "Reused",
                formatting.count(cached),
                "Prompt tokens served from the prefix cache at the first admission: "
                "the reuse depth, and what the client saw as cached_tokens.",
            ),
            shell.Figure(
                "Prefilled",
                formatting.count(prompt - cached if known else None),
                "Prompt tokens that had to be computed.",
            ),
            shell.Figure(
                "Decoded",
                formatting.count(request["num_output_tokens"]),
                "Output tokens generated.",
            ),
            shell.Figure(
                "Retained",
                formatting.count(request["retained_boundary"]),
                "The deepest boundary (tokens) that the request published.",
            ),
            shell.Figure(
                "Queued",
                formatting.duration(
                    admitted - arrived if admitted and arrived else None
                ),
                "From arrival to the first admission by the scheduler.",
            ),
            shell.Figure(
                "Took",
                formatting.duration(
                    finished - arrived if finished and arrived else None
                ),
                "From arrival to the end of the request.",
            ),
        ]
    )


def axis(request: dict[str, Any], checkpoints: list[dict[str, Any]]) -> None:
    """The token axis."""
    st.subheader(
        "Token axis",
        anchor=False,
        help="Every token of the request: reused from the cache, computed from the "
        "prompt, then decoded. Each mark is a boundary at which a state was held, "
        "with the stage it has reached.",
    )
    if not request["num_prompt_tokens"]:
        shell.empty_state(
            "No tokens yet", "The prompt's length is known at its admission or end."
        )
        return
    st.plotly_chart(
        token_axis(request, checkpoints),
        config=layout.CONFIG,
        key="token_axis",
        alt=alternative(request, checkpoints),
    )


def neighbours(request: dict[str, Any], checkpoints: list[dict[str, Any]]) -> None:
    """The turn it reused, and the turns that reused it."""
    before, after = st.columns(2, gap="small")
    with before:
        st.subheader(
            "Resumed from",
            anchor=False,
            help="The request whose checkpoint this one's prompt hit.",
        )
        resumed_from(request)
    with after:
        st.subheader(
            "Reused by",
            anchor=False,
            help="The requests whose prompt resumed from a checkpoint of this one.",
        )
        reused_by(request, checkpoints)


def resumed_from(request: dict[str, Any]) -> None:
    """The source of the reuse, or why there is none."""
    source = shell.queries().source_of(request)
    boundary = request["source_boundary"]
    at = f" at token {boundary:,}" if boundary is not None else ""
    kind = reasons.kind(request["source_kind"] or "none")
    if source is not None:
        st.caption(f"{kind.short}{at}")
        _neighbour_table([source], "source_table", "The request it resumed from")
    elif request["source_request_id"]:
        st.caption(f"{kind.short}{at}, of a request that is not in the store any more:")
        st.code(formatting.visible(request["source_request_id"]), language=None)
    elif request["num_cached_tokens"]:
        st.caption(f"No retained checkpoint. {kind.sentence}")
    else:
        st.caption("Nothing: none of its prompt was in the cache.")


def reused_by(request: dict[str, Any], checkpoints: list[dict[str, Any]]) -> None:
    """Who resumed from this request, or why nobody did."""
    reusers = shell.queries().reusers_of(request)
    if reusers:
        st.caption(f"{len(reusers)} request{'' if len(reusers) == 1 else 's'}")
        _neighbour_table(reusers, "reusers_table", "The requests that resumed from it")
    elif request["retained_boundary"] is None:
        st.caption("Nobody can: it published no checkpoint.")
    elif any(c["stage"] == "evicted" for c in checkpoints):
        st.caption("Nobody did before a checkpoint of it was evicted.")
    else:
        st.caption("Nobody yet: the checkpoint waits in the cache for a next turn.")


def _neighbour_table(rows: list[dict[str, Any]], key: str, caption: str) -> None:
    columns = [request_rows.COLUMNS[i] for i in (0, 1, 3)]
    cells = [request_rows.request_row(row) for row in rows]
    record_table(
        columns,
        [
            TableRow(row.key, [row.cells[i] for i in (0, 1, 3)], row.name)
            for row in cells
        ],
        key=key,
        caption=caption,
    )


def stages(request: dict[str, Any], checkpoints: list[dict[str, Any]]) -> None:
    """The stage timeline, and each checkpoint in a table."""
    st.subheader(
        "Stages",
        anchor=False,
        help="When each checkpoint was pinned, promoted, and published or discarded.",
    )
    if not checkpoints:
        shell.empty_state(
            "No checkpoint was ever pinned", request_rows.outcome(request).in_full
        )
        return
    if len(checkpoints) > MAX_LANES:
        total = shell.queries().count_checkpoints_of(request)
        st.caption(f"The {MAX_LANES} deepest of {total:,} checkpoints are drawn.")
    st.plotly_chart(
        stage_timeline(
            request,
            checkpoints,
            time.time_ns(),
            shell.local_clock,
        ),
        config=layout.CONFIG,
        key="stage_timeline",
        alt="Stage timeline; the table below holds the same times.",
    )
    record_table(
        CHECKPOINT_COLUMNS,
        [checkpoint_row(request, checkpoint) for checkpoint in checkpoints],
        key="checkpoints_table",
        caption="Checkpoints of this request, the deepest first",
    )


def checkpoint_row(request: dict[str, Any], checkpoint: dict[str, Any]) -> TableRow:
    """One checkpoint's row, its stages with their times when opened."""
    start = request["arrival_ns"] or request["admitted_ns"]
    times = stage_times(checkpoint)
    ended = checkpoint["published_ns"] or checkpoint["discarded_ns"]
    pinned = checkpoint["pinned_ns"]
    mark = palette.stage(checkpoint["stage"])
    why = ""
    if checkpoint["eviction_reason"]:
        why = reasons.eviction(checkpoint["eviction_reason"]).short
    elif checkpoint["discard_reason"]:
        why = reasons.no_checkpoint(checkpoint["discard_reason"]).short
    return TableRow(
        key=str(checkpoint["checkpoint_id"]),
        name=f"checkpoint {checkpoint['checkpoint_id']}",
        stamp=checkpoint["last_event_ns"] // 1_000_000,
        cells=(
            table.number(checkpoint["boundary"]),
            table.text(reasons.kind(checkpoint["boundary_kind"]).short),
            table.tag(
                checkpoint["stage"],
                mark.shape,
                _tone(checkpoint["stage"]),
                help=reasons.stage(checkpoint["stage"]).sentence,
            ),
            table.text(why or "—", quiet=True),
            table.text(
                f"+{formatting.duration(pinned - start)}" if pinned and start else "—"
            ),
            table.text(
                formatting.duration(ended - pinned) if ended and pinned else "—"
            ),
            table.number(checkpoint["num_blocks"]),
            table.number(checkpoint["num_hits"]),
        ),
        detail=table.Detail(_checkpoint_items(checkpoint, times)),
    )


def _tone(stage: str) -> str:
    return {
        "published": "good",
        "promoted": "promoted",
        "discarded": "bad",
        "gone": "bad",
        "evicted": "special",
    }.get(stage, "quiet")


def _checkpoint_items(
    checkpoint: dict[str, Any], times: list[tuple[str, int]]
) -> list[tuple[str, str, bool]]:
    items = [
        (
            name,
            f"{shell.local_clock(at)} — {reasons.stage(name).sentence}",
            False,
        )
        for name, at in times
    ]
    if checkpoint["discard_reason"]:
        reason = reasons.no_checkpoint(checkpoint["discard_reason"])
        items.append(("discarded because", reason.in_full, False))
    if checkpoint["eviction_reason"]:
        reason = reasons.eviction(checkpoint["eviction_reason"])
        unused = "" if checkpoint["num_hits"] else " Nobody had used it."
        items.append(("evicted because", reason.in_full + unused, False))
    if checkpoint["attention_evicted_ns"]:
        at = shell.local_time(checkpoint["attention_evicted_ns"])
        items.append(
            ("attention evicted", f"{at} — its attention blocks left the cache.", False)
        )
    if checkpoint["block_hash"]:
        items.append(("block hash", checkpoint["block_hash"], True))
    items.append(("span id", checkpoint["span_id"] or "—", bool(checkpoint["span_id"])))
    return items


def raw(request: dict[str, Any], checkpoints: list[dict[str, Any]]) -> None:
    """The records as stored, and their download."""
    record = {"request": request, "checkpoints": checkpoints}
    text = json.dumps(record, ensure_ascii=False, indent=2)
    with st.expander("Raw record", icon=":material/data_object:"):
        st.download_button(
            "Download JSON",
            text,
            "request.json",
            "application/json",
            icon=":material/download:",
            on_click="ignore",
        )
        st.code(text, language="json", height=320)


shell.show_with_controls(
    "Request", "From its first token to what it left for the next.", controls, body
)
