"""The questions one asks of the traces, answered from the store.

One :class:`Trace` a request, as ``kv_cache.request`` and its children tell it, plus
what only the store can know: the turn before it in its conversation, and what befell
its checkpoints later. SQLAlchemy Core, for SQLite and PostgreSQL; filters, order and
limit run in the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from event_consumer.records import EVICTED
from event_consumer.tables import checkpoints, requests

ORDERS: Final = ("newest", "oldest", "reprefilled", "prefilled", "reuse")
DEFAULT_LIMIT: Final = 50


@dataclass(frozen=True, kw_only=True)
class TraceFilter:
    """Which requests; every condition that is given must hold. Tokens are counts of
    prompt tokens, times nanoseconds since the epoch, ranges half-open.

    ``request``: the client's id or the engine core's. ``session``: the session id,
    or the conversation id where no session was given. ``stage``: has a checkpoint
    in that stage now. ``reason``: a checkpoint was discarded or evicted for it, or
    it is why the request left none. ``min_prefilled``: computed at admission.
    ``min_reprefilled``: of those, tokens that the turn before had computed already.
    ``min_recomputed``: of those, tokens whose attention was still cached.
    ``evicted_before_use``: has a checkpoint that was evicted before any request
    resumed from it. ``source``: what it resumed from (a source kind);
    ``resumed_from``: the request that left it.
    """

    request: str | None = None
    session: str | None = None
    trace_id: str | None = None
    engine: str | None = None
    label: str | None = None
    model: str | None = None
    status: str | None = None
    stage: str | None = None
    reason: str | None = None
    hit_limited_by: str | None = None
    source: str | None = None
    resumed_from: str | None = None
    min_reuse: int | None = None
    max_reuse: int | None = None
    min_prefilled: int | None = None
    min_reprefilled: int | None = None
    min_recomputed: int | None = None
    min_preemptions: int | None = None
    no_checkpoint: bool = False
    evicted_before_use: bool = False
    incomplete: bool = False
    since_ns: int | None = None
    until_ns: int | None = None


@dataclass(frozen=True)
class Trace:
    """A request and its checkpoints, as columns of the store, and what follows from
    them. ``previous`` is the turn before it in its conversation; ``why`` says in
    words why it had to compute what it computed again, None where it had not."""

    request: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    previous: dict[str, Any] | None
    prefilled_tokens: int | None
    reprefilled_tokens: int | None
    recomputed_tokens: int | None
    why: str | None


def find_traces(
    connection: Connection,
    where: TraceFilter,
    *,
    order: str = "newest",
    limit: int = DEFAULT_LIMIT,
) -> list[Trace]:
    """The first ``limit`` traces in ``order`` (one of :data:`ORDERS`)."""
    statement = (
        select(
            requests,
            _PREFILLED.label("prefilled_tokens"),
            _REPREFILLED.label("reprefilled_tokens"),
            _RECOMPUTED.label("recomputed_tokens"),
            _previous(_PREVIOUS.c.engine_id).label("previous_engine_id"),
            _previous(_PREVIOUS.c.request_id).label("previous_request_id"),
        )
        .where(*_conditions(where))
        .order_by(*_ORDER_BY[order], requests.c.request_id)
        .limit(limit)
    )
    rows = connection.execute(statement).all()
    of_request = _checkpoints_of(connection, [_key(row) for row in rows])
    previous = _requests_of(connection, [_previous_key(row) for row in rows])
    before = _checkpoints_of(connection, list(previous))
    return [
        _trace(
            row,
            of_request.get(_key(row), []),
            previous.get(_previous_key(row)),
            before.get(_previous_key(row), []),
        )
        for row in rows
    ]


def count_traces(connection: Connection, where: TraceFilter) -> int:
    """How many requests match, whatever a limit would show of them."""
    statement = select(func.count()).select_from(requests).where(*_conditions(where))
    return connection.scalar(statement) or 0


def count_by(
    connection: Connection, column: str, where: TraceFilter
) -> list[tuple[str | None, int]]:
    """Matching requests by the value of a column of theirs, most frequent first."""
    group = requests.c[column]
    number = func.count().label("number")
    statement = (
        select(group, number)
        .where(*_conditions(where))
        .group_by(group)
        .order_by(number.desc(), group)
    )
    return [(value, count) for value, count in connection.execute(statement)]


# What is computed, in SQL.

_CACHED: Final = func.coalesce(requests.c.num_cached_tokens, 0) + func.coalesce(
    requests.c.num_external_tokens, 0
)


def _at_least_zero(value: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((value > 0, value), else_=literal(0))


_PREVIOUS: Final = requests.alias("previous")


def _previous(column: ColumnElement[Any]) -> Any:
    """``column`` of the turn before, of the same label: an A/B pair of engines may
    play the same conversation."""
    return (
        select(column)
        .where(
            _PREVIOUS.c.conversation_id == requests.c.conversation_id,
            _PREVIOUS.c.label == requests.c.label,
            _PREVIOUS.c.arrival_ns < requests.c.arrival_ns,
        )
        .order_by(_PREVIOUS.c.arrival_ns.desc())
        .limit(1)
        .correlate(requests)
        .scalar_subquery()
    )


_PREFILLED: Final = _at_least_zero(requests.c.num_prompt_tokens - _CACHED)
_KNOWN_BEFORE: Final = _previous(
    _PREVIOUS.c.num_prompt_tokens + func.coalesce(_PREVIOUS.c.num_output_tokens, 0)
)
_REPREFILLED: Final = _at_least_zero(
    func.coalesce(
        case(
            (requests.c.num_prompt_tokens > _KNOWN_BEFORE, _KNOWN_BEFORE),
            else_=case(
                (_KNOWN_BEFORE.is_(None), literal(0)),
                else_=requests.c.num_prompt_tokens,
            ),
        ),
        0,
    )
    - _CACHED
)
_RECOMPUTED: Final = _at_least_zero(
    func.coalesce(requests.c.shared_prefix_boundary, 0)
    - func.coalesce(requests.c.num_cached_tokens, 0)
)

_ORDER_BY: Final[dict[str, tuple[Any, ...]]] = {
    "newest": (requests.c.last_event_ns.desc(),),
    "oldest": (requests.c.last_event_ns,),
    "reprefilled": (_REPREFILLED.desc(), requests.c.last_event_ns.desc()),
    "prefilled": (_PREFILLED.desc(), requests.c.last_event_ns.desc()),
    "reuse": (
        func.coalesce(requests.c.num_cached_tokens, 0).desc(),
        requests.c.last_event_ns.desc(),
    ),
}


def _conditions(where: TraceFilter) -> list[ColumnElement[bool]]:
    given = {
        field.name: value
        for field in fields(where)
        if (value := getattr(where, field.name)) is not None and value is not False
    }
    return [_CONDITIONS[name](value) for name, value in given.items()]


def _has_checkpoint(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(
        checkpoints.c.engine_id == requests.c.engine_id,
        checkpoints.c.request_id == requests.c.request_id,
        *conditions,
    )


_CONDITIONS: Final[dict[str, Any]] = {
    "request": lambda v: or_(
        requests.c.request_id == v, requests.c.external_request_id == v
    ),
    "session": lambda v: or_(
        requests.c.session_id == v, requests.c.conversation_id == v
    ),
    "trace_id": lambda v: requests.c.trace_id == v,
    "engine": lambda v: requests.c.engine_id == v,
    "label": lambda v: requests.c.label == v,
    "model": lambda v: requests.c.model_name == v,
    "status": lambda v: requests.c.status == v,
    "stage": lambda v: _has_checkpoint(checkpoints.c.stage == v),
    "reason": lambda v: or_(
        requests.c.no_checkpoint_reason == v,
        _has_checkpoint(
            or_(checkpoints.c.discard_reason == v, checkpoints.c.eviction_reason == v)
        ),
    ),
    "hit_limited_by": lambda v: requests.c.hit_limited_by == v,
    "source": lambda v: requests.c.source_kind == v,
    "resumed_from": lambda v: or_(
        requests.c.source_request_id == v, requests.c.source_external_request_id == v
    ),
    "min_reuse": lambda v: requests.c.num_cached_tokens >= v,
    "max_reuse": lambda v: requests.c.num_cached_tokens < v,
    "min_prefilled": lambda v: v <= _PREFILLED,
    "min_reprefilled": lambda v: v <= _REPREFILLED,
    "min_recomputed": lambda v: v <= _RECOMPUTED,
    "min_preemptions": lambda v: requests.c.num_preemptions >= v,
    "no_checkpoint": lambda v: requests.c.no_checkpoint_reason.is_not(None),
    "evicted_before_use": lambda v: _has_checkpoint(
        checkpoints.c.stage == EVICTED, checkpoints.c.num_hits == 0
    ),
    "incomplete": lambda v: requests.c.incomplete.is_(True),
    "since_ns": lambda v: requests.c.last_event_ns >= v,
    "until_ns": lambda v: requests.c.last_event_ns < v,
}


# Reading rows.

_Key = tuple[str, str]


def _key(row: Any) -> _Key:
    return row.engine_id, row.request_id


def _previous_key(row: Any) -> _Key:
    return row.previous_engine_id or "", row.previous_request_id or ""


def _requests_of(
    connection: Connection, keys: Sequence[_Key]
) -> dict[_Key, dict[str, Any]]:
    known = [key for key in keys if all(key)]
    if not known:
        return {}
    key = tuple_(requests.c.engine_id, requests.c.request_id)
    rows = connection.execute(select(requests).where(key.in_(known)))
    return {_key(row): dict(row._mapping) for row in rows}


def _checkpoints_of(
    connection: Connection, keys: Sequence[_Key]
) -> dict[_Key, list[dict[str, Any]]]:
    found: dict[_Key, list[dict[str, Any]]] = {}
    if keys:
        key = tuple_(checkpoints.c.engine_id, checkpoints.c.request_id)
        statement = select(checkpoints).where(key.in_(keys))
        for row in connection.execute(statement.order_by(checkpoints.c.checkpoint_id)):
            found.setdefault(_key(row), []).append(dict(row._mapping))
    return found


def _trace(
    row: Row[Any],
    own: list[dict[str, Any]],
    previous: dict[str, Any] | None,
    before: Iterable[dict[str, Any]],
) -> Trace:
    request = {name: row._mapping[name] for name in requests.c.keys()}  # noqa: SIM118
    return Trace(
        request=request,
        checkpoints=own,
        previous=previous,
        prefilled_tokens=row.prefilled_tokens,
        reprefilled_tokens=row.reprefilled_tokens,
        recomputed_tokens=row.recomputed_tokens,
        why=_why(request, row.reprefilled_tokens, previous, list(before)),
    )


_LIMITS: Final = {
    "prompt_end": "everything that could be reused was",
    "recurrent_state": "attention was cached deeper than the recurrent state",
    "attention": "the attention blocks were cached no deeper",
    "skipped": "the request did not read the prefix cache",
    "connector": "a KV connector served the rest",
}


def _why(
    request: dict[str, Any],
    reprefilled: int | None,
    previous: dict[str, Any] | None,
    before: list[dict[str, Any]],
) -> str | None:
    """Why tokens of the turn before were computed again, in words."""
    if not reprefilled or previous is None:
        return None
    if previous["engine_id"] != request["engine_id"]:
        return "the turn before ran on another engine"
    if previous["no_checkpoint_reason"] is not None:
        return f"the turn before left no checkpoint: {previous['no_checkpoint_reason']}"
    arrival_ns = request["arrival_ns"] or 0
    gone = [
        checkpoint
        for checkpoint in before
        if (checkpoint["evicted_ns"] or arrival_ns) < arrival_ns
    ]
    if gone and request["source_request_id"] != previous["request_id"]:
        return (
            f"the turn before's checkpoint at {gone[-1]['boundary']} was evicted "
            f"({gone[-1]['eviction_reason']}) before this turn came"
        )
    if request["source_request_id"] == previous["request_id"]:
        return (
            f"the turn before left its checkpoint at {request['source_boundary']}; "
            "what followed it was not kept"
        )
    return _LIMITS.get(request["hit_limited_by"] or "")
