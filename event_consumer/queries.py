"""What an operator asks the store. Each answer is made of plain values, ready for
JSON: the command line prints it, tests compare it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    func,
    or_,
    select,
    tuple_,
)

from event_consumer import tables
from event_consumer.records import DISCONNECTED, GAP_OPEN, LIVE, LOST
from event_consumer.request_ids import external_ids
from event_consumer.store import Store

requests = tables.requests
checkpoints = tables.checkpoints

DEFAULT_LIMIT: Final = 100
SILENT_NS: Final = 10_000_000_000
"""A stream that no consumer has written for so long has no consumer."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which requests. None: any.

    ``request``: core or external request id (of a completion also without its prompt's
    number), or trace id. ``session``: session or
    conversation id. ``stage``, ``reason``, ``kind``: of any of its checkpoints;
    ``reason`` also why it left none, or why one was evicted. ``max_hits``: of a
    checkpoint of that stage. Depths, prefilled and recomputed in tokens: reuse
    depth, prompt tokens not reused, and those of them that attention alone had
    cached. ``since_ns``: last event at or after.
    """

    request: str | None = None
    session: str | None = None
    engine: str | None = None
    label: str | None = None
    status: str | None = None
    stage: str | None = None
    reason: str | None = None
    kind: str | None = None
    limited_by: str | None = None
    source: str | None = None
    max_hits: int | None = None
    min_depth: int | None = None
    max_depth: int | None = None
    min_prefilled: int | None = None
    min_recomputed: int | None = None
    incomplete: bool | None = None
    since_ns: int | None = None
    limit: int = DEFAULT_LIMIT

    def condition(self) -> ColumnElement[bool]:
        """On a row of ``requests``."""
        wanted: list[ColumnElement[bool]] = []
        equals = {
            requests.c.engine_id: self.engine,
            requests.c.label: self.label,
            requests.c.status: self.status,
            requests.c.hit_limited_by: self.limited_by,
            requests.c.source_kind: self.source,
            requests.c.incomplete: self.incomplete,
        }
        wanted += [column == v for column, v in equals.items() if v is not None]
        cached = requests.c.num_cached_tokens
        served = cached + func.coalesce(requests.c.num_external_tokens, 0)
        prefilled = requests.c.num_prompt_tokens - served
        recomputed = requests.c.shared_prefix_boundary - cached
        at_least = [
            (cached, self.min_depth),
            (prefilled, self.min_prefilled),
            (recomputed, self.min_recomputed),
            (requests.c.last_event_ns, self.since_ns),
        ]
        wanted += [column >= v for column, v in at_least if v is not None]
        if self.max_depth is not None:
            wanted.append(cached <= self.max_depth)
        if self.request is not None:
            external = requests.c.external_request_id
            wanted.append(
                or_(
                    requests.c.request_id == self.request,
                    external.in_(external_ids(self.request)),
                    requests.c.trace_id == self.request,
                )
            )
        if self.session is not None:
            wanted.append(
                or_(
                    requests.c.session_id == self.session,
                    requests.c.conversation_id == self.session,
                )
            )
        of_checkpoint = self.checkpoint_condition()
        if of_checkpoint is not None:
            has_one = has_checkpoint(of_checkpoint)
            left_none = requests.c.no_checkpoint_reason == self.reason
            alone = (self.stage, self.kind, self.max_hits) == (None, None, None)
            wanted.append(or_(has_one, left_none) if alone else has_one)
        return and_(True, *wanted)

    def checkpoint_condition(self) -> ColumnElement[bool] | None:
        """On a row of ``checkpoints``; None where it may be any."""
        wanted: list[ColumnElement[bool]] = []
        if self.stage is not None:
            wanted.append(checkpoints.c.stage == self.stage)
        if self.kind is not None:
            wanted.append(checkpoints.c.boundary_kind == self.kind)
        if self.max_hits is not None:
            wanted.append(checkpoints.c.num_hits <= self.max_hits)
        if self.reason is not None:
            wanted.append(
                or_(
                    checkpoints.c.discard_reason == self.reason,
                    checkpoints.c.eviction_reason == self.reason,
                )
            )
        return and_(*wanted) if wanted else None


def has_checkpoint(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """On a row of ``requests``: one of its checkpoints meets ``condition``.

    By the list of those that do: for a correlated EXISTS, SQLite would walk the
    checkpoints of one stage again for each request.
    """
    key = tuple_(requests.c.engine_id, requests.c.request_id)
    return key.in_(
        select(checkpoints.c.engine_id, checkpoints.c.request_id).where(condition)
    )


def find_requests(store: Store, which: Filter) -> list[Row]:
    """Requests, the latest first: the columns of the table, and ``checkpoints``,
    those of theirs, in the order of their boundaries."""
    with store.reading() as connection:
        return _requests(connection, which.condition(), which.limit)


def find_conversations(store: Store, which: Filter) -> list[Row]:
    """Conversations, the latest first, each with its turns in order.

    ``limit`` counts conversations; the filter chooses those that have such a
    request. ``hit_rate`` is the fraction of prompt tokens that were reused.
    """
    last = func.max(requests.c.last_event_ns)
    with store.reading() as connection:
        latest = connection.execute(
            select(requests.c.conversation_id)
            .where(which.condition(), requests.c.conversation_id.is_not(None))
            .group_by(requests.c.conversation_id)
            .order_by(last.desc())
            .limit(which.limit)
        )
        ids = list(latest.scalars())
        turns = _requests(connection, requests.c.conversation_id.in_(ids), None)
    by_id: dict[str, list[Row]] = defaultdict(list)
    for turn in sorted(turns, key=begin_ns):
        by_id[turn["conversation_id"]].append(turn)
    return [_conversation(one, by_id[one]) for one in ids]


def health(store: Store) -> Row:
    """How the streams are, and everything that was lost.

    ``status``, the first that holds: ``gapped`` (a gap is open), ``lossy`` (something
    was lost), ``empty`` (no stream yet), ``disconnected`` (a stream has no connection,
    or no consumer), ``replaying`` (one is catching up), ``ok`` (each is whole);
    ``healthy`` is false where a gap is open, and only there.
    """
    gaps, streams = tables.gaps, tables.streams
    with store.reading() as connection:
        all_streams = _rows(connection, streams, order=streams.c.endpoint)
        not_whole = _rows(
            connection,
            gaps,
            gaps.c.status.in_((GAP_OPEN, LOST)),
            order=gaps.c.detected_ns.desc(),
            limit=1000,
        )
        engines = _rows(connection, tables.engines, order=tables.engines.c.started_ns)
        num_incomplete = connection.scalar(
            select(func.count()).where(requests.c.incomplete.is_(True))
        )
    now_ns = time.time_ns()
    for stream in all_streams:
        written = stream["updated_ns"]
        stream["consumed"] = written is not None and now_ns - written < SILENT_NS
    num_open = sum(gap["status"] == GAP_OPEN for gap in not_whole)
    num_lost = sum(stream["num_lost"] for stream in all_streams)
    num_dropped = sum(stream["num_dropped"] for stream in all_streams)
    read = [stream["state"] for stream in all_streams if stream["consumed"]]
    num_connected = sum(state != DISCONNECTED for state in read)
    num_live = sum(state == LIVE for state in read)
    status = "ok"
    if num_open:
        status = "gapped"
    elif num_lost or num_dropped:
        status = "lossy"
    elif not all_streams:
        status = "empty"
    elif num_connected < len(all_streams):
        status = "disconnected"
    elif num_live < len(all_streams):
        status = "replaying"
    return {
        "status": status,
        "healthy": not num_open,
        "num_connected": num_connected,
        "num_live": num_live,
        "num_open_gaps": num_open,
        "num_lost_batches": num_lost,
        "num_dropped_events": num_dropped,
        "num_incomplete_requests": num_incomplete,
        "streams": all_streams,
        "gaps": not_whole,
        "engines": engines,
    }


def _rows(
    connection: Connection,
    table: Table,
    *conditions: ColumnElement[bool],
    order: Any = None,
    limit: int | None = None,
) -> list[Row]:
    statement = select(table).where(*conditions).order_by(order).limit(limit)
    return [dict(row) for row in connection.execute(statement).mappings()]


def _requests(
    connection: Connection, condition: ColumnElement[bool], limit: int | None
) -> list[Row]:
    found = _rows(
        connection,
        requests,
        condition,
        order=requests.c.last_event_ns.desc(),
        limit=limit,
    )
    by_request: dict[tuple[str, str], list[Row]] = {
        (row["engine_id"], row["request_id"]): row.setdefault("checkpoints", [])
        for row in found
    }
    key = tuple_(checkpoints.c.engine_id, checkpoints.c.request_id)
    keys = list(by_request)
    # SQLite takes some 32,000 parameters a statement.
    for start in range(0, len(keys), 10_000):
        chunk = key.in_(keys[start : start + 10_000])
        for row in _rows(
            connection, checkpoints, chunk, order=checkpoints.c.checkpoint_id
        ):
            by_request[row["engine_id"], row["request_id"]].append(row)
    return found


def begin_ns(request: Row) -> int:
    """When a request began, as far as is known."""
    return request["arrival_ns"] or request["admitted_ns"] or request["last_event_ns"]


def _conversation(conversation_id: str, turns: list[Row]) -> Row:
    prompt = sum(turn["num_prompt_tokens"] or 0 for turn in turns)
    cached = sum(turn["num_cached_tokens"] or 0 for turn in turns)
    return {
        "conversation_id": conversation_id,
        "session_id": turns[0]["session_id"],
        "labels": sorted({turn["label"] for turn in turns}),
        "first_ns": begin_ns(turns[0]),
        "last_ns": max(turn["last_event_ns"] for turn in turns),
        "num_requests": len(turns),
        "num_prompt_tokens": prompt,
        "num_cached_tokens": cached,
        "hit_rate": cached / prompt if prompt else None,
        "requests": turns,
    }
