"""Checks the prefix cache against what the blocks really hold."""

from collections.abc import Iterator

import numpy as np
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
)

from vllm_fork.events import EXACT_TAIL, CheckpointPinned
from vllm_fork.exact_tail import is_private_key
from vllm_fork.model_free.engine import ModelFreeEngine
from vllm_fork.model_free.event_recorder import EventRecorder
from vllm_fork.model_free.worker import TokenSequence


class PrefixCacheAudit:
    """Finds entries of the prefix cache whose block does not hold what they promise,
    before any request reads them."""

    def __init__(self, engine: ModelFreeEngine) -> None:
        self._engine = engine
        self._promises: dict[bytes, tuple[TokenSequence, int]] = {}
        self._num_known: dict[str, int] = {}
        self._tail_in_block: dict[int, tuple[TokenSequence, int]] = {}
        self._num_events = 0

    def problems(self) -> list[str]:
        """One sentence a wrong entry.

        Valid between two calls of :meth:`ModelFreeEngine.step`.
        """
        self._learn_hashes()
        self._learn_tails()
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        return [
            problem
            for key, blocks in pool.cached_block_hash_to_block._cache.items()
            for problem in self._check(key, blocks)
        ]

    def _learn_hashes(self) -> None:
        worker = self._engine.worker
        for request_id, request in self._engine.requests.items():
            known = self._num_known.get(request_id, 0)
            hashes = request.block_hashes
            sequence = worker.sequences[request_id]
            for i in range(known, len(hashes)):
                self._promises[hashes[i]] = (sequence, (i + 1) * worker.hash_unit)
            self._num_known[request_id] = len(hashes)

    def _learn_tails(self) -> None:
        """An exact tail's key says nothing to us; its events name its blocks."""
        recorder = getattr(self._engine.scheduler, "publisher", None)
        if not isinstance(recorder, EventRecorder):
            return
        for event in recorder.events[self._num_events :]:
            if isinstance(event, CheckpointPinned) and (
                event.boundary_kind == EXACT_TAIL
            ):
                sequence = self._engine.worker.sequences[event.request_id]
                for block_id in event.block_ids:
                    self._tail_in_block[block_id] = (sequence, event.boundary)
        self._num_events = len(recorder.events)

    def _check(
        self,
        key: BlockHashWithGroupId,
        blocks: KVCacheBlock | dict[int, KVCacheBlock],
    ) -> Iterator[str]:
        block_hash, group_id = get_block_hash(key), get_group_id(key)
        for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
            where = f"group {group_id} block {block.block_id}"
            if is_private_key(block_hash):
                promise = self._tail_in_block.get(block.block_id)
            else:
                promise = self._promises.get(block_hash)
            if promise is None:
                yield f"{where}: nobody has the hash {block_hash.hex()}"
                continue
            if group_id in self._engine.worker.mamba_groups:
                problem = self._check_state(block, group_id, *promise)
            else:
                problem = self._check_page(block, group_id, *promise)
            if problem:
                yield f"{where} for {promise[1]} tokens: {problem}"

    def _check_state(
        self,
        block: KVCacheBlock,
        group_id: int,
        sequence: TokenSequence,
        num_tokens: int,
    ) -> str | None:
        memory = self._engine.worker.memory
        if memory.holds_state(block.block_id, group_id, sequence.state(num_tokens)):
            return None
        return (
            f"holds {memory.temporal[block.block_id]} with window "
            f"{memory.convolution[block.block_id][:1]}"
        )

    def _check_page(
        self,
        block: KVCacheBlock,
        group_id: int,
        sequence: TokenSequence,
        num_tokens: int,
    ) -> str | None:
        worker = self._engine.worker
        first = (num_tokens - 1) // worker.block_size * worker.block_size
        got = worker.memory.slots[block.block_id, : num_tokens - first]
        want = sequence.prefixes[first + 1 : num_tokens + 1]
        if worker.memory.owner[block.block_id] == group_id and np.array_equal(
            got, want
        ):
            return None
        return "the page is not that prefix"
