"""``event-consumer traces``: the questions of docs/traces.md, asked of the store."""

from __future__ import annotations

import difflib
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final, NoReturn

import typer
from sqlalchemy.exc import SQLAlchemyError

from event_consumer.records import (
    DISCARDED,
    ENGINE_LOST,
    EVICTED,
    FINISHED,
    GONE,
    OPEN,
    PINNED,
    PROMOTED,
    PUBLISHED,
)
from event_consumer.store import DEFAULT_URL, Store, StoreError
from event_consumer.trace_queries import (
    DEFAULT_LIMIT,
    ORDERS,
    Trace,
    TraceFilter,
    count_by,
    count_traces,
    find_traces,
)
from vllm_fork.events import (
    DISCARD_REASONS,
    EVICTION_REASONS,
    HIT_LIMITS,
    SOURCE_KINDS,
)

STAGES: Final = (PINNED, PROMOTED, PUBLISHED, DISCARDED, EVICTED, GONE)
STATUSES: Final = (OPEN, FINISHED, ENGINE_LOST)
NO_CHECKPOINT_REASONS: Final = (
    "below_block",
    "never_admitted",
    "resumable",
    "disabled",
    "unobserved",
)
REASONS: Final = (*DISCARD_REASONS, *EVICTION_REASONS, *NO_CHECKPOINT_REASONS)
OPEN_ENDED_REASON: Final = "unsupported:"
GROUPS: Final = (
    "no_checkpoint_reason",
    "hit_limited_by",
    "source_kind",
    "retained_kind",
    "finish_reason",
    "status",
    "label",
    "model_name",
)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

_Tokens = Annotated[int | None, typer.Option(min=0, metavar="TOKENS")]


