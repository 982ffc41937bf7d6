"""Rolling copies: finer decode checkpoints, every ``copy_interval`` tokens.

While a request decodes, its recurrent state is overwritten with each token. Every
``copy_interval`` tokens the running block of each Mamba group is copied into a spare
block through vLLM's own block-copy list, which the worker runs before the step's
forward pass. So a request that ends by length or is aborted, or a conversation that
diverges later, can resume from the newest copy.

Why at schedule time: the copy has to go with the step whose forward pass overwrites
the state. At output time that step is already on its way under asynchronous
scheduling.

Ownership of a spare: taken from the free blocks after every allocation of the step and
*parked* at once (``BlockPool.unpin_blocks``): it counts as free, nobody references it,
and a watcher tells when the pool hands it out, which discards the checkpoint in it. A
spare therefore never costs a running request a block. Nor does a copy reference its
two ends while it is under way: whoever is given one of them writes to it in a later
step, and steps run in order (a KV connector may write out of that order; there, no
copies are made). One spare a group and request; the next copy overwrites it.

A free block may hold a cached prefix, which taking it evicts. While a preempted request
waits to come back, what is cached of it is worth more than a copy: none is made then,
and whoever is due for one gives its spare back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import RequestStatus

from vllm_fork import events
from vllm_fork.checkpoint import Checkpoint
from vllm_fork.observer import Observer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.request import Request


class RollingCopies:
    """Makes and hands out the rolling copies of one scheduler.

    Args:
        pool: the block pool.
        mamba: managers of the recurrent groups.
        interval: tokens between copies, a multiple of the hash unit.
        ids: where checkpoint ids come from.
        observer: told of each stage.
    """

    def __init__(
        self,
        pool: BlockPool,
        mamba: Sequence[MambaManager],
        interval: int,
        ids: Iterator[int],
        observer: Observer,
    ) -> None:
        self.interval = interval
        self._pool = pool
        self._mamba = mamba
        self._ids = ids
        self._observer = observer
        # By request; the spare blocks are those of the checkpoint.
        self._newest: dict[str, Checkpoint] = {}
        # Those of them whose state's step was not accepted yet.
        self._unpromoted: dict[str, tuple[Request, Checkpoint]] = {}
        # Requests that were preempted; those that are back go at the next look.
        self._displaced: dict[str, Request] = {}
        self._closed = False
        self._watcher_error: Exception | None = None

    def next_due(self, computed: int) -> int:
        """The first position at or behind ``computed`` whose state is to be copied."""
        return -(-computed // self.interval) * self.interval

    def is_due_at(self, boundary: int, block_size: int) -> bool:
        """Whether the state there is copied: at the end of a block, another checkpoint
        keeps it."""
        return boundary % self.interval == 0 and boundary % block_size != 0

    def copy(self, request: Request, boundary: int) -> Sequence[KVCacheBlockCopy]:
        """The copies, one a Mamba group, that the step just scheduled has to run first,
        since it overwrites the state at ``boundary``. Call after ``schedule``.

        None while a preempted request waits, or if there is no spare and no block is
        free. A new spare may be handed on within the step: of two copies to one block
        the last is meant.

        Raises what a watcher met since, which must not escape into vLLM's pool.
        """
        if self._watcher_error is not None:
            raise self._watcher_error
        request_id = request.request_id
        if self._displaced and self._is_anyone_displaced():
            self.drop(request_id, "memory_pressure")
            return ()
        sources = self._running_blocks(request_id, boundary)
        if sources is None:
            return ()
        former = self._newest.get(request_id)
        if former is not None:
            owner, blocks = former.owner, former.blocks
            self._keep_longest(blocks)
        else:
            owner = self._observer.identity(request)
            free = self._take_free(len(sources))
            if free is None:
                return ()
            blocks = free
        checkpoint = Checkpoint(next(self._ids), owner, boundary, events.COPY, blocks)
        self._newest[request_id] = checkpoint
        self._unpromoted[request_id] = request, checkpoint
        if former is None:
            self._pool.unpin_blocks(blocks, self._watcher(request_id))
        self._observer.rolled(checkpoint, former)
        return [
            KVCacheBlockCopy(source.block_id, spare.block_id)
            for source, spare in zip(sources, blocks, strict=True)
        ]

    def note_preempted(self, request: Request) -> None:
        """``request`` gives its blocks to others: see the module."""
        self._displaced[request.request_id] = request

    @property
    def any_unaccepted(self) -> bool:
        """Whether :meth:`accept` has anything to look at."""
        return bool(self._unpromoted)

    def accept(self) -> None:
        """Promote the copies whose state's step was accepted."""
        for request, checkpoint in list(self._unpromoted.values()):
            # There are no drafts here: it keeps all that it executed.
            executed = request.num_computed_tokens - request.num_in_flight_tokens
            if executed >= checkpoint.boundary:
                self._promote(checkpoint)

    def settle(self, request_id: str, materialized: int) -> None:
        """As :meth:`accept`, for one request with ``materialized`` tokens."""
        if request_id in self._unpromoted:
            _, checkpoint = self._unpromoted[request_id]
            if materialized >= checkpoint.boundary:
                self._promote(checkpoint)

    def supersede(self, request_id: str, boundary: int) -> None:
        """A deeper checkpoint of the request was promoted."""
        newest = self._newest.get(request_id)
        if newest is not None and newest.boundary <= boundary:
            self.drop(request_id, "superseded")

    def take_live(self, request: Request, boundary: int) -> Checkpoint | None:
        """A checkpoint of the running blocks of an ending request, which hold the state
        at ``boundary``, referenced; None if one is missing.

        The caller releases one reference to each block.
        """
        blocks = self._running_blocks(request.request_id, boundary)
        if blocks is None:
            return None
        owner = self._observer.identity(request)
        self._pool.touch(blocks)
        return Checkpoint(next(self._ids), owner, boundary, events.COPY, blocks)

    def take(self, request_id: str) -> Checkpoint | None:
        """The newest accepted copy of a request, referenced; None if it has none.

        The caller releases one reference to each block.
        """
        if request_id not in self._newest or request_id in self._unpromoted:
            return None
        return self._take_out(request_id)

    def drop(self, request_id: str, reason: str, unaccepted: str | None = None) -> None:
        """Discard what a request has, and give its spare back.

        ``unaccepted``: the reason where its state's step was not accepted yet.
        """
        if request_id not in self._newest:
            return
        if unaccepted is not None and request_id in self._unpromoted:
            reason = unaccepted
        checkpoint = self._take_out(request_id)
        self._pool.free_blocks(checkpoint.blocks)
        self._observer.discarded(checkpoint, reason)

    def drop_beyond(self, computed: Callable[[str], int]) -> None:
        """Discard the copies beyond a request's ``computed`` tokens."""
        for request_id, checkpoint in list(self._newest.items()):
            if computed(request_id) < checkpoint.boundary:
                self.drop(request_id, "rewound")

    def drop_all(self, reason: str) -> None:
        """Discard every copy, and make no more."""
        self._closed = True
        taken = [self._take_out(request_id) for request_id in list(self._newest)]
        for checkpoint in taken:
            self._pool.free_blocks(checkpoint.blocks)
        for checkpoint in taken:
            self._observer.discarded(checkpoint, reason)

    def requests(self) -> set[str]:
        """Ids of the requests that have a copy."""
        return set(self._newest)

    def _promote(self, checkpoint: Checkpoint) -> None:
        del self._unpromoted[checkpoint.owner.request_id]
        self._observer.promoted(checkpoint, None)

    def _take_free(self, count: int) -> tuple[KVCacheBlock, ...] | None:
        """Free blocks, referenced; None if there are not so many."""
        if self._pool.get_num_free_blocks() < count:
            return None
        blocks = tuple(self._pool.get_new_blocks(count))
        if self._closed:  # an eviction just now went wrong
            self._pool.free_blocks(blocks)
            return None
        return blocks

    def _is_anyone_displaced(self) -> bool:
        for request_id, request in list(self._displaced.items()):
            if request.status != RequestStatus.PREEMPTED:
                del self._displaced[request_id]
        return bool(self._displaced)

    def _keep_longest(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let the pool hand out parked blocks after all others."""
        queue = self._pool.free_block_queue
        for block in blocks:
            queue.remove(block)
            queue.append(block)

    def _running_blocks(
        self, request_id: str, boundary: int
    ) -> tuple[KVCacheBlock, ...] | None:
        """The blocks that hold the state at ``boundary`` until the next step.

        None where one is missing. None is about to be filled by a copy: vLLM leaves
        a request that runs on the source of one.
        """
        blocks = []
        for manager in self._mamba:
            table = manager.req_to_blocks.get(request_id, ())
            column = (boundary - 1) // manager.block_size
            if column >= len(table) or table[column].is_null:
                return None
            blocks.append(table[column])
        return tuple(blocks)

    def _take_out(self, request_id: str) -> Checkpoint:
        """Forget a copy; the caller holds one reference to each of its blocks."""
        checkpoint = self._newest.pop(request_id)
        self._unpromoted.pop(request_id, None)
        watchers = self._pool._reuse_watchers
        # One that could not be parked is referenced still.
        self._pool.touch(
            [block for block in checkpoint.blocks if watchers.pop(block.block_id, None)]
        )
        return checkpoint

    def _watcher(self, request_id: str) -> Callable[[KVCacheBlock], None]:
        def handed_out(block: KVCacheBlock) -> None:
            try:
                self._lose(request_id, block)
            except Exception as error:
                self._newest.pop(request_id, None)
                self._watcher_error = error

        return handed_out

    def _lose(self, request_id: str, block: KVCacheBlock) -> None:
        """The pool hands out ``block``: what the request's spare holds is gone."""
        checkpoint = self._newest.pop(request_id)
        self._unpromoted.pop(request_id, None)
        for other in checkpoint.blocks:
            if other is not block:
                self._pool._reuse_watchers.pop(other.block_id, None)
        self._observer.discarded(checkpoint, "memory_pressure")
