"""Turns what the scheduler and the controller do into lifecycle events.

Events are collected and handed to the publisher once a step, when it is scheduled
(should it never end, the stream has told who was in it), and when a request is freed.
Nothing here touches a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any

from vllm_fork import events
from vllm_fork.cache_index import CachedState
from vllm_fork.checkpoint import Checkpoint, RequestIdentity
from vllm_fork.event_queue import QueuedEvent

if TYPE_CHECKING:
    from vllm.v1.request import Request

NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _Seen:
    """What the observer remembers of one unfinished request."""

    identity: RequestIdentity
    num_cached_tokens: int | None = None
    retained_boundary: int | None = None
    retained_kind: str | None = None
    last_discard: str | None = None
    num_superseded: int = 0

    @property
    def admitted(self) -> bool:
        return self.num_cached_tokens is not None


class Observer:
    """Collects events and flushes them to ``publish``.

    Args:
        publish: takes a list of events, or of what makes them; must neither block
            nor raise, nor keep the list (``CheckpointPublisher.publish``). None:
            events are off, and only what the controller asks for is kept.
        retention_off_reason: why no checkpoint is ever made here (``disabled`` or
            ``unsupported:<what>``); None when retention is on.
        hash_session_ids: replace session ids by their hash.
    """

    def __init__(
        self,
        publish: Callable[[Sequence[QueuedEvent]], None] | None,
        retention_off_reason: str | None,
        hash_session_ids: bool = False,
    ) -> None:
        self.enabled = publish is not None
        self.retention_off_reason = retention_off_reason
        self._publish = publish
        self._hash_session_ids = hash_session_ids
        self.collected: list[QueuedEvent] = []
        """Events that :meth:`flush` has yet to hand over; always this list."""
        self._seen: dict[str, _Seen] = {}

    def flush(self) -> None:
        """Hand the collected events over."""
        if self.collected:
            assert self._publish is not None
            self._publish(self.collected)
            self.collected.clear()

    def identity(self, request: Request) -> RequestIdentity:
        """The request's names, read once."""
        return self._see(request).identity

    def emit(self, kind: type[events.Event], **fields: object) -> None:
        """Collect one event that belongs to no request."""
        if self.enabled:
            self._collect(_make, kind, fields)

    # -- stages of a checkpoint ------------------------------------------------

    def pinned(self, checkpoint: Checkpoint) -> None:
        """Its blocks are reserved."""
        if self.enabled:
            self._collect(_make_pinned, checkpoint)

    def rolled(self, checkpoint: Checkpoint, former: Checkpoint | None) -> None:
        """As :meth:`pinned`, of a rolling copy that takes the place of ``former``.

        The caller counts these, and tells the count by :meth:`superseded`.
        """
        if not self.enabled:
            return
        unix_ns, now_ns = time_ns(), monotonic_ns()
        if former is not None:
            self.collected.append(
                (_make_discarded, unix_ns, now_ns, former, "superseded")
            )
        self.collected.append((_make_pinned, unix_ns, now_ns, checkpoint))

    def superseded(self, request_id: str, count: int) -> None:
        """So many rolling copies of the request gave way to :meth:`rolled` ones."""
        seen = self._seen.get(request_id)
        if seen:
            seen.num_superseded += count

    def promoted(self, checkpoint: Checkpoint, former: Checkpoint | None) -> None:
        """Its state is materialized; ``former`` is the one it replaces."""
        if self.enabled:
            self.collected.append(
                (_make_promoted, time_ns(), monotonic_ns(), checkpoint, former)
            )

    def published(
        self,
        checkpoint: Checkpoint,
        finish_reason: str | None,
        block_hash: bytes | int | None,
    ) -> None:
        """The prefix cache serves it."""
        checkpoint.published_monotonic_ns = monotonic_ns()
        if not self.enabled:
            return
        seen = self._seen.get(checkpoint.owner.request_id)
        if seen and checkpoint.boundary >= (seen.retained_boundary or 0):
            seen.retained_boundary = checkpoint.boundary
            seen.retained_kind = checkpoint.boundary_kind
        more = {"finish_reason": finish_reason, "block_hash": block_hash}
        self._collect(_make_stage, events.CheckpointPublished, checkpoint, more)

    def discarded(self, checkpoint: Checkpoint, reason: str) -> None:
        """Its pin was released without publication."""
        if not self.enabled:
            return
        seen = self._seen.get(checkpoint.owner.request_id)
        if seen:
            if reason == "superseded":
                seen.num_superseded += 1
            else:
                seen.last_discard = reason
        self._collect(_make_discarded, checkpoint, reason)

    def not_published(self, request: Request, reason: str) -> None:
        """``request`` ended with a state to keep, but not in a way that publishes."""
        seen = self._see(request)
        seen.last_discard = seen.last_discard or reason

    def evicted(self, checkpoint: Checkpoint, reason: str) -> None:
        """A published checkpoint left the prefix cache."""
        if self.enabled:
            age_ns = monotonic_ns() - checkpoint.published_monotonic_ns
            more = {
                "reason": reason,
                "age_s": age_ns / NANOSECONDS,
                "num_hits": checkpoint.num_hits,
            }
            self._collect(_make_stage, events.CheckpointEvicted, checkpoint, more)

    # -- requests --------------------------------------------------------------

    def admitted(
        self,
        request: Request,
        num_cached_tokens: int,
        num_external_tokens: int,
        hit_limited_by: str,
        source: CachedState | None,
    ) -> None:
        """A request was admitted with ``num_cached_tokens`` of reuse depth."""
        if not self.enabled:
            return
        seen = self._see(request)
        resumed = seen.admitted or request.num_preemptions > 0
        if not resumed:
            seen.num_cached_tokens = num_cached_tokens
        owner = source.owner if source else None
        checkpoint = source.checkpoint if source else None
        self.emit(
            events.PrefixReused,
            **seen.identity._asdict(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_external_tokens=num_external_tokens,
            resumed=resumed,
            hit_limited_by=hit_limited_by,
            shared_prefix_boundary=request.shared_prefix_boundary or None,
            source_kind=source.kind if source else events.NONE,
            source_request_id=owner and owner.request_id,
            source_external_request_id=owner and owner.external_request_id,
            source_checkpoint_id=checkpoint and checkpoint.checkpoint_id,
            source_boundary=source.boundary if source else None,
            arrival_unix_ns=int(request.arrival_time * NANOSECONDS),
        )

    def finished(self, request: Request, finish_reason: str | None = None) -> None:
        """A request ended; its checkpoints have reached their last stage.

        ``finish_reason``: of one that vLLM itself has not ended.
        """
        if not self.enabled:
            return
        seen = self._see(request)
        del self._seen[request.request_id]
        reason = finish_reason or request.get_finished_reason()
        self.emit(
            events.RequestFinished,
            **seen.identity._asdict(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=seen.num_cached_tokens or 0,
            finish_reason=str(reason) if reason is not None else "unknown",
            num_preemptions=request.num_preemptions,
            num_superseded=seen.num_superseded,
            retained_boundary=seen.retained_boundary,
            retained_kind=seen.retained_kind,
            no_checkpoint_reason=self._no_checkpoint_reason(request, seen),
            stop_reason=request.stop_reason,
            arrival_unix_ns=int(request.arrival_time * NANOSECONDS),
        )

    def _no_checkpoint_reason(self, request: Request, seen: _Seen) -> str | None:
        if seen.retained_boundary is not None:
            return None
        if self.retention_off_reason is not None:
            return self.retention_off_reason
        if not seen.admitted:
            return "never_admitted"
        if request.resumable:
            return "resumable"
        return seen.last_discard or "below_block"

    def _see(self, request: Request) -> _Seen:
        seen = self._seen.get(request.request_id)
        if seen is None:
            seen = _Seen(RequestIdentity.of(request, self._hash_session_ids))
            if self.enabled:
                self._seen[request.request_id] = seen
        return seen

    def _collect(self, make: Callable[..., events.Event], *what: object) -> None:
        """Note what happened, and when; the sending thread makes the event of it."""
        self.collected.append((make, time_ns(), monotonic_ns(), *what))


def _make(
    unix_ns: int, now_ns: int, kind: type[events.Event], fields: dict[str, Any]
) -> events.Event:
    return kind(time_unix_ns=unix_ns, monotonic_ns=now_ns, **fields)


def _make_stage(
    unix_ns: int,
    now_ns: int,
    kind: type[events.CheckpointEvent],
    checkpoint: Checkpoint,
    more: dict[str, Any],
) -> events.CheckpointEvent:
    """Of a checkpoint, only what never changes is read: this runs later."""
    return kind(
        time_unix_ns=unix_ns,
        monotonic_ns=now_ns,
        **checkpoint.owner._asdict(),
        checkpoint_id=checkpoint.checkpoint_id,
        boundary=checkpoint.boundary,
        boundary_kind=checkpoint.boundary_kind,
        **more,
    )


def _make_pinned(
    unix_ns: int, now_ns: int, checkpoint: Checkpoint
) -> events.CheckpointEvent:
    block_ids = [block.block_id for block in checkpoint.blocks]
    more = {"num_blocks": len(block_ids), "block_ids": block_ids}
    return _make_stage(unix_ns, now_ns, events.CheckpointPinned, checkpoint, more)


def _make_promoted(
    unix_ns: int, now_ns: int, checkpoint: Checkpoint, former: Checkpoint | None
) -> events.CheckpointEvent:
    more = {
        "supersedes_boundary": former and former.boundary,
        "supersedes_checkpoint_id": former and former.checkpoint_id,
    }
    return _make_stage(unix_ns, now_ns, events.CheckpointPromoted, checkpoint, more)


def _make_discarded(
    unix_ns: int, now_ns: int, checkpoint: Checkpoint, reason: str
) -> events.CheckpointEvent:
    more = {"reason": reason}
    return _make_stage(unix_ns, now_ns, events.CheckpointDiscarded, checkpoint, more)
