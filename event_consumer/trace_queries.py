"""The questions one asks of the traces, answered from the store.

One row a request, as ``kv_cache.request``, its children and its link tell it, plus
what only the store can know: the turn before it in its conversation, and what befell
its checkpoints later. Filters, order and limit run in the database.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    case,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from event_consumer.queries import Filter, Row, begin_ns, has_checkpoint
from event_consumer.records import EVICTED
from event_consumer.request_ids import external_ids
from event_consumer.store import Store
from event_consumer.tables import checkpoints, requests

ORDERS: Final = ("newest", "oldest", "reprefilled", "prefilled", "depth")
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
"""Columns of ``requests`` that :func:`count_traces_by` may count by."""


@dataclass(frozen=True, kw_only=True)
class TraceFilter(Filter):
    """Which traces; every condition that is given must hold.

    ``resumed_from``: the request (either id) whose checkpoint it resumed from.
    ``min_reprefilled``: of its prefilled tokens, so many at least had been computed
    by the turn before it already. ``left_none``: it ended without a checkpoint.
    ``evicted_before_use``: it left one that was evicted before any request resumed
    from it. ``until_ns``: last event before.
    """

    model: str | None = None
    resumed_from: str | None = None
    min_reprefilled: int | None = None
    min_preemptions: int | None = None
    left_none: bool = False
    evicted_before_use: bool = False
    until_ns: int | None = None

    def condition(self) -> ColumnElement[bool]:
        wanted = [super().condition()]
        if self.model is not None:
            wanted.append(requests.c.model_name == self.model)
        if self.resumed_from is not None:
            external = requests.c.source_external_request_id
            wanted.append(
                or_(
                    requests.c.source_request_id == self.resumed_from,
                    external.in_(external_ids(self.resumed_from)),
                )
            )
        if self.min_reprefilled is not None:
            wanted.append(self.min_reprefilled <= _REPREFILLED)
        if self.min_preemptions is not None:
            wanted.append(requests.c.num_preemptions >= self.min_preemptions)
        if self.left_none:
            wanted.append(requests.c.no_checkpoint_reason.is_not(None))
        if self.evicted_before_use:
            unused = and_(checkpoints.c.stage == EVICTED, checkpoints.c.num_hits == 0)
            wanted.append(has_checkpoint(unused))
        if self.until_ns is not None:
            wanted.append(requests.c.last_event_ns < self.until_ns)
        return and_(*wanted)


def find_traces(store: Store, which: TraceFilter, order: str = "newest") -> list[Row]:
    """Traces of requests in ``order`` (one of :data:`ORDERS`).

    ``num_prefilled_tokens``: prompt tokens computed at admission;
    ``num_reprefilled_tokens``: those of them that the turn before had computed;
    ``reprefilled_is_upper_bound``: this prompt parts from the turn before, so that
    fewer may be; ``num_recomputed_tokens``: those whose attention was still cached;
    ``why``: in words, why anything was computed again. ``links`` and ``checkpoints``
    are the span's link and its child spans.

    Raises:
        StoreError: the store cannot be read.
    """
    statement = (
        _join_turns(select(requests), which, order)
        .where(which.condition())
        .order_by(*_ORDER_BY[order], requests.c.request_id)
        .limit(which.limit)
    )
    with store.reading() as connection:
        found = connection.execute(statement).mappings()
        rows = [{**row, **_NO_TURN_BEFORE} for row in found]
        _add_turns_before(connection, rows)
        before = _requests_of(connection, map(_previous_key, rows))
        ours = _checkpoints_of(connection, [*map(_key, rows), *before])
        sources = _sources_of(connection, rows)
    return [
        _trace(
            row,
            ours.get(_key(row), []),
            sources.get((row["engine_id"], row["source_checkpoint_id"])),
            before.get(_previous_key(row)),
            ours.get(_previous_key(row), []),
        )
        for row in rows
    ]


def count_traces(store: Store, which: TraceFilter) -> int:
    """How many match, whatever the limit.

    Raises:
        StoreError: the store cannot be read.
    """
    statement = _join_turns(select(func.count(requests.c.request_id)), which)
    statement = statement.where(which.condition())
    with store.reading() as connection:
        return connection.scalar(statement) or 0


def count_traces_by(store: Store, which: TraceFilter, column: str) -> list[Row]:
    """``{column: value, "num_requests": count}`` for each value of ``column`` (one
    of :data:`GROUPS`), the most frequent first.

    Raises:
        StoreError: the store cannot be read.
    """
    group, number = requests.c[column], func.count().label("num_requests")
    statement = (
        _join_turns(select(group, number).select_from(requests), which)
        .where(which.condition())
        .group_by(group)
        .order_by(number.desc(), group)
    )
    with store.reading() as connection:
        return [dict(row) for row in connection.execute(statement).mappings()]


# What is computed in SQL.


def _at_least_zero(value: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((value > 0, value), else_=literal(0))


def _before(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
    """``column`` of the turn before, of the same label: an A/B pair of engines may
    play one conversation."""
    turns = requests.c
    begin = func.coalesce(turns.arrival_ns, turns.admitted_ns, turns.last_event_ns)
    return (
        func.lag(column)
        .over(
            partition_by=(turns.conversation_id, turns.label),
            order_by=(begin, turns.request_id),
        )
        .label(name)
    )


_SERVED: Final = func.coalesce(requests.c.num_cached_tokens, 0) + func.coalesce(
    requests.c.num_external_tokens, 0
)
_PREFILLED: Final = _at_least_zero(requests.c.num_prompt_tokens - _SERVED)

_WITH_TURN_BEFORE: Final = select(
    requests.c.engine_id,
    requests.c.request_id,
    _before(requests.c.engine_id, "previous_engine_id"),
    _before(requests.c.request_id, "previous_request_id"),
    _before(
        # A turn's last token was sampled but never run.
        requests.c.num_prompt_tokens
        + _at_least_zero(func.coalesce(requests.c.num_output_tokens, 0) - 1),
        "num_computed_before",
    ),
).where(requests.c.conversation_id.is_not(None))

_TURNS: Final = _WITH_TURN_BEFORE.subquery("turns")
_COMPUTED_BEFORE: Final = func.coalesce(_TURNS.c.num_computed_before, 0)
_REPREFILLED: Final = _at_least_zero(
    case(
        (
            requests.c.num_prompt_tokens < _COMPUTED_BEFORE,
            requests.c.num_prompt_tokens,
        ),
        else_=_COMPUTED_BEFORE,
    )
    - _SERVED
)


def _join_turns(
    statement: Select[Any], which: TraceFilter, order: str = ""
) -> Select[Any]:
    """Join the turn before each request where it is asked for: that reads every
    request of the store."""
    if which.min_reprefilled is None and order != "reprefilled":
        return statement
    same = and_(
        _TURNS.c.engine_id == requests.c.engine_id,
        _TURNS.c.request_id == requests.c.request_id,
    )
    return statement.outerjoin_from(requests, _TURNS, same)


_ORDER_BY: Final[dict[str, tuple[Any, ...]]] = {
    "newest": (requests.c.last_event_ns.desc(),),
    "oldest": (requests.c.last_event_ns,),
    "reprefilled": (_REPREFILLED.desc(),),
    "prefilled": (_PREFILLED.desc(),),
    "depth": (func.coalesce(requests.c.num_cached_tokens, 0).desc(),),
}


# Reading rows.

_Key = tuple[str, Any]
_CHUNK: Final = 10_000
"""Keys a statement: SQLite takes some 32,000 parameters, two a key."""


def _key(row: Row | RowMapping) -> _Key:
    return row["engine_id"], row["request_id"]


def _previous_key(row: Row) -> _Key:
    return row["previous_engine_id"] or "", row["previous_request_id"]


_NO_TURN_BEFORE: Final[Row] = {
    "previous_engine_id": None,
    "previous_request_id": None,
    "num_reprefilled_tokens": 0,
}


def _add_turns_before(connection: Connection, rows: list[Row]) -> None:
    """Name the turn before each of ``rows``, and count what was computed again."""
    by_key = {_key(row): row for row in rows}
    named = {row["conversation_id"] for row in rows} - {None}
    conversations = sorted(named)
    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        statement = _WITH_TURN_BEFORE.where(requests.c.conversation_id.in_(chunk))
        for turn in connection.execute(statement).mappings():
            row = by_key.get(_key(turn))
            if row is None or turn["previous_request_id"] is None:
                continue
            row["previous_engine_id"] = turn["previous_engine_id"]
            row["previous_request_id"] = turn["previous_request_id"]
            row["num_reprefilled_tokens"] = _num_reprefilled(
                row, turn["num_computed_before"] or 0
            )


def _num_reprefilled(request: Row, num_computed_before: int) -> int:
    """:data:`_REPREFILLED` of one row."""
    known = min(num_computed_before, request["num_prompt_tokens"] or 0)
    served = (request["num_cached_tokens"] or 0) + (request["num_external_tokens"] or 0)
    return max(0, known - served)


def _requests_of(connection: Connection, keys: Iterable[_Key]) -> dict[_Key, Row]:
    key = tuple_(requests.c.engine_id, requests.c.request_id)
    rows = _rows(connection, requests, key, {k for k in keys if k[1] is not None})
    return {_key(row): row for row in rows}


def _checkpoints_of(
    connection: Connection, keys: Iterable[_Key]
) -> dict[_Key, list[Row]]:
    key = tuple_(checkpoints.c.engine_id, checkpoints.c.request_id)
    found: dict[_Key, list[Row]] = {}
    rows = _rows(connection, checkpoints, key, set(keys))
    for row in sorted(rows, key=lambda row: row["checkpoint_id"]):
        found.setdefault(_key(row), []).append(row)
    return found


def _sources_of(connection: Connection, rows: list[Row]) -> dict[_Key, Row]:
    """The checkpoints that ``rows`` resumed from, where they are still stored."""
    key = tuple_(checkpoints.c.engine_id, checkpoints.c.checkpoint_id)
    wanted = {
        (row["engine_id"], row["source_checkpoint_id"])
        for row in rows
        if row["source_checkpoint_id"] is not None
    }
    found = _rows(connection, checkpoints, key, wanted)
    return {(row["engine_id"], row["checkpoint_id"]): row for row in found}


def _rows(connection: Connection, table: Any, key: Any, wanted: set[_Key]) -> list[Row]:
    keys = sorted(wanted)
    found: list[Row] = []
    for start in range(0, len(keys), _CHUNK):
        chunk = select(table).where(key.in_(keys[start : start + _CHUNK]))
        found += [dict(row) for row in connection.execute(chunk).mappings()]
    return found


_TRACE_COLUMNS: Final = (
    "trace_id",
    "span_id",
    "engine_id",
    "label",
    "model_name",
    "request_id",
    "external_request_id",
    "session_id",
    "conversation_id",
    "status",
    "incomplete",
    "finish_reason",
    "num_preemptions",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_external_tokens",
    "num_output_tokens",
    "shared_prefix_boundary",
    "hit_limited_by",
    "source_kind",
    "source_request_id",
    "source_external_request_id",
    "source_checkpoint_id",
    "source_boundary",
    "retained_boundary",
    "retained_kind",
    "no_checkpoint_reason",
)

_STAGES: Final = ("pinned", "promoted", "published", "discarded", "evicted")


def _trace(
    request: Row,
    own: list[Row],
    source: Row | None,
    previous: Row | None,
    before: list[Row],
) -> Row:
    prompt, cached = request["num_prompt_tokens"], request["num_cached_tokens"]
    known = prompt is not None and cached is not None
    attention = request["shared_prefix_boundary"]
    left_aside = _left_aside(request, previous, before)
    return {
        **{name: request[name] for name in _TRACE_COLUMNS},
        "start_ns": begin_ns(request),
        "end_ns": request["finished_ns"] or request["last_event_ns"],
        "num_prefilled_tokens": (
            max(0, prompt - cached - (request["num_external_tokens"] or 0))
            if known
            else None
        ),
        "num_reprefilled_tokens": request["num_reprefilled_tokens"],
        "num_recomputed_tokens": (
            max(0, attention - cached) if known and attention is not None else None
        ),
        "previous_request_id": request["previous_request_id"],
        "reprefilled_is_upper_bound": left_aside is not None,
        "why": _why(request, previous, before, left_aside),
        "links": [_link(source)] if source else [],
        "checkpoints": [_checkpoint_span(row) for row in own],
    }


def _link(source: Row) -> Row:
    names = ("trace_id", "span_id", "request_id", "checkpoint_id", "boundary")
    return {name: source[name] for name in names}


def _checkpoint_span(checkpoint: Row) -> Row:
    times = {s: checkpoint[f"{s}_ns"] for s in _STAGES}
    known = [at for at in times.values() if at is not None]
    ended = checkpoint["published_ns"] or checkpoint["discarded_ns"]
    return {
        "span_id": checkpoint["span_id"],
        "checkpoint_id": checkpoint["checkpoint_id"],
        "boundary": checkpoint["boundary"],
        "boundary_kind": checkpoint["boundary_kind"],
        "stage": checkpoint["stage"],
        "reason": checkpoint["discard_reason"] or checkpoint["eviction_reason"],
        "num_hits": checkpoint["num_hits"],
        "start_ns": min(known, default=None),
        "end_ns": ended or max(known, default=None),
        "stages": [
            {"stage": stage, "time_ns": at}
            for stage, at in times.items()
            if at is not None
        ],
    }


_LIMITS: Final = {
    "prompt_end": "the last tokens of a prompt are never reused",
    "recurrent_state": "attention was cached deeper than the recurrent state",
    "attention": "the attention blocks were cached no deeper",
    "skipped": "the request did not read the prefix cache",
    "connector": "a KV connector served the rest",
}
_NOT_LOOKED_FOR: Final = ("skipped", "connector")
"""Limits that say nothing of what the cache held."""


def _why(
    request: Row, previous: Row | None, before: list[Row], left_aside: Row | None
) -> str | None:
    """Why tokens that the turn before had computed were computed again, in words;
    None where none were. ``before``: the checkpoints of the turn before;
    ``left_aside``: see :func:`_left_aside`."""
    if not request["num_reprefilled_tokens"] or previous is None:
        return None
    if previous["engine_id"] != request["engine_id"]:
        return "the turn before ran on another engine"
    limit = request["hit_limited_by"]
    if limit in _NOT_LOOKED_FOR:
        return _LIMITS[limit]
    if left_aside is not None:
        return (
            f"the turn before's checkpoint at {left_aside['boundary']} "
            f"({left_aside['boundary_kind']}) was not continued: this prompt renders "
            "what came before it otherwise"
        )
    for checkpoint in sorted(before, key=lambda row: -row["boundary"]):
        evicted = _evicted(checkpoint, begin_ns(request))
        if evicted is not None and _is_deeper(checkpoint, request):
            return evicted
    if limit == "prompt_end" and not _goes_beyond(request, previous):
        return _LIMITS[limit]
    if _resumed_from(request, previous):
        return (
            f"the turn before left its checkpoint at {request['source_boundary']}; "
            "what came after it was not kept"
        )
    if previous["no_checkpoint_reason"] is not None:
        return f"the turn before left no checkpoint: {previous['no_checkpoint_reason']}"
    return _LIMITS.get(limit or "")


def _left_aside(request: Row, previous: Row | None, before: list[Row]) -> Row | None:
    """Of the checkpoints of the turn before, the shallowest that would have served
    ``request`` deeper and was still there when it was admitted: the two texts part
    before its boundary, so that less than counted was computed again."""
    if (
        previous is None
        or previous["engine_id"] != request["engine_id"]
        or request["hit_limited_by"] in _NOT_LOOKED_FOR
    ):
        return None
    there = [
        checkpoint
        for checkpoint in before
        if _is_deeper(checkpoint, request) and _was_there(checkpoint, request)
    ]
    return min(there, key=lambda checkpoint: checkpoint["boundary"], default=None)


def _goes_beyond(request: Row, previous: Row) -> bool:
    """Whether the prompt is longer than the turn before's; the same one, sent again,
    needs no checkpoint of its answer."""
    return (request["num_prompt_tokens"] or 0) > (previous["num_prompt_tokens"] or 0)


def _resumed_from(request: Row, previous: Row) -> bool:
    """Whether it resumed from a checkpoint of ``previous``, not from what stock vLLM
    keeps of its prompt."""
    return (
        request["source_request_id"] == previous["request_id"]
        and request["source_checkpoint_id"] is not None
    )


def _is_deeper(checkpoint: Row, request: Row) -> bool:
    """Whether it would have served ``request`` deeper, were the text the same. The
    last token of a prompt is always computed."""
    served = (request["num_cached_tokens"] or 0) + (request["num_external_tokens"] or 0)
    end = request["num_prompt_tokens"] or 0
    return (
        checkpoint["published_ns"] is not None and served < checkpoint["boundary"] < end
    )


def _was_there(checkpoint: Row, request: Row) -> bool:
    """Published before ``request`` arrived, with all under it until it was admitted."""
    arrival_ns = begin_ns(request)
    admitted_ns = request["admitted_ns"] or arrival_ns
    gone = (checkpoint["evicted_ns"], checkpoint["attention_evicted_ns"])
    return checkpoint["published_ns"] < arrival_ns and all(
        at is None or at > admitted_ns for at in gone
    )


def _evicted(checkpoint: Row, arrival_ns: int) -> str | None:
    """What of it was evicted before ``arrival_ns``, in words."""
    name = f"the turn before's checkpoint at {checkpoint['boundary']}"
    if (checkpoint["evicted_ns"] or arrival_ns) < arrival_ns:
        reason = checkpoint["eviction_reason"]
        return f"{name} was evicted ({reason}) before this turn came"
    if (checkpoint["attention_evicted_ns"] or arrival_ns) < arrival_ns:
        return f"attention blocks under {name} were evicted before this turn came"
    return None
