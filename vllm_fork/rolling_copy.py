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
copies are made). One spare a group and request; the next copy overwrites it, and puts
it behind all other free blocks again.

A free block may hold a cached prefix, which taking it evicts. While a preempted request
waits to come back, what is cached of it is worth more than a copy: none is made then,
and whoever is due for one gives its spare back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import RequestStatus

from vllm_fork import events
from vllm_fork.checkpoint import Checkpoint, RequestIdentity
from vllm_fork.observer import Observer
from vllm_fork.step_watch import StepWatch

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.request import Request


@dataclass(slots=True, eq=False)
class _Followed:
    """One decoding request and its copy.

    All that a copy needs in one place: with many running requests nothing of it is in
    the processor's caches when its turn comes.
    """

    request: Request
    owner: RequestIdentity
    tables: tuple[list[KVCacheBlock], ...]
    """Its block table in each Mamba group, vLLM's own."""
    boundary: int
    """Where its next copy is due, in tokens."""
    turn: int = 0
    """The step of its one turn, before which it cannot get there."""
    newest: Checkpoint | None = None
    """Its copy; the blocks are the spare."""
    is_accepted: bool = True
    """Whether the step that made the newest copy's state was accepted."""
    sources: Sequence[KVCacheBlock] = ()
    """The running blocks when ``copies`` were made."""
    copies: Sequence[KVCacheBlockCopy] = ()
    """From the running blocks to the spare: the same until a block is full."""
    num_superseded: int = 0
    """Copies that a later one overwrote."""


