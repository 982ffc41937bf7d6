"""Every query of the dashboard: the only module that reads the store.

Each query is bounded by a limit or an index, and filters, sorts and aggregates
in SQL. Times are nanoseconds since the Unix epoch, counts are tokens unless said
otherwise. Everything raises :class:`ui.connection.StoreError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Executable,
    and_,
    case,
    func,
    literal,
    or_,
    select,
)

from event_consumer import tables
from event_consumer.request_ids import external_ids
from ui.connection import StoreConnection

requests, checkpoints, engines = tables.requests, tables.checkpoints, tables.engines
streams, gaps = tables.streams, tables.gaps

Row = dict[str, Any]

COUNT_LIMIT: Final = 10_000
"""A count of matches stops here: “10,000+” is as good an answer as 1,284,311."""
DOWNLOAD_LIMIT: Final = 50_000
CONVERSATION_SCAN: Final = 5_000
DEPTH_EDGES: Final = (0, 1, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Bins of the reuse depth, in tokens: nothing reused, then powers of two."""
RETAINED: Final = "retained"
"""The outcome that is no reason code: the request published a checkpoint."""

_RECOMPUTED = requests.c.num_prompt_tokens - func.coalesce(
    requests.c.num_cached_tokens, 0
)

SORTS: Final[dict[str, ColumnElement[Any]]] = {
    "newest": requests.c.last_event_ns.desc(),
    "oldest": requests.c.last_event_ns.asc(),
    "recomputed": _RECOMPUTED.desc().nulls_last(),
    "reused": requests.c.num_cached_tokens.desc().nulls_last(),
    "prompt": requests.c.num_prompt_tokens.desc().nulls_last(),
}


_CHOICES: Final = (
    "labels",
    "engine_ids",
    "models",
    "statuses",
    "outcomes",
    "limits",
    "finish_reasons",
)


@dataclass(frozen=True)
class RequestFilter:
    """Which requests: an empty field does not filter.

    ``text`` is part of a request, session or conversation id. ``since_ns`` and
    ``until_ns`` bound the time of a request's last event, half-open.
    ``outcomes`` are :data:`RETAINED` or no-checkpoint reasons.
    """

    text: str = ""
    labels: Sequence[str] = ()
    engine_ids: Sequence[str] = ()
    models: Sequence[str] = ()
    statuses: Sequence[str] = ()
    outcomes: Sequence[str] = ()
    limits: Sequence[str] = ()
    finish_reasons: Sequence[str] = ()
    conversation_id: str | None = None
    min_recomputed: int = 0
    only_incomplete: bool = False
    since_ns: int | None = None
    until_ns: int | None = None
    conditions: list[ColumnElement[bool]] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name in _CHOICES:  # tuples: a filter can be a key
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "conditions", list(self._conditions()))

    def _conditions(self):
        c = requests.c
        if self.since_ns is not None:
            yield c.last_event_ns >= self.since_ns
        if self.until_ns is not None:
            yield c.last_event_ns < self.until_ns
        for column, wanted in (
            (c.label, self.labels),
            (c.engine_id, self.engine_ids),
            (c.model_name, self.models),
            (c.status, self.statuses),
            (c.hit_limited_by, self.limits),
            (c.finish_reason, self.finish_reasons),
        ):
            if wanted:
                yield column.in_(list(wanted))
        if self.outcomes:
            reasons = [o for o in self.outcomes if o != RETAINED]
            parts = [c.no_checkpoint_reason.in_(reasons)] if reasons else []
            if RETAINED in self.outcomes:
                parts.append(c.retained_boundary.is_not(None))
            yield or_(*parts)
        if self.conversation_id is not None:
            yield c.conversation_id == self.conversation_id
        if self.min_recomputed > 0:
            yield self.min_recomputed <= _RECOMPUTED
        if self.only_incomplete:
            yield c.incomplete.is_(True)
        if text := self.text.strip():
            # The core's id begins with the external one, and the conversation's is
            # the session's where there is one: two columns cover four ids.
            yield or_(
                c.request_id.contains(text, autoescape=True),
                c.conversation_id.contains(text, autoescape=True),
            )


