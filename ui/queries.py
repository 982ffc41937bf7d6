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
    Select,
    and_,
    func,
    literal,
    or_,
    select,
)

from event_consumer import tables
from ui.connection import StoreConnection

requests, checkpoints, engines = tables.requests, tables.checkpoints, tables.engines
streams, gaps = tables.streams, tables.gaps

Row = dict[str, Any]

COUNT_LIMIT: Final = 10_000
"""A count of matches stops here: “10,000+” is as good an answer as 1,284,311."""
DOWNLOAD_LIMIT: Final = 50_000
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
            # The core's id begins with the external one, so this covers both.
            yield or_(
                c.request_id.icontains(text, autoescape=True),
                c.conversation_id.icontains(text, autoescape=True),
                c.session_id.icontains(text, autoescape=True),
            )


class Queries:
    """The questions that the pages ask of one store."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def _all(self, statement: Select[Any]) -> list[Row]:
        with self._store.read() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def _one(self, statement: Select[Any]) -> Row | None:
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
        order = (SORTS[sort], requests.c.request_id)
        return self._all(statement.order_by(*order).limit(limit).offset(offset))

    def count_requests(self, wanted: RequestFilter) -> int:
        """How many match: exact up to :data:`COUNT_LIMIT`, one more beyond."""
        some = select(literal(1)).select_from(requests).where(*wanted.conditions)
        some = some.limit(COUNT_LIMIT + 1)
        row = self._one(select(func.count().label("n")).select_from(some.subquery()))
        return int(row["n"]) if row else 0

    def requests_by_id(self, request_id: str, limit: int = 20) -> list[Row]:
        """Requests whose external or core id is ``request_id``, newest first.

        Several, where two engines served a request of one id.
        """
        c = requests.c
        newest = c.last_event_ns.desc()
        external = request_id.rpartition("-")[0] or request_id
        by_index = or_(
            c.external_request_id == request_id,
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
