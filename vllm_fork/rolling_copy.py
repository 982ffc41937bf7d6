"""Rolling copies: finer decode checkpoints, every ``copy_interval`` tokens.

While a request decodes, its recurrent state is overwritten with each token. Every
``copy_interval`` tokens the running block of each Mamba group is copied into a spare
block through vLLM's own block-copy list, which the worker runs before the step's
forward pass. So a request that ends by length or is aborted, or a conversation that
diverges later, can resume from the newest copy.

Why at schedule time: the copy has to be queued for the step whose forward pass
overwrites the state. At output time that step is already on its way under
asynchronous scheduling.

Ownership of a spare: taken from the free blocks after every allocation of the step,
referenced while its copy is in the list, then *parked*
(``BlockPool.unpin_blocks``): it counts as free, nobody references it, and a watcher
tells when the pool hands it out, which discards the checkpoint in it. A spare
therefore never costs a running request a block. One spare a group and request; the
next copy overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fork import events
from vllm_fork.checkpoint import Checkpoint, RequestIdentity
from vllm_fork.observer import Observer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Spare:
    """The spare blocks of one request, one a Mamba group, and what they hold.

    ``watcher`` is told when the pool hands one of them out.
    """

    blocks: tuple[KVCacheBlock, ...]
    watcher: Callable[[KVCacheBlock], None]
    checkpoint: Checkpoint
    parked: bool = False


class RollingCopies:
    """Queues, parks and hands out the rolling copies of one scheduler.

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
        self._spares: dict[str, _Spare] = {}
        self._unpromoted: dict[str, _Spare] = {}
        self._unparked: dict[str, _Spare] = {}
        self.due: dict[str, int] = {}
        """The position a request's running blocks hold until its next step: what
        :meth:`queue` has to look at."""
        self._closed = False
        self._watcher_error: Exception | None = None

    def mark_due(self, request_id: str, boundary: int) -> None:
        """The step just scheduled leaves the state at ``boundary`` in the running
        blocks; the next one has to copy it first."""
        self.due[request_id] = boundary

    def queue(
        self, requests: Mapping[str, Request], scheduled: Mapping[str, int]
    ) -> None:
        """Queue the copies that the step being scheduled has to run first.

        Call after the step's allocations and before its copies are drained
        (``_make_cached_request_data``); ``num_computed_tokens`` does not count the
        step yet. ``requests`` are the scheduler's, by id.
        """
        for request_id in list(self.due):
            if request_id in scheduled:
                boundary = self.due.pop(request_id)
                request = requests[request_id]
                if request.num_computed_tokens == boundary:
                    self._queue_one(request, boundary)

    def park(self) -> None:
        """Let the pool count the spares as free again; call after ``schedule``.

        Raises what a watcher met since, which must not escape into vLLM's pool.
        """
        if self._watcher_error is not None:
            raise self._watcher_error
        for spare in self._unparked.values():
            self._pool.unpin_blocks(spare.blocks, spare.watcher)
            spare.parked = True
        self._unparked.clear()

    @property
    def any_open(self) -> bool:
        """Whether :meth:`queue` or :meth:`accept` has anything to look at."""
        return bool(self.due or self._unpromoted)

    def accept(self, executed: Callable[[str], int]) -> None:
        """Promote the copies whose state's step was accepted.

        ``executed`` tells a request's executed tokens.
        """
        for request_id, spare in list(self._unpromoted.items()):
            if executed(request_id) >= spare.checkpoint.boundary:
                self._promote(request_id, spare)

    def settle(self, request_id: str, materialized: int) -> None:
        """As :meth:`accept`, for one request with ``materialized`` tokens."""
        spare = self._unpromoted.get(request_id)
        if spare is not None and materialized >= spare.checkpoint.boundary:
            self._promote(request_id, spare)

    def supersede(self, request_id: str, boundary: int) -> None:
        """A deeper checkpoint of the request was promoted."""
        spare = self._spares.get(request_id)
        if spare is not None and spare.checkpoint.boundary <= boundary:
            self.drop(request_id, "superseded")

    def take_live(self, request: Request, materialized: int) -> Checkpoint | None:
        """A checkpoint of the running blocks of an ending request, referenced.

        None unless it ends right at a boundary, where no copy was queued yet. The
        caller releases one reference to each block.
        """
        boundary = self.due.get(request.request_id)
        if boundary is None or request.num_computed_tokens != boundary:
            return None
        if boundary > materialized:
            return None
        blocks = self._running_blocks(request.request_id, boundary)
        if blocks is None:
            return None
        owner = self._observer.identity(request)
        self._pool.touch(blocks)
        return self._checkpoint(owner, boundary, blocks)

    def take(self, request_id: str) -> Checkpoint | None:
        """The newest accepted copy of a request, referenced; None if it has none.

        The caller releases one reference to each block.
        """
        if request_id not in self._spares or request_id in self._unpromoted:
            return None
        return self._take_out(request_id).checkpoint

    def drop(self, request_id: str, reason: str, unaccepted: str | None = None) -> None:
        """Discard what a request has, and give its spare back.

        ``unaccepted``: the reason where its state's step was not accepted yet.
        """
        self.due.pop(request_id, None)
        if request_id not in self._spares:
            return
        if unaccepted is not None and request_id in self._unpromoted:
            reason = unaccepted
        spare = self._take_out(request_id)
        self._pool.free_blocks(spare.blocks)
        self._observer.discarded(spare.checkpoint, reason)

    def drop_beyond(self, computed: Callable[[str], int]) -> None:
        """Discard the copies beyond a request's ``computed`` tokens."""
        for request_id, spare in list(self._spares.items()):
            if computed(request_id) < spare.checkpoint.boundary:
                self.drop(request_id, "rewound")

    def drop_all(self, reason: str) -> None:
        """Discard every copy, and make no more."""
        self._closed = True
        self.due.clear()
        spares = [self._take_out(request_id) for request_id in list(self._spares)]
        for spare in spares:
            self._pool.free_blocks(spare.blocks)
        for spare in spares:
            self._observer.discarded(spare.checkpoint, reason)

    def referenced(self) -> Iterable[Checkpoint]:
        """Copies whose spares are referenced now: none, between two steps."""
        return (spare.checkpoint for spare in self._unparked.values())

    def requests(self) -> set[str]:
        """Ids of the requests that have a copy, or are due for one."""
        return {*self._spares, *self.due}

    def _promote(self, request_id: str, spare: _Spare) -> None:
        del self._unpromoted[request_id]
        self._observer.promoted(spare.checkpoint, None)

    def _queue_one(self, request: Request, boundary: int) -> None:
        request_id = request.request_id
        sources = self._running_blocks(request_id, boundary)
        if sources is None:
            return
        spare = self._spares.get(request_id)
        if spare is not None:
            self._unpark(spare)
            former = spare.checkpoint
            self._observer.discarded(former, "superseded")
            checkpoint = self._checkpoint(former.owner, boundary, spare.blocks)
            spare.checkpoint = checkpoint
        elif self._pool.get_num_free_blocks() >= len(sources):
            owner = self._observer.identity(request)
            blocks = tuple(self._pool.get_new_blocks(len(sources)))
            if self._closed:  # an eviction just now went wrong
                self._pool.free_blocks(blocks)
                return
            checkpoint = self._checkpoint(owner, boundary, blocks)
            spare = _Spare(blocks, self._watcher(request_id), checkpoint)
            self._spares[request_id] = spare
        else:
            return
        self._unpromoted[request_id] = self._unparked[request_id] = spare
        for manager, source, copy in zip(
            self._mamba, sources, spare.blocks, strict=True
        ):
            # The scheduler releases one reference to each end when it drains the
            # list (``_free_cow_retained_blocks``).
            source.ref_cnt += 1
            copy.ref_cnt += 1
            manager._pending_cow_copies.append((source, copy))
        self._observer.pinned(checkpoint)

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

    def _checkpoint(
        self, owner: RequestIdentity, boundary: int, blocks: tuple[KVCacheBlock, ...]
    ) -> Checkpoint:
        return Checkpoint(next(self._ids), owner, boundary, events.COPY, blocks)

    def _take_out(self, request_id: str) -> _Spare:
        """Forget a spare; the caller holds one reference to each of its blocks."""
        spare = self._spares.pop(request_id)
        self._unpromoted.pop(request_id, None)
        self._unparked.pop(request_id, None)
        self._unpark(spare)
        return spare

    def _unpark(self, spare: _Spare) -> None:
        """Take a spare's blocks back from the free ones, if they are there."""
        if spare.parked:
            spare.parked = False
            for block in spare.blocks:
                del self._pool._reuse_watchers[block.block_id]
            self._pool.touch(spare.blocks)

    def _watcher(self, request_id: str) -> Callable[[KVCacheBlock], None]:
        def handed_out(block: KVCacheBlock) -> None:
            try:
                self._lose(request_id, block)
            except Exception as error:
                self._spares.pop(request_id, None)
                self._watcher_error = error

        return handed_out

    def _lose(self, request_id: str, block: KVCacheBlock) -> None:
        """The pool hands out ``block``: what the request's spare holds is gone."""
        spare = self._spares.pop(request_id)
        self._unpromoted.pop(request_id, None)
        for other in spare.blocks:
            if other is not block:
                self._pool._reuse_watchers.pop(other.block_id, None)
        self._observer.discarded(spare.checkpoint, "memory_pressure")
