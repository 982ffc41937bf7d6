"""Retention of decode checkpoints: which recurrent state is kept, and by whom.

Under sparse retention vLLM keeps the recurrent (Mamba, gated-delta) state of the
prompt's replay boundary alone: what decoding adds is dropped. The controller here
keeps the newest state that decoding completed, as vLLM PR 50551 does, and publishes
it to the prefix cache when the request ends in a way that ``publish_on`` names.

Ownership of a block's reference::

    pin      touch()        one reference to each block: the controller holds it
    promote                 the same reference; the former checkpoint's is released
    publish  cache_full_…   the hash enters the cache; the reference stays until …
    release  free_blocks()  … the request's own table is freed: the blocks become
                            ordinary LRU citizens (or free ones, if discarded)

Every pin has exactly one release: in :meth:`RetentionController._release`, the only
place that gives references back. :meth:`RetentionController.check_integrity` counts
them.

A request has at most one pending pin (scheduled, its output not accepted yet) beside
one promoted checkpoint. Nothing here is thread-safe: the scheduler's thread owns it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.request import RequestStatus

from vllm_fork import events
from vllm_fork.cache_index import CacheIndex
from vllm_fork.checkpoint import Checkpoint
from vllm_fork.exact_tail import TailIndex
from vllm_fork.observer import Observer
from vllm_fork.rolling_copy import RollingCopies
from vllm_fork.step_watch import StepWatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

ENDING: Final = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_IGNORED: "length",
    RequestStatus.FINISHED_REPETITION: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}
"""How a request ended, in the words of ``publish_on``."""

DISCARD_REASON: Final = {
    "stop": "stopped",
    "length": "length",
    "abort": "aborted",
    "error": "error",
}


class IntegrityReport(NamedTuple):
    """What :meth:`RetentionController.check_integrity` counted."""

    num_pinned_checkpoints: int
    num_pinned_blocks: int
    num_published_checkpoints: int
    num_free_blocks: int
    num_used_blocks: int


class IntegrityError(AssertionError):
    """A block's reference count is not what its holders add up to."""


def executed_tokens(request: Request) -> int:
    """Tokens of ``request`` that have run *and* whose output was processed.

    True under synchronous, asynchronous, pipelined and speculative scheduling.
    Capped by the tokens that the request kept: drafts accepted past a stop token
    advance ``num_computed_tokens`` but are no part of it.
    """
    return min(
        request.num_computed_tokens - request.num_in_flight_tokens,
        request.num_tokens,
    )


