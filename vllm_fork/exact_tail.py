"""Exact tails: finding a state again that lies off the hash grid.

At a request's last executed token ``p`` its running Mamba block *is* the state at
``p``, and its last attention block holds the keys and values up to ``p``. vLLM looks
prefixes up at multiples of the hash unit only, so such a state needs a key of its
own: the chain hash at ``floor(p / unit)``, which names everything before it (model
adapters, cache salts and media included), the fewer than ``unit`` tokens behind it,
and what vLLM would mix into a block hash over them.

The key is private. It enters the pool's map, so that eviction and reset treat it as
any other, but never vLLM's KV-event stream: no other party could recompute it. It
cannot be mistaken for one of vLLM's hashes, which have no such prefix.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    get_block_hash,
    make_block_hash_with_group_id,
)

from vllm_fork.checkpoint import Checkpoint

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

KEY_PREFIX: Final = b"vllm-fork exact tail "
ROOT: Final = BlockHash(b"")
"""The parent of a tail that ends before the first hash boundary."""


class _Tail(NamedTuple):
    """What lies between the last hash boundary and ``p``."""

    tokens: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None


@dataclass(slots=True)
class _Tails:
    """The tails that follow one hash boundary, and the key of each.

    ``checkpoints`` counts those that end in a tail: an answer may be given twice.
    ``lengths`` counts the tails by tokens, so that a look-up cuts the request's tokens
    once a length, not once a tail.
    """

    keys: dict[_Tail, BlockHash] = field(default_factory=dict)
    checkpoints: Counter[_Tail] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, tail: _Tail, key: BlockHash) -> None:
        if tail not in self.keys:
            self.lengths[len(tail.tokens)] += 1
        self.keys[tail] = key
        self.checkpoints[tail] += 1

    def remove(self, tail: _Tail) -> None:
        self.checkpoints[tail] -= 1
        if self.checkpoints[tail]:
            return
        del self.checkpoints[tail]
        del self.keys[tail]
        length = len(tail.tokens)
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]


class TailHit(NamedTuple):
    """A deeper hit than the grid has: ``blocks`` one list a KV-cache group, as
    ``find_longest_cache_hit`` returns them."""

    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int


class TailIndex:
    """The exact tails that the prefix cache serves; at most one a Mamba block.

    Args:
        pool: the block pool of all groups.
        mamba: managers of the recurrent groups.
        attention: managers of the full-attention groups; all have one block size.
        num_groups: KV-cache groups in all; the others take no part in prefix caching.
    """

    def __init__(
        self,
        pool: BlockPool,
        mamba: Sequence[SingleTypeKVCacheManager],
        attention: Sequence[SingleTypeKVCacheManager],
        num_groups: int,
    ) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._mamba = mamba
        self._attention = attention
        self._unit: int = pool.hash_block_size
        self._block_size: int = mamba[0].block_size
        self._groups = [m.kv_cache_group_id for m in (*mamba, *attention)]
        # Chain hash at floor(p / unit) -> what follows it.
        self._tails: dict[BlockHash, _Tails] = {}
        # floor(p / unit) * unit -> how many tails follow such a position.
        self._starts: Counter[int] = Counter()
        # The last look-up that nothing matched: a request that waits for memory is
        # looked up in every step.
        self._missed: tuple[str, int, int, int] | None = None
        self._num_inserted = 0
        self._place: dict[int, tuple[BlockHash, _Tail]] = {}
        _keep_keys_private(pool)

    def __len__(self) -> int:
        return len(self._place)

    def insert(self, request: Request, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` findable at its boundary.

        ``checkpoint.blocks`` are the running block of each Mamba group and the tail
        block of each attention group, in the order of the managers.
        """
        boundary = checkpoint.boundary
        start = boundary // self._unit * self._unit
        parent = self._parent(request, start)
        tail = self._tail_of(request, start, boundary)
        key = _key(parent, tail)
        for group, block in zip(self._groups, checkpoint.blocks, strict=True):
            self._pool._insert_block_hash(
                make_block_hash_with_group_id(key, group), block, num_tokens=boundary
            )
        self._tails.setdefault(parent, _Tails()).add(tail, key)
        self._starts[start] += 1
        self._num_inserted += 1
        self._place[checkpoint.checkpoint_id] = (parent, tail)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint that left the cache; harmless for any other."""
        place = self._place.pop(checkpoint.checkpoint_id, None)
        if place is None:
            return
        start = checkpoint.boundary // self._unit * self._unit
        self._starts[start] -= 1
        if not self._starts[start]:
            del self._starts[start]
        parent, tail = place
        tails = self._tails[parent]
        tails.remove(tail)
        if not tails.keys:
            del self._tails[parent]

    def find(self, request: Request, deeper_than: int) -> TailHit | None:
        """The deepest tail that ``request``'s tokens continue.

        Args:
            request: the request to admit; its last token is never reused, since it
                has to be run for its logits.
            deeper_than: tokens; what vLLM's own lookup found.
        """
        if not self._tails:
            return None
        lookup = (
            request.request_id,
            request.num_tokens,
            deeper_than,
            self._num_inserted,
        )
        if lookup == self._missed:
            return None
        any_match = False
        longest = request.num_tokens - 1
        num_units = min(len(request.block_hashes), longest // self._unit)
        for start in self._starts_between(deeper_than, num_units * self._unit):
            tails = self._tails.get(self._parent(request, start))
            if tails is None:
                continue
            for length in sorted(tails.lengths, reverse=True):
                boundary = start + length
                if not deeper_than < boundary <= longest:
                    continue
                key = tails.keys.get(self._tail_of(request, start, boundary))
                if key is None:
                    continue
                any_match = True
                blocks = self._blocks(request, boundary, key)
                if blocks is not None:
                    return TailHit(blocks, boundary)
        if not any_match:
            self._missed = lookup
        return None

    def _starts_between(self, deeper_than: int, deepest: int) -> Iterable[int]:
        """Where tails deeper than ``deeper_than`` may start, the deepest first; none
        starts beyond ``deepest``."""
        lowest = deeper_than // self._unit * self._unit
        if len(self._starts) < (deepest - lowest) // self._unit:
            starts = (s for s in self._starts if lowest <= s <= deepest)
            return sorted(starts, reverse=True)
        return range(deepest, lowest - 1, -self._unit)

    def _parent(self, request: Request, start: int) -> BlockHash:
        """The chain hash of ``[0, start)``; the root has a name of its own."""
        if start == 0:
            return ROOT
        return request.block_hashes[start // self._unit - 1]

    def _tail_of(self, request: Request, start: int, end: int) -> _Tail:
        if start == end:
            return _Tail((), None)
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return _Tail(tuple(request.all_token_ids[start:end]), extra_keys)

    def _blocks(
        self, request: Request, boundary: int, key: BlockHash
    ) -> tuple[list[KVCacheBlock], ...] | None:
        """The blocks of ``[0, boundary)``; None if one of them was evicted."""
        last = self._pool.get_cached_block(key, self._groups)
        if last is None:
            return None
        num_full = (boundary - 1) // self._block_size
        per_block = self._block_size // self._unit
        found: dict[int, list[KVCacheBlock]] = {}
        for manager, block in zip((*self._mamba, *self._attention), last, strict=True):
            group = manager.kv_cache_group_id
            if manager in self._attention:
                found[group] = []
                for i in range(num_full):
                    full = self._pool.get_cached_block(
                        request.block_hashes[(i + 1) * per_block - 1], [group]
                    )
                    if full is None:
                        return None
                    found[group].append(full[0])
            else:
                found[group] = [self._pool.null_block] * num_full
            found[group].append(block)
        return tuple(found.get(group, []) for group in range(self._num_groups))


def is_private_key(block_hash: bytes) -> bool:
    """Whether a hash is one of ours, which nobody else can recompute."""
    return block_hash.startswith(KEY_PREFIX)


def _key(parent: BlockHash, tail: _Tail) -> BlockHash:
    digest = hashlib.sha256(repr((bytes(parent), *tail)).encode()).digest()
    return BlockHash(KEY_PREFIX + digest)


def _keep_keys_private(pool: BlockPool) -> None:
    """Keep our keys out of vLLM's ``BlockRemoved`` events."""
    emit = pool._emit_block_removed_events

    def emit_block_removed_events(block_hashes):
        emit([h for h in block_hashes if not is_private_key(get_block_hash(h))])

    pool._emit_block_removed_events = emit_block_removed_events  # type: ignore[method-assign]
