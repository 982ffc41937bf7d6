"""Turns events into request and checkpoint records. Pure: no I/O, no clock.

Events of one engine epoch come in order and once (:mod:`event_consumer.subscriber`
sees to it), but not always all of them: a life may be seen from its middle on, or
its end may be missing. What is then known is kept, and marked incomplete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Final, NamedTuple

import msgspec

from event_consumer import trace_ids
from event_consumer.kv_events import hash_text
from event_consumer.records import (
    DISCARDED,
    ENGINE_LOST,
    EVICTED,
    FINISHED,
    GONE,
    LIVE_STAGES,
    LOST,
    OPEN,
    PINNED,
    PROMOTED,
    PUBLISHED,
    RUNNING,
    STOPPED,
    CheckpointRecord,
    ClosedRequest,
    EngineRecord,
    RequestRecord,
    Snapshot,
)
from event_consumer.storable import (
    MAX_BLOCK_HASH,
    make_names_storable,
    storable,
)
from vllm_fork.events import (
    AnyEvent,
    CheckpointDiscarded,
    CheckpointEvent,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
    EngineStopped,
    EventBatch,
    EventsDropped,
    PrefixReused,
    RequestEvent,
    RequestFinished,
)

MAX_OPEN_REQUESTS: Final = 16_384
"""Open requests kept an engine; past it the oldest, whose end was lost, leave."""
MAX_RECENT: Final = 4_096
"""Ended requests an engine whose id is remembered, so that nothing reopens them."""
MAX_LIVE_CHECKPOINTS: Final = 65_536
"""Live checkpoints kept an engine whose number of blocks is not known."""
LINGER_NS: Final = 5_000_000_000
"""How long an ended request waits for the end of its checkpoints."""

MAX_COUNT: Final = 2**62
"""Past it a sum is no count of anything, and soon no number that a store takes."""

UNOBSERVED: Final = "unobserved"
"""Eviction reason of a checkpoint that cannot be there any more: more are said to
live than the engine has blocks, so the event that said so was lost."""


class Changes(NamedTuple):
    """Records that changed; of ``hits`` nothing did but the number of hits."""

    engines: list[EngineRecord]
    requests: list[RequestRecord]
    checkpoints: list[CheckpointRecord]
    hits: list[CheckpointRecord]


class _Life(msgspec.Struct, gc=False):
    """A request that is not closed yet."""

    request: RequestRecord
    checkpoints: list[CheckpointRecord]
    source: CheckpointRecord | None = None
    num_pending: int = 0
    """Its checkpoints that are neither published nor discarded."""
    end_monotonic_ns: int = 0


class _Live(msgspec.Struct, gc=False):
    """A checkpoint that lives, and the conversation it belongs to."""

    checkpoint: CheckpointRecord
    conversation_id: str | None


class _Epoch(msgspec.Struct):
    """One engine epoch."""

    engine: EngineRecord
    lives: dict[str, _Life]
    live: dict[int, _Live]
    lingering: OrderedDict[str, _Life]
    by_hash: dict[str, CheckpointRecord]
    """Published checkpoints by their block hash."""
    recent: OrderedDict[str, None]
    """Requests that ended last. Taking the oldest out of a plain dict, again and again,
    walks over all that were taken before."""
    applied_seq: int = -1


class Ledger:
    """Keeps what is going on in every engine, and what has changed since asked."""

    def __init__(self, *, tells: bool = True) -> None:
        """``tells``: whether :meth:`take_closed` and :meth:`take_evicted` are asked
        (they cost copies)."""
        self._tells = tells
        self._epochs: dict[str, _Epoch] = {}
        self._current: dict[str, str] = {}  # endpoint -> engine id
        # Changed since the last take, by the identity of the record.
        self._engines: dict[int, EngineRecord] = {}
        self._requests: dict[int, RequestRecord] = {}
        self._checkpoints: dict[int, CheckpointRecord] = {}
        self._hits: dict[int, CheckpointRecord] = {}
        self._closed: list[ClosedRequest] = []
        self._evictions: list[CheckpointRecord] = []
        self._handlers: dict[type, Callable[[_Epoch, Any], None]] = {
            PrefixReused: self._prefix_reused,
            CheckpointPinned: self._pinned,
            CheckpointPromoted: self._promoted,
            CheckpointPublished: self._published,
            CheckpointDiscarded: self._discarded,
            CheckpointEvicted: self._evicted,
            RequestFinished: self._request_finished,
            EngineStarted: self._engine_started,
            EngineStopped: self._engine_stopped,
            EventsDropped: self._events_dropped,
        }

    # -- in ------------------------------------------------------------------

    def restore(self, snapshot: Snapshot) -> None:
        """Go on where a former consumer's store stands."""
        for engine in snapshot.engines:
            self._epochs[engine.engine_id] = _new_epoch(engine)
        for stream in snapshot.streams:
            if stream.engine_id in self._epochs:
                self._current[stream.endpoint] = stream.engine_id
                self._epochs[stream.engine_id].applied_seq = stream.applied_seq
        for request in snapshot.requests:
            epoch = self._epochs[request.engine_id]
            epoch.lives[request.request_id] = _Life(request, [])
        by_id: dict[tuple[str, int | None], CheckpointRecord] = {}
        for checkpoint in sorted(snapshot.checkpoints, key=_order_of_pins):
            epoch = self._epochs[checkpoint.engine_id]
            by_id[checkpoint.engine_id, checkpoint.checkpoint_id] = checkpoint
            if checkpoint.stage in (*LIVE_STAGES, GONE):
                epoch.live[checkpoint.checkpoint_id] = _Live(
                    checkpoint,
                    snapshot.conversations.get(
                        (checkpoint.engine_id, checkpoint.request_id)
                    ),
                )
                if checkpoint.block_hash is not None:
                    epoch.by_hash[checkpoint.block_hash] = checkpoint
            life = epoch.lives.get(checkpoint.request_id)
            if life is not None:
                life.checkpoints.append(checkpoint)
                if checkpoint.published_ns is None and checkpoint.discarded_ns is None:
                    life.num_pending += 1
        for request in snapshot.requests:
            life = self._epochs[request.engine_id].lives[request.request_id]
            life.source = by_id.get((request.engine_id, request.source_checkpoint_id))

    def apply(
        self, endpoint: str, seq: int, batch: EventBatch, events: list[AnyEvent]
    ) -> int:
        """Apply the events of batch ``seq``, which came from ``endpoint``. One that
        was applied before changes nothing.

        Returns:
            How many events the publisher says it dropped before them.
        """
        epoch = self._epochs.get(batch.engine_id)
        if epoch is None:
            epoch = self._begin(endpoint, batch)
        elif epoch.engine.status == LOST:
            self._revive(epoch)
        if seq <= epoch.applied_seq:
            return 0
        epoch.applied_seq = seq
        if self._current.get(endpoint) != batch.engine_id:
            self._supersede(endpoint, batch.engine_id)
        handlers = self._handlers
        engine = epoch.engine
        num_dropped = engine.events_dropped
        event = None
        for event in events:
            handlers[type(event)](epoch, event)
        if event is not None:
            engine.last_event_ns = event.time_unix_ns
            self._engines[id(engine)] = engine
            self._bound(epoch, event.monotonic_ns)
        return engine.events_dropped - num_dropped

    def range_lost(self, engine_id: str) -> None:
        """Events of ``engine_id`` are missing here: whatever is open is incomplete."""
        epoch = self._epochs.get(engine_id)
        if epoch is not None:
            self._mark_incomplete(epoch)

    def rewind(self, engine_id: str, applied_seq: int) -> None:
        """What was applied after batch ``applied_seq`` was not the engine's: its own
        batches with these numbers are still to come. What the others said stays."""
        epoch = self._epochs.get(engine_id)
        if epoch is not None:
            epoch.applied_seq = min(epoch.applied_seq, applied_seq)

    def engine_lost(self, engine_id: str) -> None:
        """The engine is no more: killed, replaced, or silent for too long.

        Its open requests end as ``engine_lost`` and its checkpoints are gone.
        Should it speak again, they are taken back.
        """
        epoch = self._epochs.get(engine_id)
        if epoch is not None and epoch.engine.status == RUNNING:
            epoch.engine.status = LOST
            self._engines[id(epoch.engine)] = epoch.engine
            self._end_all(epoch)

    def engine_back(self, engine_id: str) -> None:
        """The engine was not lost: it speaks again."""
        epoch = self._epochs.get(engine_id)
        if epoch is not None and epoch.engine.status == LOST:
            self._revive(epoch)

    def attention_evicted(
        self, endpoint: str, block_hashes: Iterable[str], time_ns: int
    ) -> None:
        """Attention blocks of the engine at ``endpoint`` left the cache: a published
        checkpoint of that hash is there, and of no use any more."""
        epoch = self._epochs.get(self._current.get(endpoint, ""))
        if epoch is None:
            return
        for block_hash in block_hashes:
            checkpoint = epoch.by_hash.get(block_hash)
            if checkpoint is not None and checkpoint.attention_evicted_ns is None:
                checkpoint.attention_evicted_ns = time_ns
                self._checkpoints[id(checkpoint)] = checkpoint
                if self._tells:
                    self._evictions.append(copy(checkpoint))

    def forget(self, endpoint: str) -> None:
        """``endpoint`` is not watched any more: its engine cannot be seen."""
        engine_id = self._current.pop(endpoint, None)
        if engine_id is not None:
            self.engine_lost(engine_id)
            self._epochs.pop(engine_id, None)

    def is_lost(self, engine_id: str | None) -> bool:
        """Whether the engine is known, and lost."""
        epoch = self._epochs.get(engine_id or "")
        return epoch is not None and epoch.engine.status == LOST

    # -- out -----------------------------------------------------------------

    def take_changes(self) -> Changes:
        """The records that changed since the last call. Copy them before the next
        event: they are the ledger's own."""
        changes = Changes(
            list(self._engines.values()),
            list(self._requests.values()),
            list(self._checkpoints.values()),
            [hit for key, hit in self._hits.items() if key not in self._checkpoints],
        )
        self._engines, self._requests = {}, {}
        self._checkpoints, self._hits = {}, {}
        return changes

    def take_closed(self) -> list[ClosedRequest]:
        """The requests that ended since the last call, in that order, as they were
        when they ended."""
        closed, self._closed = self._closed, []
        return closed

    def take_evicted(self) -> list[CheckpointRecord]:
        """The checkpoints that were evicted since the last call, as copies."""
        evicted, self._evictions = self._evictions, []
        return evicted

    @property
    def num_changes(self) -> int:
        """Records that wait for :meth:`take_changes`."""
        num_records = len(self._engines) + len(self._requests)
        return num_records + len(self._checkpoints) + len(self._hits)

    # -- epochs --------------------------------------------------------------

    def _begin(self, endpoint: str, batch: EventBatch) -> _Epoch:
        engine = EngineRecord(
            engine_id=batch.engine_id,
            data_parallel_rank=batch.data_parallel_rank,
            endpoint=endpoint,
            label=batch.label,
            model_name=batch.model_name,
        )
        epoch = self._epochs[batch.engine_id] = _new_epoch(engine)
        return epoch

    def _supersede(self, endpoint: str, engine_id: str) -> None:
        """A new epoch speaks on ``endpoint``: the former one is over."""
        former = self._current.get(endpoint)
        self._current[endpoint] = engine_id
        if former is not None:
            self.engine_lost(former)
            self._epochs.pop(former, None)

    def _revive(self, epoch: _Epoch) -> None:
        epoch.engine.status = RUNNING
        self._engines[id(epoch.engine)] = epoch.engine
        for life in epoch.lives.values():
            life.request.status = OPEN
            self._requests[id(life.request)] = life.request
        for live in epoch.live.values():
            checkpoint = live.checkpoint
            checkpoint.stage = _stage_of(checkpoint)
            self._checkpoints[id(checkpoint)] = checkpoint

    @staticmethod
    def _forget_hash(epoch: _Epoch, checkpoint: CheckpointRecord) -> None:
        block_hash = checkpoint.block_hash
        if block_hash is not None and epoch.by_hash.get(block_hash) is checkpoint:
            del epoch.by_hash[block_hash]

    def _end_all(self, epoch: _Epoch) -> None:
        """Every open request and live checkpoint ends with the engine."""
        for life in epoch.lives.values():
            life.request.status = ENGINE_LOST
            self._requests[id(life.request)] = life.request
        for live in epoch.live.values():
            live.checkpoint.stage = GONE
            self._checkpoints[id(live.checkpoint)] = live.checkpoint
        for life in (*epoch.lives.values(), *epoch.lingering.values()):
            self._close(life)
        epoch.lingering.clear()

    def _mark_incomplete(self, epoch: _Epoch) -> None:
        for life in epoch.lives.values():
            if not life.request.incomplete:
                life.request.incomplete = True
                self._requests[id(life.request)] = life.request

    def _bound(self, epoch: _Epoch, now_monotonic_ns: int) -> None:
        """Let go of what lingers too long or cannot be there any more."""
        lingering = epoch.lingering
        while lingering:
            request_id, life = next(iter(lingering.items()))
            if now_monotonic_ns - life.end_monotonic_ns < LINGER_NS:
                break
            del lingering[request_id]
            self._close(life)
        while len(epoch.recent) > MAX_RECENT:
            epoch.recent.popitem(last=False)
        while len(epoch.lives) > MAX_OPEN_REQUESTS:
            life = epoch.lives.pop(next(iter(epoch.lives)))
            life.request.incomplete = True
            self._requests[id(life.request)] = life.request
        # Each live checkpoint holds a block of its own; twice that is slack for
        # those whose release and whose event are not one step.
        most = 2 * (epoch.engine.num_blocks or MAX_LIVE_CHECKPOINTS // 2)
        while len(epoch.live) > most:
            live = epoch.live.pop(next(iter(epoch.live)))
            live.checkpoint.stage = EVICTED
            live.checkpoint.eviction_reason = UNOBSERVED
            self._forget_hash(epoch, live.checkpoint)
            self._checkpoints[id(live.checkpoint)] = live.checkpoint

    # -- engine events -------------------------------------------------------

    def _engine_started(self, epoch: _Epoch, event: EngineStarted) -> None:
        engine = epoch.engine
        engine.started_ns = event.time_unix_ns
        engine.retention = event.retention
        engine.retention_reason = event.retention_reason
        engine.exact_tail = event.exact_tail
        engine.copy_interval = event.copy_interval
        engine.publish_on = ",".join(sorted(event.publish_on))
        engine.block_size = event.block_size
        engine.hash_unit = event.hash_unit
        engine.num_blocks = event.num_blocks
        engine.num_mamba_groups = event.num_mamba_groups
        engine.async_scheduling = event.async_scheduling
        engine.vllm_version = event.vllm_version
        engine.fork_version = event.fork_version

    def _engine_stopped(self, epoch: _Epoch, event: EngineStopped) -> None:
        epoch.engine.status = STOPPED
        self._end_all(epoch)
        epoch.lives.clear()
        epoch.live.clear()
        epoch.by_hash.clear()

    def _events_dropped(self, epoch: _Epoch, event: EventsDropped) -> None:
        dropped = epoch.engine.events_dropped + event.count
        epoch.engine.events_dropped = min(dropped, MAX_COUNT)
        self._mark_incomplete(epoch)

    # -- request events ------------------------------------------------------

    def _life(self, epoch: _Epoch, event: RequestEvent, *, first: bool) -> _Life | None:
        """The life that ``event`` belongs to; None where that life is over.

        ``first``: a life begins with such an event, so that nothing before it is
        missing.
        """
        request_id = event.request_id
        life = epoch.lives.get(request_id)
        if life is None:
            if request_id in epoch.recent:
                return None
            make_names_storable(event)
            engine = epoch.engine
            engine_id = engine.engine_id
            trace_id, span_id = trace_ids.request_ids(
                engine_id, request_id, event.traceparent
            )
            request = RequestRecord(
                engine_id=engine_id,
                request_id=request_id,
                external_request_id=event.external_request_id,
                session_id=event.session_id,
                conversation_id=event.session_id or f"{engine_id}/{request_id}",
                label=engine.label,
                model_name=engine.model_name,
                data_parallel_rank=engine.data_parallel_rank,
                incomplete=not first,
                traceparent=event.traceparent,
                tracestate=event.tracestate,
                trace_id=trace_id,
                span_id=span_id,
            )
            life = epoch.lives[request_id] = _Life(request, [])
        request = life.request
        request.last_event_ns = event.time_unix_ns
        self._requests[id(request)] = request
        return life

    def _prefix_reused(self, epoch: _Epoch, event: PrefixReused) -> None:
        life = self._life(epoch, event, first=not event.resumed)
        if life is None:
            return
        source = self._hit(epoch, event)
        request = life.request
        request.num_prompt_tokens = event.num_prompt_tokens
        request.arrival_ns = event.arrival_unix_ns or request.arrival_ns
        if event.resumed:
            request.num_preemptions = (request.num_preemptions or 0) + 1
            return
        request.admitted_ns = event.time_unix_ns
        request.num_cached_tokens = event.num_cached_tokens
        request.num_external_tokens = event.num_external_tokens
        request.shared_prefix_boundary = event.shared_prefix_boundary
        request.hit_limited_by = event.hit_limited_by
        request.source_kind = event.source_kind
        source_id = event.source_request_id
        if source_id is None:
            return
        request.source_request_id = source_id
        request.source_external_request_id = event.source_external_request_id
        request.source_checkpoint_id = event.source_checkpoint_id
        request.source_boundary = event.source_boundary
        if source is not None:
            life.source = source.checkpoint
        # A conversation goes on where an answer is continued. Other sources (a system
        # prompt that all share) join what does not belong together.
        if request.session_id is None and event.source_checkpoint_id is not None:
            chain = source.conversation_id if source is not None else None
            request.conversation_id = chain or f"{request.engine_id}/{source_id}"

    def _hit(self, epoch: _Epoch, event: PrefixReused) -> _Live | None:
        """Count the hit on the checkpoint that was resumed from."""
        if event.source_checkpoint_id is None:
            return None
        live = epoch.live.get(event.source_checkpoint_id)
        if live is not None:
            checkpoint = live.checkpoint
            checkpoint.num_hits += 1
            self._hits[id(checkpoint)] = checkpoint
        return live

    def _request_finished(self, epoch: _Epoch, event: RequestFinished) -> None:
        # Aborted before its admission, it has no other event.
        life = self._life(epoch, event, first=event.num_output_tokens == 0)
        if life is None:
            return
        request = life.request
        request.status = FINISHED
        request.finished_ns = event.time_unix_ns
        request.arrival_ns = event.arrival_unix_ns or request.arrival_ns
        request.num_prompt_tokens = event.num_prompt_tokens
        request.num_output_tokens = event.num_output_tokens
        request.num_cached_tokens = event.num_cached_tokens
        request.finish_reason = event.finish_reason
        request.num_preemptions = event.num_preemptions
        request.num_superseded = event.num_superseded
        request.retained_boundary = event.retained_boundary
        request.retained_kind = event.retained_kind
        request.no_checkpoint_reason = event.no_checkpoint_reason
        if event.stop_reason is not None:
            request.stop_reason = str(event.stop_reason)
        del epoch.lives[request.request_id]
        epoch.recent[request.request_id] = None
        life.end_monotonic_ns = event.monotonic_ns
        if life.num_pending:
            epoch.lingering[request.request_id] = life
        else:
            self._close(life)

    def _close(self, life: _Life) -> None:
        if not self._tells:
            return
        self._closed.append(
            ClosedRequest(
                copy(life.request),
                [copy(checkpoint) for checkpoint in life.checkpoints],
                copy(life.source),
            )
        )

    # -- checkpoint events ---------------------------------------------------

    def _checkpoint(
        self, epoch: _Epoch, event: CheckpointEvent
    ) -> tuple[CheckpointRecord, _Life | None]:
        """The record of the event's checkpoint, begun where it is not known, and the
        life it belongs to, unless that is over."""
        now_ns = event.time_unix_ns
        life = epoch.lives.get(event.request_id)
        live = epoch.live.get(event.checkpoint_id)
        if live is None:
            return self._begin_life_of(epoch, event)
        if life is not None:
            request = life.request
            request.last_event_ns = now_ns
            self._requests[id(request)] = request
        else:
            life = epoch.lingering.get(event.request_id)
        checkpoint = live.checkpoint
        checkpoint.last_event_ns = now_ns
        self._checkpoints[id(checkpoint)] = checkpoint
        return checkpoint, life

    def _begin_life_of(
        self, epoch: _Epoch, event: CheckpointEvent
    ) -> tuple[CheckpointRecord, _Life | None]:
        """Begin a checkpoint, and its request where that is not known either."""
        life = self._life(epoch, event, first=False)
        if life is None:
            life = epoch.lingering.get(event.request_id)
        checkpoint = self._new_checkpoint(epoch, event, life)
        if life is not None:
            life.checkpoints.append(checkpoint)
            life.num_pending += 1
        epoch.live[event.checkpoint_id] = _Live(
            checkpoint, life.request.conversation_id if life else event.session_id
        )
        self._checkpoints[id(checkpoint)] = checkpoint
        return checkpoint, life

    def _new_checkpoint(
        self, epoch: _Epoch, event: CheckpointEvent, life: _Life | None
    ) -> CheckpointRecord:
        engine_id = epoch.engine.engine_id
        if life is not None:
            request = life.request
            trace_id, external_id = request.trace_id, request.external_request_id
        else:
            make_names_storable(event)
            external_id = event.external_request_id
            trace_id = trace_ids.trace_id(
                engine_id, event.request_id, event.traceparent
            )
        return CheckpointRecord(
            engine_id=engine_id,
            checkpoint_id=event.checkpoint_id,
            request_id=event.request_id,
            external_request_id=external_id,
            boundary=event.boundary,
            boundary_kind=event.boundary_kind,
            trace_id=trace_id,
            span_id=trace_ids.checkpoint_span_id(engine_id, event.checkpoint_id),
            last_event_ns=event.time_unix_ns,
        )

    def _settle(self, epoch: _Epoch, life: _Life | None) -> None:
        """One more checkpoint of ``life`` is published or discarded."""
        if life is None:
            return
        life.num_pending -= 1
        if life.num_pending <= 0 and life.request.status == FINISHED:
            del epoch.lingering[life.request.request_id]
            self._close(life)

    def _pinned(self, epoch: _Epoch, event: CheckpointPinned) -> None:
        checkpoint, _ = self._checkpoint(epoch, event)
        checkpoint.pinned_ns = event.time_unix_ns
        checkpoint.num_blocks = event.num_blocks

    def _promoted(self, epoch: _Epoch, event: CheckpointPromoted) -> None:
        checkpoint, _ = self._checkpoint(epoch, event)
        checkpoint.stage = PROMOTED
        checkpoint.promoted_ns = event.time_unix_ns
        checkpoint.supersedes_checkpoint_id = event.supersedes_checkpoint_id
        checkpoint.supersedes_boundary = event.supersedes_boundary

    def _published(self, epoch: _Epoch, event: CheckpointPublished) -> None:
        checkpoint, life = self._checkpoint(epoch, event)
        if checkpoint.stage == PUBLISHED:
            return
        checkpoint.stage = PUBLISHED
        checkpoint.published_ns = event.time_unix_ns
        block_hash = event.block_hash
        if block_hash is not None:
            checkpoint.block_hash = storable(hash_text(block_hash), MAX_BLOCK_HASH)
            epoch.by_hash[checkpoint.block_hash] = checkpoint
        self._settle(epoch, life)

    def _discarded(self, epoch: _Epoch, event: CheckpointDiscarded) -> None:
        checkpoint, life = self._checkpoint(epoch, event)
        checkpoint.stage = DISCARDED
        checkpoint.discarded_ns = event.time_unix_ns
        checkpoint.discard_reason = event.reason
        del epoch.live[event.checkpoint_id]
        self._settle(epoch, life)

    def _evicted(self, epoch: _Epoch, event: CheckpointEvicted) -> None:
        live = epoch.live.pop(event.checkpoint_id, None)
        if live is not None:
            checkpoint = live.checkpoint
            self._forget_hash(epoch, checkpoint)
        else:
            life = epoch.lives.get(event.request_id)
            checkpoint = self._new_checkpoint(epoch, event, life)
        checkpoint.stage = EVICTED
        checkpoint.evicted_ns = event.time_unix_ns
        checkpoint.eviction_reason = event.reason
        checkpoint.num_hits = max(checkpoint.num_hits, event.num_hits)
        checkpoint.last_event_ns = event.time_unix_ns
        self._checkpoints[id(checkpoint)] = checkpoint
        if self._tells:
            self._evictions.append(copy(checkpoint))


def _new_epoch(engine: EngineRecord) -> _Epoch:
    return _Epoch(engine, {}, {}, OrderedDict(), {}, OrderedDict())


def _order_of_pins(checkpoint: CheckpointRecord) -> int:
    return checkpoint.checkpoint_id


def _stage_of(checkpoint: CheckpointRecord) -> str:
    """The stage that the times of ``checkpoint`` tell."""
    if checkpoint.published_ns is not None:
        return PUBLISHED
    return PROMOTED if checkpoint.promoted_ns is not None else PINNED
