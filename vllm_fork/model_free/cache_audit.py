"""Checks the prefix cache against what the blocks really hold."""

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from vllm_fork.model_free.engine import ModelFreeEngine


def audit_prefix_cache(engine: ModelFreeEngine) -> list[str]:
    """Every entry of the prefix cache whose block does not hold what it promises.

    Valid between two calls of :meth:`ModelFreeEngine.step`. An entry counts as
    wrong before anybody reads it. Returns one sentence an entry.
    """
    worker, problems = engine.worker, []
    promised = {}
    for request_id, request in engine.requests.items():
        sequence = worker.sequences[request_id]
        for i, block_hash in enumerate(request.block_hashes):
            promised[block_hash] = (sequence, (i + 1) * worker.hash_unit)
    memory, size = worker.memory, worker.block_size
    pool = engine.scheduler.kv_cache_manager.block_pool
    for key, value in pool.cached_block_hash_to_block._cache.items():
        block_hash, group_id = get_block_hash(key), get_group_id(key)
        blocks = value.values() if isinstance(value, dict) else [value]
        if block_hash not in promised:
            problems.append(f"group {group_id}: unknown hash {block_hash.hex()}")
            continue
        sequence, num_tokens = promised[block_hash]
        for block in blocks:
            where = f"group {group_id} block {block.block_id} for {num_tokens} tokens"
            if group_id in worker.mamba_groups:
                want = sequence.state(num_tokens)
                if not memory.holds_state(block.block_id, group_id, want):
                    problems.append(
                        f"{where}: holds {memory.temporal[block.block_id]}, "
                        f"window {memory.convolution[block.block_id][:1]}"
                    )
                continue
            first = (num_tokens - 1) // size * size
            got = memory.slots[block.block_id, : num_tokens - first]
            wanted = sequence.prefixes[first + 1 : num_tokens + 1]
            if memory.owner[block.block_id] != group_id or not np.array_equal(
                got, wanted
            ):
                problems.append(f"{where}: the page is not that prefix")
    return problems
