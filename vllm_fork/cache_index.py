"""Who put the recurrent states there that the prefix cache serves now.

vLLM tells nobody when a block leaves the prefix cache (its KV events do, but they
are off by default, and ours must not depend on them). So this index follows the
pool itself: it wraps, on one pool *instance*, the methods through which a hash goes
or moves; not the one through which hashes come, which vLLM calls for every request
in every step. It holds no reference to any block.

States that stock vLLM caches are not tracked: whose prompt they stem from is found
when one of them is hit, by its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

from vllm_fork.checkpoint import Checkpoint, RequestIdentity

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock


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
    """Maps cached blocks to :class:`CachedState`; reports evicted checkpoints.

    Args:
        pool: the pool to follow; its methods are wrapped on the instance.
        mamba_group_ids: KV-cache groups whose blocks hold recurrent state.
        on_evicted: called with a published checkpoint and one of
            ``events.EVICTION_REASONS`` when its first block leaves the cache.
        guard: runs what the index does inside the pool's methods, where no error may
            escape.
    """

    def __init__(
        self,
        pool: BlockPool,
        mamba_group_ids: Iterable[int],
        on_evicted: Callable[[Checkpoint, str], None],
        guard: Callable[..., object],
    ) -> None:
        self.mamba_group_ids = tuple(mamba_group_ids)
        self._pool = pool
        self._published: dict[int, CachedState] = {}
        # Hash of a prompt's boundary -> what kind of state it is, and whose. The
        # oldest go first; there cannot be more of them cached than blocks.
        self._prompts: dict[bytes, CachedState] = {}
        self._max_prompts = max(1024, 4 * pool.num_gpu_blocks)
        self._on_evicted = on_evicted
        self._guard = guard
        self._moving = False
        self._wrap(pool)

    def __len__(self) -> int:
        return len(self._published)

    def state_of(self, block: KVCacheBlock) -> CachedState | None:
        """What the prefix cache serves from ``block``; None if nothing known."""
        published = self._published.get(block.block_id)
        if published is not None:
            return published
        keys = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
        for key in (block.block_hash, *keys):
            state = self._prompts.get(get_block_hash(key)) if key else None
            if state is not None:
                return state
        return None

    def expect(
        self, owner: RequestIdentity, kind: str, block_hash: BlockHash, boundary: int
    ) -> None:
        """Tell whose prompt it is if stock vLLM caches a state under this hash.

        Whoever left a state that is cached already remains its owner.
        """
        known = block_hash in self._prompts
        if known and self._pool.get_cached_block(block_hash, [self.mamba_group_ids[0]]):
            return
        self._prompts.pop(block_hash, None)
        self._prompts[block_hash] = CachedState(kind, owner, boundary)
        if len(self._prompts) > self._max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def publish(self, checkpoint: Checkpoint) -> None:
        """The checkpoint's hashes are in the cache now, for each of its blocks."""
        state = CachedState(
            checkpoint.boundary_kind, checkpoint.owner, checkpoint.boundary, checkpoint
        )
        for block in checkpoint.blocks:
            # An attention tail may end two requests; the deeper one is found by
            # the recurrent block, which belongs to one alone.
            self._published.setdefault(block.block_id, state)

    def num_published(self) -> int:
        """Published checkpoints that the cache still serves."""
        return len({id(state) for state in self._published.values()})

    def _evict(self, state: CachedState, reason: str) -> None:
        checkpoint = state.checkpoint
        assert checkpoint is not None
        for block in checkpoint.blocks:
            if self._published.get(block.block_id) is state:
                del self._published[block.block_id]
        self._on_evicted(checkpoint, reason)

    def _wrap(self, pool: BlockPool) -> None:
        remove = pool._remove_cached_block_hashes
        move = pool.move_block_hashes
        reset = pool.reset_prefix_cache
        published = self._published

        def remove_cached_block_hashes(block):
            removed = remove(block)
            if block.block_id in published and not self._moving:
                # Only a block nobody references is handed out anew; one that is
                # referenced got a deeper hash instead.
                reason = "lru" if block.ref_cnt == 0 else "replaced"
                self._guard(self._evict, published[block.block_id], reason)
            return removed

        def move_block_hashes(src_block, dst_block):
            self._moving = True
            try:
                move(src_block, dst_block)
            finally:
                self._moving = False
            state = published.pop(src_block.block_id, None)
            if state is not None:
                published[dst_block.block_id] = state

        def reset_prefix_cache():
            done = reset()
            if done:
                for state in list(dict.fromkeys(published.values())):
                    self._guard(self._evict, state, "cache_reset")
            return done

        pool._remove_cached_block_hashes = remove_cached_block_hashes  # type: ignore[method-assign]
        pool.move_block_hashes = move_block_hashes  # type: ignore[method-assign]
        pool.reset_prefix_cache = reset_prefix_cache  # type: ignore[method-assign]