@dataclass(frozen=True)
class Breakdown:
    """Sums over requests, by status, outcome and bin of the reuse depth.

    Each cell has ``status``, ``outcome`` (:data:`RETAINED`, a reason, or None),
    ``bin`` (index into :data:`DEPTH_EDGES`, None where never admitted),
    ``num_requests``, and ``prompt`` (of admitted requests), ``cached`` and
    ``output`` in tokens.
    """

    cells: list[Row]

    def total(self, what: str) -> int:
        """The sum of one of the counted fields over everything."""
        return sum(int(cell[what]) for cell in self.cells)

    def outcomes(self) -> list[tuple[str | None, int]]:
        """Ended requests by outcome, the most frequent first."""
        counts = self._by("outcome", [c for c in self.cells if c["status"] != "open"])
        return sorted(counts.items(), key=lambda item: -item[1])

    def depths(self) -> list[int]:
        """Admitted requests by bin of the reuse depth."""
        counts = self._by("bin", self.cells)
        return [counts.get(index, 0) for index in range(len(DEPTH_EDGES))]

    def by_status(self, status: str) -> int:
        """Requests of one status."""
        return self._by("status", self.cells).get(status, 0)

    @staticmethod
    def _by(name: str, cells: list[Row]) -> dict[Any, int]:
        counts: dict[Any, int] = {}
        for cell in cells:
            counts[cell[name]] = counts.get(cell[name], 0) + int(cell["num_requests"])
        return counts