def traces(
    store: Annotated[
        str, typer.Option(help="SQLAlchemy URL of the store.", metavar="URL")
    ] = DEFAULT_URL,
    request: Annotated[
        str | None, typer.Option(help="Id of the client or of the core.", metavar="ID")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Session or conversation.", metavar="ID")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Trace id, 32 hex digits.", metavar="ID")
    ] = None,
    engine: Annotated[str | None, typer.Option(metavar="ID")] = None,
    label: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    status: Annotated[str | None, typer.Option(help=" | ".join(STATUSES))] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="Has a checkpoint that is now: " + " | ".join(STAGES)),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint was discarded or evicted for it, or it is why there is "
            "none: " + " | ".join(REASONS) + " | unsupported:WHAT"
        ),
    ] = None,
    hit_limited_by: Annotated[
        str | None, typer.Option(help=" | ".join(HIT_LIMITS))
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Resumed from: " + " | ".join(SOURCE_KINDS))
    ] = None,
    resumed_from: Annotated[
        str | None,
        typer.Option(help="Resumed from a checkpoint of this request.", metavar="ID"),
    ] = None,
    min_reuse: _Tokens = None,
    max_reuse: _Tokens = None,
    min_prefilled: _Tokens = None,
    min_reprefilled: _Tokens = None,
    min_recomputed: _Tokens = None,
    min_preemptions: Annotated[int | None, typer.Option(min=0)] = None,
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Left no checkpoint behind.")
    ] = False,
    evicted_before_use: Annotated[
        bool,
        typer.Option(
            "--evicted-before-use", help="Left one that was evicted, never used."
        ),
    ] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Some of its events were lost.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(help="15m, 2h, 7d ago, or ISO 8601.", metavar="TIME"),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    order: Annotated[str, typer.Option(help=" | ".join(ORDERS))] = ORDERS[0],
    by: Annotated[
        str | None,
        typer.Option(help="Count instead, by: " + " | ".join(GROUPS)),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = DEFAULT_LIMIT,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """List the traces that match, newest first: what each request reused, what it
    left behind, and why."""
    _check("--status", status, STATUSES)
    _check("--stage", stage, STAGES)
    if reason is None or not reason.startswith(OPEN_ENDED_REASON):
        _check("--reason", reason, REASONS)
    _check("--hit-limited-by", hit_limited_by, HIT_LIMITS)
    _check("--source", source, SOURCE_KINDS)
    _check("--order", order, ORDERS)
    _check("--by", by, GROUPS)
    where = TraceFilter(
        request=request,
        session=session,
        trace_id=trace.lower().removeprefix("0x") if trace else None,
        engine=engine,
        label=label,
        model=model,
        status=status,
        stage=stage,
        reason=reason,
        hit_limited_by=hit_limited_by,
        source=source,
        resumed_from=resumed_from,
        min_reuse=min_reuse,
        max_reuse=max_reuse,
        min_prefilled=min_prefilled,
        min_reprefilled=min_reprefilled,
        min_recomputed=min_recomputed,
        min_preemptions=min_preemptions,
        no_checkpoint=no_checkpoint,
        evicted_before_use=evicted_before_use,
        incomplete=incomplete,
        since_ns=parse_time("--since", since),
        until_ns=parse_time("--until", until),
    )
    try:
        with Store(store, read_only=True) as opened, opened.engine.connect() as read:
            if by is not None:
                counts = count_by(read, by, where)
            else:
                found = find_traces(read, where, order=order, limit=limit)
                matched = count_traces(read, where)
    except (StoreError, SQLAlchemyError) as error:
        _end(1, " ".join(str(error).split()))
    if by is not None:
        _print_counts(by, counts, as_json=as_json)
    else:
        _print_traces(found, matched, as_json=as_json)


def parse_time(option: str, text: str | None) -> int | None:
    """``15m`` (that long ago) or ISO 8601, local where it names no zone; in
    nanoseconds since the epoch. Ends the command where it is neither."""
    if text is None:
        return None
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if ago:
        return time.time_ns() - int(float(ago[1]) * _SECONDS[ago[2]] * 1e9)
    try:
        return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000
    except ValueError:
        _end(
            2,
            f"{option} {text!r} is no time: write how long ago (90s, 15m, 2h, 7d) or "
            f"a date and time (2026-11-29T16:00).",
        )


def _check(option: str, value: str | None, known: Sequence[str]) -> None:
    if value is None or value in known:
        return
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
    _end(2, f"{option} {value!r} is not known: {hint}")


def _end(code: int, sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise typer.Exit(code)


def _print_counts(
    by: str, counts: Iterable[tuple[str | None, int]], *, as_json: bool
) -> None:
    if as_json:
        groups = [{by: value, "requests": count} for value, count in counts]
        print(json.dumps({"groups": groups}))
        return
    for value, count in counts:
        print(f"{count:>8}  {value if value is not None else '-'}")


def _print_traces(found: Sequence[Trace], matched: int, *, as_json: bool) -> None:
    if as_json:
        listed = [_as_json(trace) for trace in found]
        print(json.dumps({"traces": listed, "matched": matched}))
        return
    for trace in found:
        print("\n".join(_lines(trace)))
    shown = f", {len(found)} shown (--limit)" if matched > len(found) else ""
    print(f"{matched} request{'s' * (matched != 1)} matched{shown}.")


def _as_json(trace: Trace) -> dict[str, Any]:
    """The request's columns, with what was computed and the checkpoints beside."""
    computed = asdict(trace)
    request = computed.pop("request")
    previous = computed.pop("previous")
    computed["previous_request_id"] = previous["request_id"] if previous else None
    return {**request, **computed}


def _lines(trace: Trace) -> list[str]:
    request = trace.request
    name = _plain(request["external_request_id"] or request["request_id"])
    label = f" [{_plain(request['label'])}]" if request["label"] else ""
    session = _plain(request["session_id"] or request["conversation_id"] or "-")
    lines = [
        f"{_clock(request['last_event_ns'])}  {name}{label}  of {session}",
        f"    reused {_count(request['num_cached_tokens'])} of "
        f"{_count(request['num_prompt_tokens'])} prompt tokens"
        f"{_from(request)}; computed {_count(trace.prefilled_tokens)}, "
        f"{_count(trace.reprefilled_tokens)} of them again",
        f"    {_left(request)}",
    ]
    if trace.why is not None:
        lines.append(f"    why: {trace.why}")
    lines += [f"    {_checkpoint(checkpoint)}" for checkpoint in trace.checkpoints]
    if request["incomplete"]:
        lines.append("    incomplete: some of its events were lost")
    lines.append(f"    trace {request['trace_id'] or '-'}")
    return lines


def _from(request: dict[str, Any]) -> str:
    if request["source_request_id"] is None:
        limit = request["hit_limited_by"]
        return f" (limited by {limit})" if limit else ""
    name = request["source_external_request_id"] or request["source_request_id"]
    return f" from {_plain(name)}'s {request['source_kind']}"


def _left(request: dict[str, Any]) -> str:
    status = request["status"]
    end = request["finish_reason"] if status == FINISHED else status
    end = _plain(end or "-")
    if request["retained_boundary"] is not None:
        return (
            f"ended by {end}, left a checkpoint at {request['retained_boundary']} "
            f"({request['retained_kind']})"
        )
    if status != FINISHED:
        return f"is {end}"
    return (
        f"ended by {end}, left none: {_plain(request['no_checkpoint_reason'] or '-')}"
    )


def _checkpoint(checkpoint: dict[str, Any]) -> str:
    reason = checkpoint["discard_reason"] or checkpoint["eviction_reason"]
    why = f" ({reason})" if reason else ""
    hits = checkpoint["num_hits"]
    used = (
        f", used {hits} time{'s' * (hits != 1)}" if checkpoint["published_ns"] else ""
    )
    return (
        f"checkpoint {checkpoint['checkpoint_id']} at {checkpoint['boundary']} "
        f"{checkpoint['boundary_kind']}: {checkpoint['stage']}{why}{used}"
    )


def _clock(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns / 1e9, UTC).astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _plain(text: str) -> str:
    """Ids come from clients: nothing in them may move the cursor."""
    return "".join(char if char.isprintable() else "�" for char in text)
