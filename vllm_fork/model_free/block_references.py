"""Accounts for every reference to a block of the pool."""

from collections import Counter

from vllm.v1.core.sched.scheduler import Scheduler


def references_beyond_requests(scheduler: Scheduler) -> dict[int, int]:
    """References that no request and no pending copy explains: block id -> count.

    Empty in stock vLLM between two steps and whenever a request is preempted; what
    a retention controller has pinned shows up here. A negative count is a
    reference that was given back twice.
    """
    manager = scheduler.kv_cache_manager
    explained: Counter[int] = Counter()
    for single in manager.coordinator.single_type_managers:
        for blocks in single.req_to_blocks.values():
            explained.update(block.block_id for block in blocks)
        for pair in single._pending_cow_copies:
            explained.update(block.block_id for block in pair)
    for _, blocks in scheduler.deferred_frees:
        explained.update(block.block_id for block in blocks)
    return {
        block.block_id: block.ref_cnt - explained[block.block_id]
        for block in manager.block_pool.blocks
        if not block.is_null and block.ref_cnt != explained[block.block_id]
    }


def blocks_only_pins_hold(scheduler: Scheduler) -> list[int]:
    """Blocks that would be free if no checkpoint were pinned."""
    pool = scheduler.kv_cache_manager.block_pool
    return [
        block_id
        for block_id, extra in references_beyond_requests(scheduler).items()
        if extra >= pool.blocks[block_id].ref_cnt
    ]