class Queries:
    """The questions that the pages ask of one store."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def _all(self, statement: Executable) -> list[Row]:
        with self._store.read() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def _one(self, statement: Executable) -> Row | None:
        rows = self._all(statement)
        return rows[0] if rows else None

    # -- requests ---------------------------------------------------------

    def find_requests(
        self,
        wanted: RequestFilter,
        *,
        sort: str = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Row]:
        """Rows of ``requests`` that match, at most ``limit`` of them."""
        statement = select(requests).where(*wanted.conditions)
        order: tuple[ColumnElement[Any], ...] = (SORTS[sort], requests.c.request_id)
        if wanted.text and sort == "newest":
            # Text is found by a scan: walking the index of times instead, row by
            # row, costs four times as much where little matches.
            order = ((requests.c.last_event_ns + 0).desc(), requests.c.request_id)
        return self._all(statement.order_by(*order).limit(limit).offset(offset))

    def count_requests(self, wanted: RequestFilter) -> int:
        """How many match: exact up to :data:`COUNT_LIMIT`, one more beyond."""
        some = select(literal(1)).select_from(requests).where(*wanted.conditions)
        some = some.limit(COUNT_LIMIT + 1)
        row = self._one(select(func.count().label("n")).select_from(some.subquery()))
        return int(row["n"]) if row else 0

    def requests_by_id(self, request_id: str, limit: int = 20) -> list[Row]:
        """Requests whose external or core id is ``request_id``, newest first; of a
        completion also without its prompt's number.

        Several, where two engines served a request of one id.
        """
        c = requests.c
        newest = c.last_event_ns.desc()
        external = request_id.rpartition("-")[0] or request_id
        by_index = or_(
            c.external_request_id.in_(external_ids(request_id)),
            and_(c.external_request_id == external, c.request_id == request_id),
        )
        found = self._all(
            select(requests).where(by_index).order_by(newest).limit(limit)
        )
        if found:
            return found
        by_core_id = and_(
            c.engine_id.in_(select(engines.c.engine_id)), c.request_id == request_id
        )
        return self._all(
            select(requests).where(by_core_id).order_by(newest).limit(limit)
        )

    def checkpoints_of(self, request: Row, limit: int = 500) -> list[Row]:
        """The checkpoints of a request, the deepest boundary first."""
        c = checkpoints.c
        statement = select(checkpoints).where(
            c.engine_id == request["engine_id"], c.request_id == request["request_id"]
        )
        return self._all(
            statement.order_by(c.boundary.desc(), c.checkpoint_id.desc()).limit(limit)
        )

    def count_checkpoints_of(self, request: Row) -> int:
        """How many checkpoints a request made."""
        c = checkpoints.c
        row = self._one(
            select(func.count().label("n")).where(
                c.engine_id == request["engine_id"],
                c.request_id == request["request_id"],
            )
        )
        return int(row["n"]) if row else 0

    def source_of(self, request: Row) -> Row | None:
        """The request whose checkpoint ``request`` resumed from, where known."""
        if not request["source_request_id"]:
            return None
        c = requests.c
        return self._one(
            select(requests).where(
                c.engine_id == request["engine_id"],
                c.request_id == request["source_request_id"],
            )
        )

    def reusers_of(self, request: Row, limit: int = 50) -> list[Row]:
        """The requests that resumed from a checkpoint of ``request``, oldest first."""
        c = requests.c
        statement = select(requests).where(
            c.engine_id == request["engine_id"],
            c.source_request_id == request["request_id"],
        )
        return self._all(statement.order_by(c.last_event_ns).limit(limit))

    def engine(self, engine_id: str) -> Row | None:
        """One engine's row."""
        return self._one(select(engines).where(engines.c.engine_id == engine_id))

    # -- what there is ----------------------------------------------------

    def engines(self, limit: int = 500) -> list[Row]:
        """Engine epochs, the newest first."""
        newest = engines.c.started_ns.desc().nulls_last()
        return self._all(select(engines).order_by(newest).limit(limit))

    def newest_event_ns(self) -> int | None:
        """When the newest event of any request happened, by the engine's clock."""
        row = self._one(select(func.max(requests.c.last_event_ns).label("at")))
        return row["at"] if row else None

    def count_events_since(self, at_ns: int) -> int:
        """Requests that changed after ``at_ns`` (up to :data:`COUNT_LIMIT`)."""
        return self.count_requests(RequestFilter(since_ns=at_ns + 1))

    def streams(self, limit: int = 500) -> list[Row]:
        """One row an endpoint, with the label and the status of its engine."""
        statement = (
            select(
                streams,
                engines.c.label,
                engines.c.status.label("engine_status"),
                engines.c.model_name,
            )
            .outerjoin(engines, engines.c.engine_id == streams.c.engine_id)
            .order_by(streams.c.endpoint)
        )
        return self._all(statement.limit(limit))

    def gaps(self, limit: int = 200) -> list[Row]:
        """Ranges of batches that did not come by themselves, the newest first."""
        newest = gaps.c.detected_ns.desc()
        return self._all(select(gaps).order_by(newest).limit(limit))

    # -- overview ---------------------------------------------------------

    def oldest_event_ns(self) -> int | None:
        """When the oldest request in the store had its last event."""
        row = self._one(select(func.min(requests.c.last_event_ns).label("at")))
        return row["at"] if row else None

    def breakdown(self, wanted: RequestFilter) -> Breakdown:
        """Sums over the matching requests, by what they reused and left: one scan."""
        c = requests.c
        outcome = case(
            (c.retained_boundary.is_not(None), literal(RETAINED)),
            else_=c.no_checkpoint_reason,
        )
        depth = c.num_cached_tokens
        edges = list(enumerate(DEPTH_EDGES))
        bins = case(
            *((depth >= edge, literal(index)) for index, edge in reversed(edges))
        )
        rows = (
            select(
                c.status,
                outcome.label("outcome"),
                bins.label("bin"),
                case((depth.is_not(None), c.num_prompt_tokens)).label("prompt"),
                depth.label("cached"),
                c.num_output_tokens.label("output"),
            )
            .where(*wanted.conditions)
            .subquery()
            .c
        )
        statement = select(
            rows.status,
            rows.outcome,
            rows.bin,
            func.count().label("num_requests"),
            *(
                func.coalesce(func.sum(column), 0).label(column.name)
                for column in (rows.prompt, rows.cached, rows.output)
            ),
        )
        return Breakdown(
            self._all(statement.group_by(rows.status, rows.outcome, rows.bin))
        )

    def tokens_over_time(
        self, wanted: RequestFilter, start_ns: int, width_ns: int
    ) -> list[Row]:
        """``bucket``, ``num_requests``, ``prompt``, ``cached`` by time of last event.

        Bucket ``i`` is ``[start_ns + i * width_ns, start_ns + (i + 1) * width_ns)``;
        empty ones are absent.
        """
        c = requests.c
        rows = (
            select(
                ((c.last_event_ns - start_ns) // width_ns).label("bucket"),
                c.num_prompt_tokens,
                c.num_cached_tokens,
            )
            .where(*wanted.conditions, c.num_cached_tokens.is_not(None))
            .subquery()
            .c
        )
        statement = (
            select(
                rows.bucket,
                func.count().label("num_requests"),
                func.sum(rows.num_prompt_tokens).label("prompt"),
                func.sum(rows.num_cached_tokens).label("cached"),
            )
            .group_by(rows.bucket)
            .order_by(rows.bucket)
        )
        return self._all(statement)

    def pinned_over_time(
        self,
        start_ns: int,
        width_ns: int,
        num_buckets: int,
        *,
        everything: bool,
        labels: Sequence[str] = (),
    ) -> list[int]:
        """Blocks that pins held at the end of each of ``num_buckets`` buckets.

        A pin holds its blocks from ``pinned`` to ``published`` or ``discarded``;
        that of a lost engine until its last event. ``everything``: no event in the
        store is older than ``start_ns`` (a scan is then faster than the index).
        ``labels``: of engines with one of these, none for all.
        """
        c = checkpoints.c
        released = func.coalesce(
            c.published_ns,
            c.discarded_ns,
            case((c.stage == "gone", c.last_event_ns)),
        )
        # Released before the range began, yet with an event in it (an eviction):
        # bucket -1 on both sides, which changes nothing.
        pins = (
            select(
                func.coalesce(c.num_blocks, 1).label("blocks"),
                *(
                    case((at < start_ns, -1), else_=(at - start_ns) // width_ns).label(
                        name
                    )
                    for name, at in (("pinned", c.pinned_ns), ("released", released))
                ),
            )
            .where(
                *(() if everything else (c.last_event_ns >= start_ns,)),
                *_of_engines(labels),
                c.pinned_ns.is_not(None),
            )
            .subquery()
            .c
        )
        statement = (
            select(pins.pinned, pins.released, func.sum(pins.blocks).label("blocks"))
            .where(pins.pinned.is_distinct_from(pins.released))
            .group_by(pins.pinned, pins.released)
        )
        changes: dict[int, int] = {}
        for row in self._all(statement):
            blocks = int(row["blocks"])
            changes[row["pinned"]] = changes.get(row["pinned"], 0) + blocks
            if row["released"] is not None:
                changes[row["released"]] = changes.get(row["released"], 0) - blocks
        level = changes.get(-1, 0)
        levels = []
        for index in range(num_buckets):
            level += changes.get(index, 0)
            levels.append(level)
        return levels

    def pinned_now(self, labels: Sequence[str] = ()) -> Row:
        """``checkpoints`` and ``blocks`` that pins hold at this moment, in engines with
        one of ``labels`` (none for all)."""
        c = checkpoints.c
        row = self._one(
            select(
                func.count().label("checkpoints"),
                func.coalesce(func.sum(func.coalesce(c.num_blocks, 1)), 0).label(
                    "blocks"
                ),
            ).where(c.stage.in_(("pinned", "promoted")), *_of_engines(labels))
        )
        return row or {"checkpoints": 0, "blocks": 0}

    def published_use(self, since_ns: int | None, labels: Sequence[str] = ()) -> Row:
        """What became of published checkpoints with an event since ``since_ns``, in
        engines with one of ``labels`` (none for all).

        ``published`` (ever, also where the engine is no more), ``hit`` (resumed from
        at least once), ``evicted``, and ``evicted_unused`` (evicted before anyone
        resumed from it).
        """
        c = checkpoints.c
        was_published = or_(
            c.stage != "gone", c.published_ns.is_not(None), c.num_hits > 0
        )
        conditions: list[ColumnElement[bool]] = [
            c.stage.in_(("published", "evicted", "gone")),
            was_published,
            *_of_engines(labels),
        ]
        if since_ns is not None:
            conditions.append(c.last_event_ns >= since_ns)
        statement = select(
            func.count().label("published"),
            _count_if(c.num_hits > 0).label("hit"),
            _count_if(c.stage == "evicted").label("evicted"),
            _count_if(and_(c.stage == "evicted", c.num_hits == 0)).label(
                "evicted_unused"
            ),
        ).where(*conditions)
        row = self._one(statement)
        assert row is not None
        return {name: int(value) for name, value in row.items()}

    # -- conversations ----------------------------------------------------

    def conversations(self, wanted: RequestFilter, limit: int = 50) -> list[Row]:
        """The conversations with the newest matching requests, the newest first.

        Looked for among the newest :data:`CONVERSATION_SCAN` matching requests;
        the figures are of all turns: ``conversation_id``, ``label``,
        ``session_id``, ``num_turns``, ``prompt``, ``cached``, ``output``,
        ``num_retained``, ``first_ns``, ``last_ns``.
        """
        c = requests.c
        newest = (
            select(c.conversation_id, c.label, c.last_event_ns)
            .where(*wanted.conditions, c.conversation_id.is_not(None))
            .order_by(c.last_event_ns.desc())
            .limit(CONVERSATION_SCAN)
            .subquery()
            .c
        )
        chosen = self._all(
            select(newest.conversation_id, newest.label)
            .group_by(newest.conversation_id, newest.label)
            .order_by(func.max(newest.last_event_ns).desc(), newest.conversation_id)
            .limit(limit)
        )
        keys = {(row["conversation_id"], row["label"]) for row in chosen}
        last_ns = func.max(c.last_event_ns).label("last_ns")
        statement = (
            select(
                c.conversation_id,
                c.label,
                func.max(c.session_id).label("session_id"),
                func.count().label("num_turns"),
                _sum_if(c.num_cached_tokens.is_not(None), c.num_prompt_tokens).label(
                    "prompt"
                ),
                func.coalesce(func.sum(c.num_cached_tokens), 0).label("cached"),
                func.coalesce(func.sum(c.num_output_tokens), 0).label("output"),
                _count_if(c.retained_boundary.is_not(None)).label("num_retained"),
                func.min(func.coalesce(c.arrival_ns, c.last_event_ns)).label(
                    "first_ns"
                ),
                last_ns,
            )
            .where(c.conversation_id.in_({conversation for conversation, _ in keys}))
            .group_by(c.conversation_id, c.label)
            .order_by(last_ns.desc(), c.conversation_id)
        )
        rows = self._all(statement)
        return [row for row in rows if (row["conversation_id"], row["label"]) in keys]

    def turns(
        self, conversation_id: str, label: str | None = None, limit: int = 200
    ) -> list[Row]:
        """The requests of a conversation in the order of their arrival."""
        c = requests.c
        statement = select(requests).where(c.conversation_id == conversation_id)
        if label is not None:
            statement = statement.where(c.label == label)
        order = func.coalesce(c.arrival_ns, c.admitted_ns, c.last_event_ns)
        return self._all(statement.order_by(order, c.request_id).limit(limit))

    # -- comparison -------------------------------------------------------

    def by_turn(
        self, wanted: RequestFilter, *, one_conversation: bool, limit: int = 200
    ) -> list[Row]:
        """Tokens summed by turn: the rows of the reference's A/B table.

        Args:
            wanted: one arm.
            one_conversation: count turns over all matching requests in the order
                of their arrival, not within each conversation.

        Returns:
            ``turn`` (from 0), ``num_requests``, ``cached``, ``prompt``,
            ``completion``.
        """
        c = requests.c
        arrival = func.coalesce(c.arrival_ns, c.admitted_ns, c.last_event_ns)
        partition = None if one_conversation else (c.engine_id, c.conversation_id)
        number = func.row_number().over(
            partition_by=partition, order_by=(arrival, c.request_id)
        )
        rows = (
            select(
                (number - 1).label("turn"),
                c.num_cached_tokens,
                c.num_prompt_tokens,
                c.num_output_tokens,
            )
            .where(*wanted.conditions)
            .subquery()
            .c
        )
        statement = (
            select(
                rows.turn,
                func.count().label("num_requests"),
                func.coalesce(func.sum(rows.num_cached_tokens), 0).label("cached"),
                func.coalesce(func.sum(rows.num_prompt_tokens), 0).label("prompt"),
                func.coalesce(func.sum(rows.num_output_tokens), 0).label("completion"),
            )
            .group_by(rows.turn)
            .order_by(rows.turn)
            .limit(limit)
        )
        return [
            {name: int(value) for name, value in row.items()}
            for row in self._all(statement)
        ]

    def count_conversations(self, wanted: RequestFilter) -> int:
        """How many conversations the matching requests belong to."""
        c = requests.c
        ids = select(c.engine_id, c.conversation_id).where(*wanted.conditions)
        some = ids.distinct().limit(COUNT_LIMIT + 1).subquery()
        row = self._one(select(func.count().label("n")).select_from(some))
        return int(row["n"]) if row else 0


def _of_engines(labels: Sequence[str]) -> list[ColumnElement[bool]]:
    """On a row of ``checkpoints``, which has no label of its own."""
    if not labels:
        return []
    wanted = select(engines.c.engine_id).where(engines.c.label.in_(list(labels)))
    return [checkpoints.c.engine_id.in_(wanted)]


def _count_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _sum_if(
    condition: ColumnElement[bool], column: ColumnElement[Any]
) -> ColumnElement[int]:
    return func.coalesce(func.sum(case((condition, column), else_=0)), 0)