class RollingCopies:
    """Makes and hands out the rolling copies of one scheduler.

    Args:
        pool: the block pool.
        mamba: managers of the recurrent groups, whose blocks are of one size.
        interval: tokens between copies, a multiple of the hash unit.
        ids: where checkpoint ids come from.
        observer: told of each stage.
        watch: where turns are noted.
    """

    def __init__(
        self,
        pool: BlockPool,
        mamba: Sequence[MambaManager],
        interval: int,
        ids: Iterator[int],
        observer: Observer,
        watch: StepWatch,
    ) -> None:
        self.interval = interval
        self._pool = pool
        self._mamba = mamba
        self._block_size = mamba[0].block_size
        self._ids = ids
        self._observer = observer
        self._watch = watch
        self._turns = watch.turns
        self._followed: dict[str, _Followed] = {}
        # Those of them whose newest copy's step was not accepted yet; also some that
        # lost that copy since, or twice.
        self._unaccepted: list[_Followed] = []
        # Requests that were preempted. Those that are back or gone go at a next look.
        self._displaced: dict[str, Request] = {}
        self.took_spare = False
        """Whether the last :meth:`take_turns` took a new spare."""
        self._closed = False
        self._watcher_error: Exception | None = None

    def follow(self, request: Request) -> None:
        """Copy the states of ``request``, which decodes a token a step from here on.

        Call after the step that ends its prefill; ``num_computed_tokens`` count it.
        Does nothing for a request that is followed already, nor where each copy would
        be at the end of a block.
        """
        request_id = request.request_id
        is_needless = self.interval % self._block_size == 0
        if self._closed or is_needless or request_id in self._followed:
            return
        computed = request.num_computed_tokens
        followed = _Followed(
            request,
            self._observer.identity(request),
            tuple(manager.req_to_blocks[request_id] for manager in self._mamba),
            self._next_due(computed),
        )
        self._followed[request_id] = followed
        self._await(followed, computed)

    def forget(self, request_id: str) -> None:
        """The request decodes no more; what it has is dropped or taken already."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        others = self._turns.get(followed.turn)
        if others is not None and followed in others:
            # An empty turn stays: it may be the one that promotes what is accepted.
            others.remove(followed)
        if followed.num_superseded:
            self._observer.superseded(request_id, followed.num_superseded)

    def take_turns(self) -> list[KVCacheBlockCopy]:
        """The copies that the step just scheduled has to run first, since it overwrites
        their states. Call after a ``schedule`` whose step has a turn.

        There is none while a preempted request waits, nor for a request without a
        spare while no block is free. A new spare may be handed on within the step: of
        two copies to one block the last is meant, see ``took_spare``.

        Raises what a watcher met since, which must not escape into vLLM's pool.
        """
        if self._watcher_error is not None:
            raise self._watcher_error
        now = self._watch.num_steps
        turns = self._turns.pop(now)
        if self._unaccepted:
            self._accept()
        self.took_spare = False
        may_copy = not (self._displaced and self._is_anyone_displaced())
        copies: list[KVCacheBlockCopy] = []
        for followed in turns:
            computed = followed.request.num_computed_tokens
            boundary = followed.boundary
            if computed > boundary:
                followed.boundary = self._next_due(computed)
            self._await(followed, computed)
            if computed != boundary + 1:
                continue
            if not may_copy:
                self._drop(followed, "memory_pressure")
                continue
            copies += self._copy(followed, boundary)
            if self._closed:  # an eviction that it caused went wrong
                return []
        if self._unaccepted and now + 1 not in self._turns:
            self._turns[now + 1] = []
        return copies

    def note_preempted(self, request: Request) -> None:
        """``request`` gives its blocks to others: see the module."""
        self._is_anyone_displaced()
        self._displaced[request.request_id] = request

    def settle(self, request_id: str, materialized: int) -> None:
        """Promote what ``request_id``, with ``materialized`` tokens, has of a copy."""
        followed = self._followed.get(request_id)
        if followed is None or followed.is_accepted:
            return
        assert followed.newest is not None
        if materialized >= followed.newest.boundary:
            self._promote(followed)

    def supersede(self, request_id: str, boundary: int) -> None:
        """A deeper checkpoint of the request was promoted."""
        followed = self._followed.get(request_id)
        newest = followed and followed.newest
        if newest and newest.boundary <= boundary:
            self.drop(request_id, "superseded")

    def is_at_a_copy(self, boundary: int) -> bool:
        """Whether the state there is copied: at the end of a block, another checkpoint
        keeps it."""
        return boundary % self.interval == 0 and boundary % self._block_size != 0

    def take_live(self, request: Request, boundary: int) -> Checkpoint | None:
        """A checkpoint of the running blocks of an ending request, which hold the state
        at ``boundary``, referenced; None if one is missing.

        The caller releases one reference to each block.
        """
        request_id = request.request_id
        tables = [manager.req_to_blocks.get(request_id, ()) for manager in self._mamba]
        blocks = self._running_blocks(tables, boundary)
        if blocks is None:
            return None
        owner = self._observer.identity(request)
        self._pool.touch(blocks)
        return Checkpoint(next(self._ids), owner, boundary, events.COPY, blocks)

    def take(self, request_id: str) -> Checkpoint | None:
        """The newest accepted copy of a request, referenced; None if it has none.

        The caller releases one reference to each block.
        """
        followed = self._followed.get(request_id)
        if followed is None or not followed.is_accepted:
            return None
        return self._take_out(followed)

    def drop(self, request_id: str, reason: str, unaccepted: str | None = None) -> None:
        """Discard what a request has, and give its spare back.

        ``unaccepted``: the reason where its state's step was not accepted yet.
        """
        followed = self._followed.get(request_id)
        if followed is None:
            return
        if not followed.is_accepted and not self._promote_if_accepted(followed):
            reason = unaccepted or reason
        self._drop(followed, reason)

    def drop_all(self, reason: str) -> None:
        """Discard every copy, and make no more."""
        self._closed = True
        taken = [self._take_out(followed) for followed in self._followed.values()]
        for checkpoint in taken:
            if checkpoint is not None:
                self._pool.free_blocks(checkpoint.blocks)
        for checkpoint in taken:
            if checkpoint is not None:
                self._observer.discarded(checkpoint, reason)
        for request_id in list(self._followed):
            self.forget(request_id)

    def requests(self) -> set[str]:
        """Ids of the requests that are followed."""
        return set(self._followed)

    def missed(self) -> list[str]:
        """Ids of running requests whose turn is missing or late; call between steps."""
        return [
            request_id
            for request_id, followed in self._followed.items()
            if followed.request.status == RequestStatus.RUNNING
            and not (
                followed in self._turns.get(followed.turn, ())
                and self._watch.num_steps
                < followed.turn
                <= self._watch.num_steps
                + max(followed.boundary + 1 - followed.request.num_computed_tokens, 1)
            )
        ]

    # -- one step down -----------------------------------------------------------------

    def _next_due(self, computed: int) -> int:
        """The first position at or behind ``computed`` whose state is to be copied."""
        boundary = -(-computed // self.interval) * self.interval
        if boundary % self._block_size == 0:
            return boundary + self.interval
        return boundary

    def _await(self, followed: _Followed, computed: int) -> None:
        """Note the turn: the step that runs the first token behind the boundary."""
        followed.turn = turn = self._watch.num_steps + followed.boundary + 1 - computed
        if turn in self._turns:
            self._turns[turn].append(followed)
        else:
            self._turns[turn] = [followed]

    def _copy(self, followed: _Followed, boundary: int) -> Sequence[KVCacheBlockCopy]:
        """The copies, one a Mamba group, of the state at ``boundary``."""
        former = followed.newest
        if former is None or not self._runs_as_before(followed, boundary):
            blocks = self._aim(followed, boundary)
            if blocks is None:
                return ()
        else:
            blocks = former.blocks
        checkpoint = Checkpoint(
            next(self._ids), followed.owner, boundary, events.COPY, blocks
        )
        followed.newest = checkpoint
        if followed.is_accepted:
            followed.is_accepted = False
            self._unaccepted.append(followed)
        if former is None:
            self._pool.unpin_blocks(blocks, self._watcher(followed))
        else:
            followed.num_superseded += 1
            self._keep_longest(blocks)
        self._observer.rolled(checkpoint, former)
        return followed.copies

    def _runs_as_before(self, followed: _Followed, boundary: int) -> bool:
        """Whether the state at ``boundary`` is in the blocks that the former copy was
        made from."""
        column = (boundary - 1) // self._block_size
        for table, source in zip(followed.tables, followed.sources, strict=True):
            if column >= len(table) or table[column] is not source:
                return False
        return True

    def _aim(
        self, followed: _Followed, boundary: int
    ) -> tuple[KVCacheBlock, ...] | None:
        """Let the copies lead from the running blocks to the spare, which is returned;
        None if one is missing. A new spare is referenced."""
        sources = self._running_blocks(followed.tables, boundary)
        if sources is None:
            return None
        former = followed.newest
        blocks = former.blocks if former else self._take_free(len(sources))
        if blocks is None:
            return None
        followed.sources = sources
        followed.copies = [
            KVCacheBlockCopy(source.block_id, spare.block_id)
            for source, spare in zip(sources, blocks, strict=True)
        ]
        return blocks

    def _accept(self) -> None:
        """Promote the copies whose state's step was accepted."""
        waiting, self._unaccepted = self._unaccepted, []
        for followed in waiting:
            # Not if it was dropped or settled since.
            if not followed.is_accepted and not self._promote_if_accepted(followed):
                self._unaccepted.append(followed)

    def _promote_if_accepted(self, followed: _Followed) -> bool:
        """Promote the newest copy if its state's step was accepted; return whether."""
        assert followed.newest is not None
        request = followed.request
        # There are no drafts here: it keeps all that it executed.
        executed = request.num_computed_tokens - request.num_in_flight_tokens
        if executed < followed.newest.boundary:
            return False
        self._promote(followed)
        return True

    def _promote(self, followed: _Followed) -> None:
        assert followed.newest is not None
        followed.is_accepted = True
        self._observer.promoted(followed.newest, None)

    def _drop(self, followed: _Followed, reason: str) -> None:
        checkpoint = self._take_out(followed)
        if checkpoint is not None:
            self._pool.free_blocks(checkpoint.blocks)
            self._observer.discarded(checkpoint, reason)

    def _take_free(self, count: int) -> tuple[KVCacheBlock, ...] | None:
        """Free blocks, referenced; None if there are not so many."""
        if self._pool.get_num_free_blocks() < count:
            return None
        self.took_spare = True
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
        self, tables: Sequence[Sequence[KVCacheBlock]], boundary: int
    ) -> tuple[KVCacheBlock, ...] | None:
        """The blocks that hold the state at ``boundary`` until the next step.

        None where one is missing. None is about to be filled by a copy: vLLM leaves
        a request that runs on the source of one.
        """
        column = (boundary - 1) // self._block_size
        blocks = []
        for table in tables:
            if column >= len(table) or table[column].is_null:
                return None
            blocks.append(table[column])
        return tuple(blocks)

    def _take_out(self, followed: _Followed) -> Checkpoint | None:
        """Forget a copy; the caller holds one reference to each of its blocks."""
        checkpoint, followed.newest = followed.newest, None
        followed.is_accepted = True
        if checkpoint is None:
            return None
        watchers = self._pool._reuse_watchers
        # One that could not be parked is referenced still.
        self._pool.touch(
            [block for block in checkpoint.blocks if watchers.pop(block.block_id, None)]
        )
        return checkpoint

    def _watcher(self, followed: _Followed) -> Callable[[KVCacheBlock], None]:
        def handed_out(block: KVCacheBlock) -> None:
            try:
                self._lose(followed, block)
            except Exception as error:
                followed.newest = None
                followed.is_accepted = True
                self._watcher_error = error

        return handed_out

    def _lose(self, followed: _Followed, block: KVCacheBlock) -> None:
        """The pool hands out ``block``: what the request's spare holds is gone."""
        if not followed.is_accepted:
            self._promote_if_accepted(followed)
        checkpoint, followed.newest = followed.newest, None
        followed.is_accepted = True
        assert checkpoint is not None
        for other in checkpoint.blocks:
            if other is not block:
                self._pool._reuse_watchers.pop(other.block_id, None)
        self._observer.discarded(checkpoint, "memory_pressure")
