"""Where the streams meet the ledger: takes what the state machines decide, counts
it, and hands out what is to be stored. No I/O.

Nothing is handed out between a batch and the position behind it, so that one
transaction holds both.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from copy import copy
from typing import Final, NamedTuple

from event_consumer.ledger import MAX_COUNT, Ledger
from event_consumer.records import (
    GAP_OPEN,
    LOST,
    CheckpointRecord,
    ClosedRequest,
    EventCounter,
    GapRecord,
    Snapshot,
    StreamRecord,
)
from event_consumer.store import ChangeSet
from event_consumer.stream_state import (
    DEFAULT_TIMES,
    Action,
    Apply,
    EngineBack,
    EngineGone,
    Gap,
    Refuted,
    Rewound,
    StreamState,
    StreamTimes,
)
from vllm_fork.events import DecodedBatch

logger = logging.getLogger(__name__)

NS: Final = 1_000_000_000
IDLE_REWRITE_NS: Final = 2 * NS
"""A stream without news is written again this often: the store says how fresh it
is."""


class Taken(NamedTuple):
    """What :meth:`Intake.take` hands out."""

    changes: ChangeSet
    closed: list[ClosedRequest]
    evicted: list[CheckpointRecord]


class Intake:
    """All endpoints of one consumer."""

    def __init__(
        self, *, counter: EventCounter | None = None, tells: bool = True
    ) -> None:
        """
        Args:
            counter: counts the events.
            tells: whether anybody is to be told of requests that ended.
        """
        self.ledger = Ledger(tells=tells)
        self._counter = counter
        self.states: dict[str, StreamState] = {}
        self.streams: dict[str, StreamRecord] = {}
        self._gaps: dict[tuple[str, str, int], GapRecord] = {}
        self._open_gaps: dict[tuple[str, str, int], GapRecord] = {}
        self._news: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def restore(self, snapshot: Snapshot) -> None:
        """Go on where the store stands; then :meth:`add` the endpoints."""
        self.ledger.restore(snapshot)
        for stream in snapshot.streams:
            self.streams[stream.endpoint] = stream
        for gap in snapshot.gaps:
            self._open_gaps[gap.endpoint, gap.engine_id, gap.first_seq] = gap

    def add(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        times: StreamTimes = DEFAULT_TIMES,
    ) -> StreamState:
        """Begin to watch ``endpoint``, at the position that was restored."""
        record = self.streams.get(endpoint)
        if record is None:
            record = self.streams[endpoint] = StreamRecord(endpoint=endpoint)
        record.replay_endpoint = replay_endpoint
        open_gap = None
        for gap in [g for g in self._open_gaps.values() if g.endpoint == endpoint]:
            if gap.engine_id == record.engine_id:
                open_gap = (gap.first_seq, gap.end_seq)
            else:  # of an epoch that is over
                self._gap(
                    endpoint, Gap(gap.engine_id, gap.first_seq, gap.end_seq, LOST)
                )
        state = self.states[endpoint] = StreamState(
            epoch=record.engine_id,
            applied_seq=record.applied_seq,
            open_gap=open_gap,
            can_replay=replay_endpoint is not None,
            gone=self.ledger.is_lost(record.engine_id),
            times=times,
        )
        state.num_duplicates = record.num_duplicates
        state.num_replayed = record.num_replayed
        state.num_lost = record.num_lost
        state.num_restarts = record.num_restarts
        self._news.add(endpoint)
        return state

    def remove(self, endpoint: str) -> None:
        """Stop watching ``endpoint``; its engine counts as lost."""
        state = self.states[endpoint]
        self.handle(endpoint, state.on_removed())
        self.ledger.forget(endpoint)
        self._write_stream(endpoint)
        del self.states[endpoint]

    def disconnect(self, endpoint: str, now: float) -> None:
        """The consumer stops: it hears ``endpoint`` no more."""
        self.handle(endpoint, self.states[endpoint].on_disconnected(now))

    def handle(self, endpoint: str, actions: Iterable[Action]) -> None:
        """Carry out what the endpoint's state machine decided (asking for a replay
        is the subscriber's)."""
        self._news.add(endpoint)
        record = self.streams[endpoint]
        for action in actions:
            if type(action) is Apply:
                self._apply(record, action)
            elif type(action) is Gap:
                self._gap(endpoint, action)
            elif type(action) is Refuted:
                self._refuted(record, action.seq)
            elif type(action) is Rewound:
                self.ledger.rewind(action.epoch, action.applied_seq)
                self._refuted(record, action.applied_seq + 1)
            elif type(action) is EngineBack:
                self.ledger.engine_back(action.epoch)
            elif type(action) is EngineGone:
                self.ledger.engine_lost(action.epoch)
                if self._counter is not None:
                    self._counter.engine_ended(action.epoch)

    def undecodable(self, endpoint: str, why: str) -> None:
        """A frame that is no batch came on ``endpoint``."""
        self.streams[endpoint].num_undecodable += 1
        self._news.add(endpoint)
        self._warn(
            endpoint, "frame", f"{endpoint} sent a frame that is no batch: {why}"
        )

    def take(self, now_ns: int) -> Taken:
        """What is to be stored and told, with the positions it belongs to.

        Args:
            now_ns: the consumer's wall clock.
        """
        changed = self.ledger.take_changes()
        gaps, self._gaps = self._gaps, {}
        changes = ChangeSet.of(
            **changed._asdict(),
            streams=self._streams_with_news(now_ns),
            gaps=gaps.values(),
        )
        return Taken(changes, self.ledger.take_closed(), self.ledger.take_evicted())

    def stream_health(self) -> list[tuple[StreamRecord, int]]:
        """Each stream now, and how many gaps are open in it. For any thread."""
        num_open = Counter(gap.endpoint for gap in list(self._open_gaps.values()))
        for endpoint in list(self.states):
            self._write_stream(endpoint)
        return [(copy(s), num_open[s.endpoint]) for s in list(self.streams.values())]

    @property
    def open_gaps(self) -> list[GapRecord]:
        """The gaps that are open now."""
        return list(self._open_gaps.values())

    def _streams_with_news(self, now_ns: int) -> list[StreamRecord]:
        news, self._news = self._news, set()
        written = []
        for endpoint, record in self.streams.items():
            if endpoint in self.states:
                stale = now_ns - (record.updated_ns or 0) >= IDLE_REWRITE_NS
                if endpoint not in news and not stale:
                    continue
                self._write_stream(endpoint)
            elif endpoint not in news:
                continue
            record.updated_ns = now_ns
            written.append(record)
        for record in written:
            if record.endpoint not in self.states:
                del self.streams[record.endpoint]
        return written

    def _write_stream(self, endpoint: str) -> None:
        record, state = self.streams[endpoint], self.states[endpoint]
        record.state = state.state
        record.engine_id = state.epoch
        record.applied_seq = state.applied_seq
        record.num_duplicates = state.num_duplicates
        record.num_replayed = state.num_replayed
        record.num_lost = state.num_lost
        record.num_restarts = state.num_restarts

    def _apply(self, record: StreamRecord, action: Apply) -> None:
        decoded: DecodedBatch = action.item
        batch = decoded.batch
        now_ns = time.time_ns()
        record.num_batches += 1
        record.num_events += len(decoded.events)
        record.last_batch_ns = now_ns
        record.data_parallel_rank = batch.data_parallel_rank
        if not action.replayed:
            record.lag_ns = now_ns - int(batch.ts * NS)
        if decoded.num_unknown or decoded.errors:
            self._count_unread(record, decoded)
        if self._counter is not None:
            self._counter.apply(batch, decoded.events)
        num_dropped = self.ledger.apply(
            record.endpoint, action.seq, batch, decoded.events
        )
        record.num_dropped = min(record.num_dropped + num_dropped, MAX_COUNT)

    def _count_unread(self, record: StreamRecord, decoded: DecodedBatch) -> None:
        record.num_unknown += decoded.num_unknown
        record.num_undecodable += len(decoded.errors)
        if decoded.num_unknown:
            self._warn(
                record.endpoint,
                "unknown",
                f"{record.endpoint} sends event types that this event-consumer does "
                "not know; they are counted and skipped: upgrade it to read them",
            )
        for error in decoded.errors[:1]:
            self._warn(
                record.endpoint,
                "event",
                f"{record.endpoint} sent an event that does not decode: {error}",
            )

    def _gap(self, endpoint: str, gap: Gap) -> None:
        now_ns = time.time_ns()
        key = (endpoint, gap.epoch, gap.first_seq)
        former = self._open_gaps.pop(key, None)
        record = self._gaps[key] = GapRecord(
            endpoint=endpoint,
            engine_id=gap.epoch,
            first_seq=gap.first_seq,
            end_seq=gap.end_seq,
            status=gap.status,
            detected_ns=former.detected_ns if former else now_ns,
            closed_ns=None if gap.status == GAP_OPEN else now_ns,
        )
        if gap.status == GAP_OPEN:
            self._open_gaps[key] = record
        missing = f"batches [{gap.first_seq}, {gap.end_seq}) of {endpoint}"
        if gap.status == LOST:
            self.ledger.range_lost(gap.epoch)
            logger.warning("%s are lost", missing)
        elif gap.status != GAP_OPEN or former is None:
            logger.info("%s: gap %s", missing, gap.status)

    def _refuted(self, record: StreamRecord, seq: int) -> None:
        record.num_undecodable += 1
        self._warn(
            record.endpoint,
            "number",
            f"{record.endpoint} named batch {seq} out of all order, and what the "
            "engine itself says refutes it: somebody else may be sending there "
            "(docs/consumer.md, Trust)",
        )

    def _warn(self, endpoint: str, kind: str, message: str) -> None:
        """Warn once a kind of trouble and endpoint; the counts tell the rest."""
        first = (endpoint, kind) not in self._warned
        self._warned.add((endpoint, kind))
        logger.log(logging.WARNING if first else logging.DEBUG, "%s", message)
