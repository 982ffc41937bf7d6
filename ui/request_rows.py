"""How a row of the store's ``requests`` reads in a table, wherever one is shown."""

from __future__ import annotations

from typing import Any, Final

from ui import formatting, palette, reasons, shell
from ui.components import record_table as table
from ui.components.record_table import Cell, Detail, Link, TableColumn, TableRow

COLUMNS: Final = (
    TableColumn(
        "Request",
        "The id that the client saw; under it the conversation. "
        "Both open their page, and copy.",
        "lead",
    ),
    TableColumn("Last event", "How long ago anything happened to the request."),
    TableColumn("Engine", "The label of the engine that served it."),
    TableColumn(
        "Prompt: reused | prefilled",
        "Prompt tokens taken from the prefix cache at the first admission, of all "
        "prompt tokens. The hatched part was computed.",
    ),
    TableColumn("Reuse stopped at", "What kept the reuse from going deeper."),
    TableColumn("Output", "Output tokens.", "right"),
    TableColumn(
        "Left for the next turn",
        "The deepest boundary (tokens) that the request published, or why it "
        "published none.",
    ),
)


_RESUMED_AT: Final = {
    "decode_block": "a block boundary of an earlier answer",
    "exact_tail": "the very end of an earlier answer",
    "copy": "a rolling copy made during an earlier answer",
    "prompt_replay": "the end of the same prompt",
    "shared_prefix": "a prefix that several prompts share",
}


def request_row(row: dict[str, Any]) -> TableRow:
    """The row of a request, with its reasons in words when opened."""
    return TableRow(
        key=f"{row['engine_id']}/{row['request_id']}",
        name=row["external_request_id"] or row["request_id"],
        stamp=row["last_event_ns"] // 1_000_000,
        cells=(
            table.identifier(
                shell.request_link(row),
                row["external_request_id"] or row["request_id"],
                conversation_link(row),
            ),
            table.when(row["last_event_ns"]),
            table.text(row["label"] or "unlabelled", quiet=not row["label"]),
            reuse_cell(row),
            limit_cell(row),
            table.number(row["num_output_tokens"]),
            outcome_cell(row),
        ),
        detail=_detail(row),
    )


def conversation_link(row: dict[str, Any]) -> Link | None:
    """A link to the conversation of a request."""
    if not row["conversation_id"]:
        return None
    shown = row["session_id"] or "without a session id"
    return shell.page_link("conversations", shown, conversation=row["conversation_id"])


def reuse_cell(row: dict[str, Any]) -> Cell:
    """How much of the prompt was reused, as a bar with its numbers."""
    prompt, cached = row["num_prompt_tokens"], row["num_cached_tokens"]
    if prompt is None or cached is None:
        waiting = "not admitted yet" if row["status"] == "open" else "never admitted"
        return table.text(waiting, quiet=True)
    numbers = f"{cached:,} of {prompt:,}"
    return table.share(
        (("reused", cached), ("prefilled", prompt - cached)),
        f"{numbers} · {formatting.percent(cached, prompt)}",
        f"reused {numbers} prompt tokens",
    )


def limit_cell(row: dict[str, Any]) -> Cell:
    """What kept the reuse from going deeper."""
    code = row["hit_limited_by"]
    if not code:
        return table.text("—", quiet=True)
    reason = reasons.hit_limit(code)
    return table.text(
        reason.short, quiet=code in ("prompt_end", "attention"), help=reason.in_full
    )


def outcome_cell(row: dict[str, Any]) -> Cell:
    """What the request left behind: a boundary, or the reason in short."""
    reason = outcome(row)
    if row["retained_boundary"] is not None:
        return table.tag(
            f"{row['retained_boundary']:,}",
            palette.stage("published").shape,
            "good",
            note=reasons.kind(row["retained_kind"]).short
            if row["retained_kind"]
            else "",
            help=reason.sentence,
        )
    mark = palette.stage("discarded").shape
    code, tone = row["no_checkpoint_reason"], "bad"
    if row["status"] == "open" and not code:
        mark, tone = "circle-open", "quiet"
    elif code in ("disabled", "below_block", "never_admitted", "already_cached"):
        mark, tone = "bar", "quiet"
    elif row["status"] == "engine_lost":
        mark = "plus"
    return table.tag(reason.short, mark, tone, help=reason.in_full)


def outcome(row: dict[str, Any]) -> reasons.Reason:
    """What the request left behind, in words."""
    return reasons.outcome(
        row["status"],
        row["retained_boundary"],
        row["no_checkpoint_reason"],
        row["incomplete"],
    )


def reuse_sentence(row: dict[str, Any]) -> str:
    """What the prompt reused, from what, and what kept it from more."""
    prompt, cached = row["num_prompt_tokens"], row["num_cached_tokens"]
    if prompt is None or cached is None:
        if row["status"] == "open":
            return "Waiting to be admitted: nothing is known of its reuse yet."
        return "It was never admitted, so nothing was reused and nothing computed."
    limit = row["hit_limited_by"]
    why = f" {reasons.hit_limit(limit).sentence}" if limit else ""
    external = row["num_external_tokens"] or 0
    brought = f" A KV connector brought {external:,} more." if external else ""
    if cached == 0:
        return f"None of its {prompt:,} prompt tokens were reused.{why}{brought}"
    source = row["source_kind"]
    if source and source != "none":
        origin = f", resumed at {_RESUMED_AT.get(source, source)}"
    else:
        origin = ""
    return (
        f"{cached:,} of {prompt:,} prompt tokens "
        f"({formatting.percent(cached, prompt)}) were reused{origin}; "
        f"{prompt - cached:,} were computed.{why}{brought}"
    )


def outcome_sentence(row: dict[str, Any]) -> str:
    """What the request left for the next turn, in full."""
    reason = outcome(row)
    if row["retained_boundary"] is not None:
        kind = reasons.kind(row["retained_kind"] or "").short
        return (
            f"The state at token {row['retained_boundary']:,} ({kind}) was published: "
            "a next turn that replays this conversation resumes from it."
        )
    return f"No checkpoint: {reason.short}. {reason.in_full}"


def _detail(row: dict[str, Any]) -> Detail:
    items = [
        ("Reused", reuse_sentence(row), False),
        ("Left", outcome_sentence(row), False),
        ("Request id", row["request_id"], True),
    ]
    if row["session_id"]:
        items.append(("Session id", row["session_id"], True))
    if row["model_name"]:
        items.append(("Model", row["model_name"], False))
    if row["finish_reason"]:
        items.append(("Ended by", reasons.finish(row["finish_reason"]).sentence, False))
    links = [shell.request_link(row, "Open request")]
    if conversation := conversation_link(row):
        links.append(conversation._replace(text="Open conversation"))
    if trace := shell.trace_link(row["trace_id"]):
        links.append(trace)
    return Detail(items, links)
