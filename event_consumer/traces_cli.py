"""``event-consumer traces``: the questions of docs/traces.md, asked of the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from event_consumer.cli_options import (
    STAGES,
    STATUSES,
    EngineOption,
    IncompleteOption,
    JsonOption,
    LabelOption,
    LimitOption,
    MaxDepthOption,
    MaxHitsOption,
    MinDepthOption,
    MinPrefilledOption,
    MinRecomputedOption,
    SessionOption,
    SinceOption,
    StoreOption,
    one_of,
    parse_time,
    plain,
    print_json,
    printable,
    whole,
)
from event_consumer.queries import DEFAULT_LIMIT, Row
from event_consumer.records import EVICTED, FINISHED, GONE, PUBLISHED
from event_consumer.store import DEFAULT_URL, Store
from event_consumer.trace_queries import (
    GROUPS,
    ORDERS,
    TraceFilter,
    count_traces,
    count_traces_by,
    find_traces,
)
from vllm_fork.events import (
    CHECKPOINT_KINDS,
    DISCARD_REASONS,
    EVICTION_REASONS,
    HIT_LIMITS,
    SOURCE_KINDS,
)

NO_CHECKPOINT_REASONS: Final = (
    "below_block",
    "never_admitted",
    "resumable",
    "disabled",
)
REASONS: Final = tuple(
    dict.fromkeys(
        (*DISCARD_REASONS, *EVICTION_REASONS, "unobserved", *NO_CHECKPOINT_REASONS)
    )
)
UNSUPPORTED: Final = "unsupported:"


def traces(
    store: StoreOption = DEFAULT_URL,
    request: Annotated[
        str | None, typer.Option(help="Request id, external id or trace id.")
    ] = None,
    session: SessionOption = None,
    engine: EngineOption = None,
    label: LabelOption = None,
    model: Annotated[str | None, typer.Option(help="Name of the model.")] = None,
    status: Annotated[str | None, typer.Option(help=", ".join(STATUSES) + ".")] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="Has a checkpoint that is now " + ", ".join(STAGES) + "."),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="Why it left no checkpoint, or why one of its went: "
            + ", ".join(REASONS)
            + f" or {UNSUPPORTED}WHAT."
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Has a checkpoint of this kind: " + ", ".join(CHECKPOINT_KINDS) + "."
        ),
    ] = None,
    limited_by: Annotated[
        str | None,
        typer.Option(help="What limited its reuse: " + ", ".join(HIT_LIMITS) + "."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="What it resumed from: " + ", ".join(SOURCE_KINDS) + "."),
    ] = None,
    resumed_from: Annotated[
        str | None,
        typer.Option(help="Resumed from a checkpoint of this request (either id)."),
    ] = None,
    max_hits: MaxHitsOption = None,
    min_depth: MinDepthOption = None,
    max_depth: MaxDepthOption = None,
    min_prefilled: MinPrefilledOption = None,
    min_reprefilled: Annotated[
        int | None,
        whole("Prefilled at least so many that the turn before had computed."),
    ] = None,
    min_recomputed: MinRecomputedOption = None,
    min_preemptions: Annotated[
        int | None, whole("Was preempted at least so often.")
    ] = None,
    left_none: Annotated[
        bool, typer.Option("--left-none", help="Ended without leaving a checkpoint.")
    ] = False,
    evicted_before_use: Annotated[
        bool,
        typer.Option(
            "--evicted-before-use", help="Left a checkpoint that was evicted unused."
        ),
    ] = False,
    incomplete: IncompleteOption = None,
    since: SinceOption = None,
    until: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    order: Annotated[str, typer.Option(help=", ".join(ORDERS) + ".")] = ORDERS[0],
    by: Annotated[
        str | None, typer.Option(help="Count them by: " + ", ".join(GROUPS) + ".")
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    as_json: JsonOption = False,
) -> None:
    """Traces: what each request reused, what it left behind, and why."""
    if reason is None or not reason.startswith(UNSUPPORTED):
        one_of("--reason", reason, REASONS)
    one_of("--order", order, ORDERS)
    which = TraceFilter(
        request=request,
        session=session,
        engine=engine,
        label=label,
        model=model,
        status=one_of("--status", status, STATUSES),
        stage=one_of("--stage", stage, STAGES),
        reason=reason,
        kind=one_of("--kind", kind, CHECKPOINT_KINDS),
        limited_by=one_of("--limited-by", limited_by, HIT_LIMITS),
        source=one_of("--source", source, SOURCE_KINDS),
        resumed_from=resumed_from,
        max_hits=max_hits,
        min_depth=min_depth,
        max_depth=max_depth,
        min_prefilled=min_prefilled,
        min_reprefilled=min_reprefilled,
        min_recomputed=min_recomputed,
        min_preemptions=min_preemptions,
        left_none=left_none,
        evicted_before_use=evicted_before_use,
        incomplete=incomplete,
        since_ns=parse_time("--since", since),
        until_ns=parse_time("--until", until),
        limit=limit,
    )
    group = one_of("--by", by, GROUPS)
    with Store(store, read_only=True) as opened:
        if group is not None:
            _print_counts(count_traces_by(opened, which, group), group, as_json)
            return
        rows = find_traces(opened, which, order)
        num_matched = count_traces(opened, which)
    if as_json:
        print_json({"traces": rows, "num_matched": num_matched})
        return
    for row in rows:
        print("\n".join(map(printable, _lines(row))))
    shown = f" {len(rows)} are shown (--limit)." if num_matched > len(rows) else ""
    print(f"{num_matched or 'No'} request{'s' * (num_matched != 1)} found.{shown}")


def _print_counts(rows: list[Row], group: str, as_json: bool) -> None:
    if as_json:
        print_json({"groups": rows})
        return
    if not rows:
        print("No requests found.")
    for row in rows:
        value = row[group]
        print(f"{row['num_requests']:>9}  {'-' if value is None else plain(value)}")


def _lines(trace: Row) -> list[str]:
    """One trace in words."""
    name = plain(trace["external_request_id"] or trace["request_id"])
    label = f" [{plain(trace['label'])}]" if trace["label"] else ""
    again = trace["num_reprefilled_tokens"]
    bound = "up to " if trace["reprefilled_is_upper_bound"] else ""
    lines = [
        f"{_clock(trace['end_ns'])}  {name}{label}",
        f"    reused {_count(trace['num_cached_tokens'])} of "
        f"{_count(trace['num_prompt_tokens'])} prompt tokens{_source(trace)}, "
        f"prefilled {_count(trace['num_prefilled_tokens'])}"
        + (f", {bound}{again} of them again" if again else ""),
    ]
    if trace["why"] is not None:
        lines.append(f"    why: {trace['why']}")
    lines.append(f"    {_end(trace)}")
    lines += [f"    {_checkpoint(checkpoint)}" for checkpoint in trace["checkpoints"]]
    if trace["incomplete"]:
        lines.append("    incomplete: some of its events were lost")
    if trace["conversation_id"] is not None:
        lines.append(f"    conversation {plain(trace['conversation_id'])}")
    lines.append(f"    trace {trace['trace_id'] or '-'}")
    return lines


def _source(trace: Row) -> str:
    if trace["source_request_id"] is None:
        limit = trace["hit_limited_by"]
        return f" (limited by {limit})" if limit else ""
    name = trace["source_external_request_id"] or trace["source_request_id"]
    return f" (from the {trace['source_kind']} of {plain(name)})"


def _end(trace: Row) -> str:
    if trace["status"] != FINISHED:
        return f"status {trace['status']}"
    end = f"ended by {plain(trace['finish_reason'] or '-')}"
    if trace["retained_boundary"] is not None:
        kind = trace["retained_kind"]
        return f"{end}, left a checkpoint at {trace['retained_boundary']} ({kind})"
    return f"{end}, left no checkpoint: {plain(trace['no_checkpoint_reason'] or '-')}"


def _checkpoint(checkpoint: Row) -> str:
    why = f" ({checkpoint['reason']})" if checkpoint["reason"] else ""
    hits = checkpoint["num_hits"]
    was_published = checkpoint["stage"] in (PUBLISHED, EVICTED, GONE)
    used = f", used {hits} time{'s' * (hits != 1)}" if was_published else ""
    return (
        f"checkpoint {checkpoint['checkpoint_id']} at {checkpoint['boundary']} "
        f"({checkpoint['boundary_kind']}): {checkpoint['stage']}{why}{used}"
    )


def _clock(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%SZ}"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