class RetentionController:
    """Pins, promotes, publishes and releases the checkpoints of one scheduler.

    Args:
        kv_cache_manager: the scheduler's; it must have align-mode Mamba groups
            (see :func:`mamba_align_managers`).
        publish_on: the endings that publish, of ``stop``, ``length``, ``abort``,
            ``preempt``.
        num_speculative_tokens: with drafts, whether a step crossed a boundary is
            known from its output only.
        max_scheduled_tokens: tokens that one step can run at most.
        observer: told of each stage.
        index: told of each publication.
        watch: where the requests to be reached are noted, and that there is work
            before the next step.
        tails: where exact tails are entered; None: none are kept.
        copy_interval: tokens between rolling copies, a multiple of the hash unit;
            0: none are made.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        publish_on: frozenset[str],
        num_speculative_tokens: int,
        max_scheduled_tokens: int,
        observer: Observer,
        index: CacheIndex,
        watch: StepWatch,
        tails: TailIndex | None = None,
        copy_interval: int = 0,
    ) -> None:
        coordinator = kv_cache_manager.coordinator
        self.block_size: int = coordinator.scheduler_block_size
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._mamba = mamba_align_managers(kv_cache_manager)
        self._attention = [
            manager
            for manager in coordinator.single_type_managers
            if manager not in self._mamba and manager.kv_cache_spec.prefix_cacheable
        ]
        self._publish_on = publish_on
        self._speculative = num_speculative_tokens > 0
        # Such a manager writes a state *inside* a block into the column left of
        # the running one when a prefill ends (Mamba2, KDA).
        self._exports_prefill_states = any(
            manager.has_prefill_checkpoint_blocks for manager in self._mamba
        )
        self._observer = observer
        self._index = index
        self._tails = tails
        self._ids = itertools.count()
        self.copies: RollingCopies | None = None
        if copy_interval:
            self.copies = RollingCopies(
                self._pool, self._mamba, copy_interval, self._ids, observer, watch
            )

        self._watch = watch
        self._pending: dict[str, Checkpoint] = {}
        self._promoted: dict[str, Checkpoint] = {}
        # Exact tails and copies, between ``finish`` and ``release``.
        self._ended: dict[str, list[Checkpoint]] = {}
        # Speculative decoding only: the boundary a request may have crossed, to
        # be settled when outputs arrive, and the tokens it had to run before the
        # first output of its present stint.
        self._crossing: dict[str, int] = {}
        self._first_output_at: dict[str, int] = {}

        # How many blocks one step may take for RUNNING requests: ``may_run_short``.
        self._free_blocks = self._pool.free_block_queue
        self._copying = (*self._mamba, *self._attention)
        num_groups = len(coordinator.single_type_managers)
        smallest = min(manager.block_size for manager in self._copying)
        self._step_blocks = num_groups * (max_scheduled_tokens // smallest)
        self._blocks_per_request = num_groups * (
            1 + num_speculative_tokens + self._exports_prefill_states
        )
        self._most_per_request = self._blocks_per_request + num_groups

    # -- scheduling --------------------------------------------------------------

    def watch(self, request: Request) -> None:
        """``request`` was admitted; may be called again."""
        if request.request_id not in self._watch:
            self._watch.await_tokens(request, 0)

    def reach(self, request: Request) -> None:
        """Pin what the step just scheduled will complete for ``request``.

        Call after ``schedule``, for each request that has what it was watched for;
        ``num_computed_tokens`` counts the step.
        """
        if request.status != RequestStatus.RUNNING:
            # Its blocks are being loaded.
            self._watch.await_tokens(request, 0)
            return
        request_id = request.request_id
        if request.resumable or request.pooling_params is not None:
            # The next input of a streaming session may rewrite the last token.
            self._watch.await_tokens(request, None)
            return
        if self._speculative:
            due = self._watch.boundary(request_id)
            if not due:
                due = self._first_boundary(request)
                self._first_output_at[request_id] = request.num_tokens
            self._crossing[request_id] = due
            self._watch.is_due = True
            self._watch.await_tokens(request, None)
            return
        computed, num_prompt = request.num_computed_tokens, request.num_prompt_tokens
        # The next block's end behind the prompt.
        past = computed if computed >= num_prompt else num_prompt - 1
        due = past - past % self.block_size + self.block_size
        if self.copies is not None:
            if request.is_prefill_chunk:
                # Its prefill's end: copies are made from there on.
                due = min(due, request.num_tokens)
            else:
                self.copies.follow(request)
        self._watch.await_tokens(request, due)
        # A step that ends elsewhere leaves no state *at* a boundary: this skips
        # a prefill that runs over it (and what such a prefill exports beside it).
        if computed >= num_prompt and not computed % self.block_size:
            blocks = self._blocks_at(request_id, computed)
            if blocks is not None:
                self._pin(request, computed, blocks)

    def accept_outputs(self, requests: Mapping[str, Request]) -> None:
        """Promote the pins whose step's output was accepted.

        Call before ``schedule``; requests that ended since the last one are settled
        by :meth:`finish` already.
        """
        for request_id, checkpoint in list(self._pending.items()):
            request = requests[request_id]
            if executed_tokens(request) >= checkpoint.boundary:
                self._promote(request_id)
            elif request.num_computed_tokens < checkpoint.boundary:
                self._discard_pending(request_id, "rewound")
        for request_id in list(self._crossing):
            self._settle_crossing(requests[request_id])
        self._watch.is_due = bool(self._pending or self._crossing)

    def drop_rewound(self, requests: Mapping[str, Request]) -> None:
        """Discard what lies beyond the tokens a request still has.

        Call after anything that lowers ``num_computed_tokens`` of a running
        request (KV blocks that failed to load).
        """
        for held in (self._pending, self._promoted):
            for request_id, checkpoint in list(held.items()):
                request = requests.get(request_id)
                if request and request.num_computed_tokens < checkpoint.boundary:
                    del held[request_id]
                    self._watch.await_tokens(request, 0)
                    self._discard(checkpoint, "rewound")

    # -- memory pressure -----------------------------------------------------------

    def may_run_short(self, num_running: int) -> bool:
        """Whether a running request's allocation can fail in the coming step.

        Running requests allocate before anything is admitted; together they take
        at most the blocks of ``max_scheduled_tokens``, one each that is begun (more
        with drafts or exported prefill states), and the copies on write still due.
        """
        num_free = self._free_blocks.num_free_blocks
        if not self._promoted or num_free >= self.ample_blocks(num_running):
            return False
        need = self._step_blocks + num_running * self._blocks_per_request
        for manager in self._copying:
            need += len(manager._partial_hit_reqs)
        return num_free < need

    def ample_blocks(self, num_running: int) -> int:
        """With so many free blocks, :meth:`may_run_short` is False."""
        return self._step_blocks + num_running * self._most_per_request

    def relieve(self) -> bool:
        """Give back the oldest pin that really holds a block; False if none does.

        A block that the request's own table still references frees nothing.
        """
        for request_id, checkpoint in self._promoted.items():
            if any(block.ref_cnt == 1 for block in checkpoint.blocks):
                del self._promoted[request_id]
                self._discard(checkpoint, "memory_pressure")
                return True
        return False

    # -- the end of a request --------------------------------------------------------

    def finish(self, request: Request) -> None:
        """Settle and, if its ending publishes, publish; the pins stay.

        Call before ``_free_request`` frees the tables; :meth:`release` after.
        """
        ending = ENDING[request.status]
        self._settle(request)
        if ending in self._publish_on:
            self._publish_all(request, str(request.get_finished_reason()))
        elif self._tails is not None and self._tail_boundary(request):
            self._observer.not_published(request, DISCARD_REASON[ending])

    def release(self, request: Request) -> None:
        """Give back whatever is still pinned; call after ``_free_request``.

        A published state outlives its attention tail in the LRU order, since its
        reference goes last.
        """
        self._end(request.request_id, DISCARD_REASON[ENDING[request.status]])

    def preempt(self, request: Request, reason: str) -> None:
        """The request loses its blocks: so does its checkpoint.

        Call before ``_preempt_request``. ``reason``: ``preempted`` or
        ``cache_reset``. With ``preempt`` in ``publish_on`` a preempted request
        publishes, and so may find its own state again when it is resumed.
        """
        if reason == "preempted" and "preempt" in self._publish_on:
            self._settle(request)
            self._publish_all(request, None)
        self._end(request.request_id, reason, unaccepted=reason)
        if self.copies is not None and reason == "preempted":
            self.copies.note_preempted(request)

    def abandon(self, reason: str) -> None:
        """Discard every pin (``shutdown``, ``error``)."""
        pinned = list(self._held())
        for held in (self._pending, self._promoted, self._ended):
            held.clear()
        for checkpoint in pinned:
            self._release(checkpoint)
        if self.copies is not None:
            self.copies.drop_all(reason)
        for checkpoint in pinned:
            if not checkpoint.published_monotonic_ns:
                self._observer.discarded(checkpoint, reason)
        self._watch.stop()
        self._crossing.clear()
        self._first_output_at.clear()

    # -- what it holds -----------------------------------------------------------------

    def num_pinned_blocks(self) -> int:
        """Block references that pins hold now."""
        return sum(len(checkpoint.blocks) for checkpoint in self._held())

    def check_integrity(self, scheduler: Scheduler) -> IntegrityReport:
        """Add up every holder of every block and compare with its ``ref_cnt``.

        Holders are the requests' tables, copies in flight, deferred frees and our
        pins. Call between scheduler calls.

        Raises:
            IntegrityError: names each block whose count differs, or a pin of a
                request that is gone.
        """
        holders: Counter[int] = Counter()
        coordinator = self._manager.coordinator
        for manager in coordinator.single_type_managers:
            if manager.block_pool is not self._pool:
                continue
            for table in manager.req_to_blocks.values():
                holders.update(block.block_id for block in table)
            for source, destination in manager._pending_cow_copies:
                holders.update((source.block_id, destination.block_id))
        for _, blocks in scheduler.deferred_frees:
            holders.update(block.block_id for block in blocks)
        for checkpoint in self._held():
            holders.update(block.block_id for block in checkpoint.blocks)
        blocks = [block for block in self._pool.blocks if not block.is_null]
        wrong = [
            f"block {block.block_id}: ref_cnt {block.ref_cnt}, "
            f"{holders[block.block_id]} holders"
            for block in blocks
            if block.ref_cnt != holders[block.block_id]
        ]
        held = {*self._pending, *self._promoted, *self._watch, *self._crossing}
        if self.copies is not None:
            held |= self.copies.requests()
            wrong += [f"request {i} is copied too late" for i in self.copies.missed()]
        wrong += [f"request {i} is gone" for i in held - scheduler.requests.keys()]
        wrong += [f"request {i} is watched too late" for i in self._watch.missed()]
        num_free = self._pool.get_num_free_blocks()
        num_used = sum(block.ref_cnt > 0 for block in blocks)
        if num_free + num_used != len(blocks):
            wrong.append(f"{num_free} free + {num_used} used of {len(blocks)} blocks")
        if wrong:
            raise IntegrityError("; ".join(wrong))
        return IntegrityReport(
            num_pinned_checkpoints=sum(1 for _ in self._held()),
            num_pinned_blocks=self.num_pinned_blocks(),
            num_published_checkpoints=self._index.num_published(),
            num_free_blocks=num_free,
            num_used_blocks=num_used,
        )

    # -- one step down -----------------------------------------------------------------

    def _settle_crossing(self, request: Request) -> None:
        """Speculative decoding: did the accepted tokens cross the boundary?"""
        request_id = request.request_id
        executed = executed_tokens(request)
        first_output_at = self._first_output_at.get(request_id)
        if first_output_at is not None and executed < first_output_at:
            return
        due = self._crossing.pop(request_id)
        boundary = executed // self.block_size * self.block_size
        is_first = self._first_output_at.pop(request_id, None) is not None
        if boundary < due:
            self._watch.await_tokens(request, due)
            return
        self._watch.await_tokens(request, boundary + self.block_size)
        if is_first and self._exports_prefill_states and executed != boundary:
            return
        blocks = self._blocks_at(request_id, boundary)
        if blocks is not None:
            self._pin(request, boundary, blocks)
            self._promote(request_id)

    def _first_boundary(self, request: Request) -> int:
        """The first boundary of interest: stock vLLM looks after the prompt."""
        blocks = -(-request.num_prompt_tokens // self.block_size)
        return max(blocks, 1) * self.block_size

    def _blocks_at(
        self, request_id: str, boundary: int
    ) -> tuple[KVCacheBlock, ...] | None:
        """The block of each Mamba group that holds the state at ``boundary``."""
        blocks = []
        for manager in self._mamba:
            table = manager.req_to_blocks.get(request_id, ())
            column = boundary // manager.block_size - 1
            if column >= len(table) or table[column].is_null:
                return None
            blocks.append(table[column])
        return tuple(blocks)

    def _pin(
        self, request: Request, boundary: int, blocks: tuple[KVCacheBlock, ...]
    ) -> None:
        if request.request_id in self._pending:
            self._discard_pending(request.request_id, "superseded")
        checkpoint = Checkpoint(
            next(self._ids),
            self._observer.identity(request),
            boundary,
            events.DECODE_BLOCK,
            blocks,
        )
        self._pool.touch(blocks)
        self._pending[request.request_id] = checkpoint
        self._watch.is_due = True
        self._observer.pinned(checkpoint)

    def _promote(self, request_id: str) -> None:
        checkpoint = self._pending.pop(request_id)
        former = self._promoted.pop(request_id, None)
        self._promoted[request_id] = checkpoint
        if former is not None:
            self._release(former)
        self._observer.promoted(checkpoint, former)
        if former is not None:
            self._observer.discarded(former, "superseded")
        if self.copies is not None:
            self.copies.supersede(request_id, checkpoint.boundary)

    def _settle(self, request: Request) -> None:
        """Promote what has become true by the end of ``request``."""
        request_id = request.request_id
        if request_id in self._crossing:
            self._settle_crossing(request)
        pending = self._pending.get(request_id)
        materialized = self._materialized_tokens(request)
        if pending and materialized >= pending.boundary:
            self._promote(request_id)
        if self.copies is not None:
            self.copies.settle(request_id, materialized)

    def _materialized_tokens(self, request: Request) -> int:
        """Tokens whose state any later step will find in the blocks.

        With exact tails this includes the step in flight (asynchronous scheduling
        has run one step past the stop token): a reader's forward is queued behind
        it. Not so with a KV connector, which reads out of that order; there, exact
        tails are off.
        """
        if self._tails is None:
            return executed_tokens(request)
        if request.num_computed_tokens > request.num_tokens:
            return executed_tokens(request)
        return request.num_computed_tokens

    def _publish_all(self, request: Request, finish_reason: str | None) -> None:
        if request.request_id in self._promoted:
            self._publish(request, finish_reason)
        if self.copies is not None:
            self._publish_copy(request, finish_reason)
        if self._tails is not None:
            self._publish_tail(request, finish_reason)

    def _tail_boundary(self, request: Request) -> int | None:
        """Where ``request`` would leave an exact tail; None if nowhere.

        Not inside the prompt, not on a block edge (which the block-aligned
        checkpoint serves), and not past the tokens it kept: a step that ran ahead
        of the stop by more than one has consumed a token that is not part of it.
        """
        boundary = request.num_computed_tokens
        if request.resumable or request.pooling_params is not None:
            return None
        if not max(request.num_prompt_tokens, 1) <= boundary <= request.num_tokens:
            return None
        return boundary if boundary % self.block_size else None

    def _publish_tail(self, request: Request, finish_reason: str | None) -> None:
        """Keep the running blocks themselves as the checkpoint at their position."""
        assert self._tails is not None
        boundary = self._tail_boundary(request)
        if boundary is None:
            return
        blocks = []
        for manager in (*self._mamba, *self._attention):
            table = manager.req_to_blocks.get(request.request_id, ())
            column = (boundary - 1) // manager.block_size
            if column >= len(table) or table[column].is_null:
                return
            blocks.append(table[column])
        checkpoint = Checkpoint(
            next(self._ids),
            self._observer.identity(request),
            boundary,
            events.EXACT_TAIL,
            tuple(blocks),
        )
        self._pool.touch(blocks)
        self._hold(request, checkpoint)
        self._observer.pinned(checkpoint)
        self._observer.promoted(checkpoint, None)
        if any(block.block_hash is not None for block in blocks[: len(self._mamba)]):
            # Its prompt's tail, at this very position: no step has advanced it.
            self._let_go(request, checkpoint, "already_cached")
            return
        self._cache_attention(request, boundary, boundary)
        self._tails.insert(request, checkpoint)
        self._index.publish(checkpoint)
        self._observer.published(checkpoint, finish_reason, None)

    def _is_at_a_copy(self, request: Request) -> bool:
        """Whether the running blocks of an ending request hold what its next step would
        have copied."""
        assert self.copies is not None
        boundary = request.num_computed_tokens
        if request.resumable or request.pooling_params is not None:
            return False
        if not request.num_prompt_tokens <= boundary:
            return False
        if boundary > self._materialized_tokens(request):
            return False
        return self.copies.is_at_a_copy(boundary)

    def _publish_copy(self, request: Request, finish_reason: str | None) -> None:
        """Enter the newest rolling copy, which lies on the hash grid, into the cache.

        The attention block it ends in stays valid for the shallower keys it has
        (the prompt's tail), since it is append-only: they are kept.
        """
        assert self.copies is not None
        checkpoint = None
        if self._is_at_a_copy(request):
            checkpoint = self.copies.take_live(request, request.num_computed_tokens)
        if checkpoint is not None:
            self._hold(request, checkpoint)
            self._observer.pinned(checkpoint)
            self._observer.promoted(checkpoint, None)
            self.copies.drop(request.request_id, "superseded")
        else:
            checkpoint = self.copies.take(request.request_id)
            if checkpoint is None:
                return
            self._hold(request, checkpoint)
        boundary = checkpoint.boundary
        if any(block.block_hash is not None for block in checkpoint.blocks):
            self._let_go(request, checkpoint, "already_cached")
            return
        self._cache_attention(request, boundary, self._materialized_tokens(request))
        block_hash = request.block_hashes[boundary // self._pool.hash_block_size - 1]
        for manager in self._attention:
            table = manager.req_to_blocks[request.request_id]
            block = table[(boundary - 1) // manager.block_size]
            # vLLM would drop the keys of a block that it takes for shallower.
            shallower, block._block_hash_num_tokens = block.block_hash_num_tokens, None
            self._cache_partial(request, manager, block, boundary)
            if shallower is not None:
                block._block_hash_num_tokens = shallower
        for manager, block in zip(self._mamba, checkpoint.blocks, strict=True):
            self._cache_partial(request, manager, block, boundary)
        self._index.publish(checkpoint)
        self._observer.published(
            checkpoint, finish_reason, maybe_convert_block_hash(block_hash)
        )

    def _cache_partial(
        self,
        request: Request,
        manager: SingleTypeKVCacheManager,
        block: KVCacheBlock,
        boundary: int,
    ) -> None:
        self._pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=boundary,
            kv_cache_group_id=manager.kv_cache_group_id,
            block_size=manager.block_size,
        )

    def _cache_attention(self, request: Request, boundary: int, executed: int) -> None:
        """Hash the attention blocks below ``boundary`` if some are not yet.

        Drafts accepted in the last step may cross a boundary after the last
        allocation hashed the attention blocks.
        """
        for manager in self._attention:
            num_full = boundary // manager.block_size
            if manager.num_cached_block.get(request.request_id, 0) < num_full:
                self._manager.cache_blocks(request, executed)
                return

    def _publish(self, request: Request, finish_reason: str | None) -> None:
        """Enter the promoted checkpoint into the prefix cache."""
        request_id = request.request_id
        checkpoint = self._promoted[request_id]
        boundary = checkpoint.boundary
        materialized = self._materialized_tokens(request)
        if boundary > materialized:
            del self._promoted[request_id]
            self._discard(checkpoint, "rewound")
            return
        # This may cache the state as well, where a positive retention interval
        # keeps this boundary: so look at the blocks afterwards.
        self._cache_attention(request, boundary, materialized)
        fresh = [
            (manager, block)
            for manager, block in zip(self._mamba, checkpoint.blocks, strict=True)
            if block.block_hash_num_tokens != boundary
        ]
        if not fresh:
            del self._promoted[request_id]
            self._discard(checkpoint, "already_cached")
            return
        null = self._pool.null_block
        for manager, block in fresh:
            end = boundary // manager.block_size
            self._pool.cache_full_blocks(
                request,
                [null] * (end - 1) + [block],
                end - 1,
                end,
                manager.block_size,
                manager.kv_cache_group_id,
            )
        self._index.publish(checkpoint)
        block_hash = request.block_hashes[boundary // self._pool.hash_block_size - 1]
        self._observer.published(
            checkpoint, finish_reason, maybe_convert_block_hash(block_hash)
        )

    def _end(
        self, request_id: str, reason: str, unaccepted: str = "unaccepted"
    ) -> None:
        """Release every pin of a request: discarded, unless it was published."""
        self._forget(request_id)
        if request_id in self._pending:
            self._discard_pending(request_id, unaccepted)
        checkpoint = self._promoted.pop(request_id, None)
        if checkpoint is not None and checkpoint.published_monotonic_ns:
            self._release(checkpoint)
        elif checkpoint is not None:
            self._discard(checkpoint, reason)
        self._release_ended(request_id)
        if self.copies is not None:
            self.copies.drop(request_id, reason, unaccepted)
            self.copies.forget(request_id)

    def _hold(self, request: Request, checkpoint: Checkpoint) -> None:
        """Keep a referenced checkpoint of an ending request until its release."""
        self._ended.setdefault(request.request_id, []).append(checkpoint)

    def _let_go(self, request: Request, checkpoint: Checkpoint, reason: str) -> None:
        self._ended[request.request_id].remove(checkpoint)
        self._discard(checkpoint, reason)

    def _release_ended(self, request_id: str) -> None:
        for checkpoint in self._ended.pop(request_id, ()):
            self._release(checkpoint)

    def _discard_pending(self, request_id: str, reason: str) -> None:
        self._discard(self._pending.pop(request_id), reason)

    def _discard(self, checkpoint: Checkpoint, reason: str) -> None:
        self._release(checkpoint)
        self._observer.discarded(checkpoint, reason)

    def _release(self, checkpoint: Checkpoint) -> None:
        self._pool.free_blocks(checkpoint.blocks)

    def _forget(self, request_id: str) -> None:
        self._watch.forget(request_id)
        self._crossing.pop(request_id, None)
        self._first_output_at.pop(request_id, None)

    def _held(self) -> Iterable[Checkpoint]:
        """All but rolling copies, whose spares count as free."""
        return itertools.chain(
            self._pending.values(), self._promoted.values(), *self._ended.values()
        )


def mamba_align_managers(
    kv_cache_manager: KVCacheManager,
) -> list[MambaManager]:
    """The Mamba groups of the pool whose states a block boundary can hold."""
    return [
        manager
        for manager in kv_cache_manager.coordinator.single_type_managers
        if isinstance(manager, MambaManager)
        and manager.mamba_cache_mode == "align"
        and manager.kv_cache_spec.prefix_cacheable
        and manager.block_pool is kv_cache_manager.block_pool
    ]


def why_unsupported(kv_cache_manager: KVCacheManager) -> str | None:
    """Why no checkpoint can be retained in this engine; None if one can.

    The engine's own last look, after ``vllm_fork.support`` judged the
    configuration in the front end.
    """
    if not kv_cache_manager.enable_caching:
        return "unsupported:prefix_caching_off"
    if not mamba_align_managers(kv_cache_manager):
        return "unsupported:no_align_mamba_groups"
    if kv_cache_manager.coordinator.retention_interval is None:
        return "unsupported:dense_retention"
    return None


def why_no_exact_tail(
    kv_cache_manager: KVCacheManager, num_speculative_tokens: int, has_connector: bool
) -> str | None:
    """Why exact tails cannot be kept where checkpoints can; None if they can."""
    if num_speculative_tokens:
        # The accepted state sits in a scratch block, not in the running one.
        return "unsupported:speculative"
    if has_connector:
        # It reads blocks out of the order in which steps write them.
        return "unsupported:kv_connector"
    managers = [
        manager
        for manager in kv_cache_manager.coordinator.single_type_managers
        if manager.kv_cache_spec.prefix_cacheable
    ]
    mamba = mamba_align_managers(kv_cache_manager)
    rest = [manager for manager in managers if manager not in mamba]
    if any(type(manager) is not FullAttentionManager for manager in rest):
        return "unsupported:attention_kind"
    if len({manager.block_size for manager in managers}) != 1:
        return "unsupported:block_sizes"
    return None


def why_no_copies(
    kv_cache_manager: KVCacheManager,
    num_speculative_tokens: int,
    has_connector: bool,
    copy_interval: int,
) -> str | None:
    """Why rolling copies cannot be made where checkpoints can; None if they can."""
    reason = why_no_exact_tail(kv_cache_manager, num_speculative_tokens, has_connector)
    if reason is not None:
        return reason
    if not kv_cache_manager.coordinator.enable_partial_hash_hits:
        # A prefix is looked up at block ends only.
        return "unsupported:prefix_match_unit"
    if copy_interval % kv_cache_manager.block_pool.hash_block_size:
        return "unsupported:copy_interval"
    return None
