"""Who put the recurrent states there that the prefix cache serves now.

vLLM tells nobody when a block leaves the prefix cache (its KV events do, but they
are off by default, and ours must not depend on them). So this index follows the
pool itself: it wraps, on one pool *instance*, the four methods through which every
hash comes, goes or moves. It holds no reference to any block: an entry lives
exactly as long as the hash does, so there are at most as many as blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fork import events
from vllm_fork.checkpoint import Checkpoint, RequestIdentity

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True, eq=False)
class CachedState:
    """One cached recurrent state: what kind it is, and who left it.

    ``checkpoint`` is set when it is one of ours; ``owner`` is None when stock vLLM
    cached it for a request that the index was not told of.
    """

    kind: str
    owner: RequestIdentity | None
    boundary: int | None
    checkpoint: Checkpoint | None = None


class CacheIndex:
    """Maps block ids to :class:`CachedState`; reports evicted checkpoints.

    Args:
        pool: the pool to follow; its methods are wrapped on the instance.
        mamba_group_ids: KV-cache groups whose blocks hold recurrent state.
        on_evicted: called with a published checkpoint and one of
            ``events.EVICTION_REASONS`` when its first block leaves the cache.
    """

    def __init__(
        self,
        pool: BlockPool,
        mamba_group_ids: Iterable[int],
        on_evicted: Callable[[Checkpoint, str], None],
    ) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        self._get_block_hash = get_block_hash
        self._get_group_id = get_group_id
        self.mamba_group_ids = tuple(mamba_group_ids)
        self._groups = frozenset(self.mamba_group_ids)
        self._states: dict[int, CachedState] = {}
        self._expected: dict[bytes, tuple[str, RequestIdentity]] = {}
        self._expected_of: dict[str, list[bytes]] = {}
        self._on_evicted = on_evicted
        self._moving = False
        self._wrap(pool)

    def __len__(self) -> int:
        return len(self._states)

    def state_of(self, block: KVCacheBlock) -> CachedState | None:
        """What the prefix cache serves from ``block``; None if it is nothing."""
        return self._states.get(block.block_id)

    def expect(self, identity: RequestIdentity, kind: str, block_hash: bytes) -> None:
        """Tell whose prompt it is if stock vLLM caches a state under this hash."""
        if block_hash not in self._expected:
            self._expected[block_hash] = (kind, identity)
            self._expected_of.setdefault(identity.request_id, []).append(block_hash)

    def forget_expected(self, request_id: str) -> None:
        """The request ended: stock vLLM caches nothing more for it."""
        for block_hash in self._expected_of.pop(request_id, ()):
            self._expected.pop(block_hash, None)

    def publish(self, checkpoint: Checkpoint) -> None:
        """The checkpoint's hashes are in the cache now, for each of its blocks."""
        state = CachedState(
            checkpoint.boundary_kind, checkpoint.owner, checkpoint.boundary, checkpoint
        )
        for block in checkpoint.blocks:
            current = self._states.get(block.block_id)
            # An attention tail may end two requests; the deeper one is found by
            # the recurrent block, which belongs to one alone.
            if current is None or current.checkpoint is None:
                self._states[block.block_id] = state

    def num_published(self) -> int:
        """Published checkpoints that the cache still serves."""
        found = {id(s.checkpoint) for s in self._states.values() if s.checkpoint}
        return len(found)

    def _evict(self, state: CachedState, reason: str) -> None:
        checkpoint = state.checkpoint
        if checkpoint is None:
            return
        for block in checkpoint.blocks:
            if self._states.get(block.block_id) is state:
                del self._states[block.block_id]
        self._on_evicted(checkpoint, reason)

    def _wrap(self, pool: BlockPool) -> None:
        insert = pool._insert_block_hash
        remove = pool._remove_cached_block_hashes
        move = pool.move_block_hashes
        reset = pool.reset_prefix_cache
        states = self._states

        def insert_block_hash(block_hash_with_group_id, block, num_tokens):
            insert(block_hash_with_group_id, block, num_tokens=num_tokens)
            if (
                self._moving
                or block.block_id in states
                or self._get_group_id(block_hash_with_group_id) not in self._groups
            ):
                return
            expected = self._expected.get(
                self._get_block_hash(block_hash_with_group_id)
            )
            kind, owner = expected or (events.SHARED_PREFIX, None)
            states[block.block_id] = CachedState(kind, owner, num_tokens)

        def remove_cached_block_hashes(block):
            removed = remove(block)
            if removed and not self._moving:
                state = states.pop(block.block_id, None)
                if state is not None:
                    # Only a block nobody references is handed out anew; one that
                    # is referenced got a deeper hash instead.
                    self._evict(state, "lru" if block.ref_cnt == 0 else "replaced")
            return removed

        def move_block_hashes(src_block, dst_block):
            self._moving = True
            try:
                move(src_block, dst_block)
            finally:
                self._moving = False
            state = states.pop(src_block.block_id, None)
            if state is not None:
                states[dst_block.block_id] = state

        def reset_prefix_cache():
            done = reset()
            if done:
                left = list(dict.fromkeys(states.values()))
                states.clear()
                for state in left:
                    self._evict(state, "cache_reset")
            return done

        pool._insert_block_hash = insert_block_hash  # type: ignore[method-assign]
        pool._remove_cached_block_hashes = remove_cached_block_hashes  # type: ignore[method-assign]
        pool.move_block_hashes = move_block_hashes  # type: ignore[method-assign]
        pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
