"""vLLM's own block copy truncates attention pages; ours does not.

Eight layers: two layers a group, so that the storage has two slots and the helper
copies view by view (with one slot it copies the whole storage and is right).
"""

from __future__ import annotations

import pytest
import torch

from vllm_fork import block_copy

PROMPT_LENGTH = 700  # the last hash boundary, 688, lies inside the second block


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine({}, num_layers=8)


@pytest.fixture
def stock_copy(monkeypatch):
    """vLLM's helper as it was before this project wrapped it."""
    import vllm.v1.worker.gpu_model_runner as runner_module

    repaired = runner_module.copy_kv_cache_blocks_inplace
    monkeypatch.setattr(
        runner_module, block_copy.HELPER, getattr(repaired, "__wrapped__", repaired)
    )


def pages(engine, block_id: int) -> torch.Tensor:
    """Every byte of one block, over all slots of the storage."""
    num_blocks = engine.runner.kv_cache_config.num_blocks
    storage = engine.runner.kv_caches[0].untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    return raw.view(-1, num_blocks, raw.numel() // num_blocks // 2)[:, block_id]


def reuse_inside_a_block(engine, seed: int) -> tuple[list[int], list[int]]:
    """Greedy tokens without the cache, and after a hit inside a block."""
    prompt = engine.prompt(PROMPT_LENGTH, seed)
    fresh = engine.ask(prompt, 12, cached=False)
    reused = engine.ask(prompt, 12)
    assert reused.num_cached_tokens == 688
    return fresh.token_ids, reused.token_ids


def test_stock_vllm_truncates_the_page(engine, stock_copy):
    num_blocks = engine.runner.kv_cache_config.num_blocks
    assert block_copy.truncated_bytes(engine.runner.kv_caches, num_blocks) > 0
    wrong = [
        fresh != reused
        for fresh, reused in (reuse_inside_a_block(engine, s) for s in range(3))
    ]
    assert any(wrong), "vLLM copies whole pages by itself now: drop block_copy"


def test_the_repaired_helper_copies_the_whole_page(engine):
    import vllm.v1.worker.gpu_model_runner as runner_module

    copy = runner_module.copy_kv_cache_blocks_inplace
    num_blocks = engine.runner.kv_cache_config.num_blocks
    source, destination = num_blocks - 2, num_blocks - 1
    pages(engine, source).copy_(
        torch.arange(256, dtype=torch.uint8)
        .repeat(pages(engine, source).numel() // 256)
        .view_as(pages(engine, source))
    )
    copy(engine.runner.kv_caches, num_blocks, [(source, destination)])
    assert torch.equal(pages(engine, source), pages(engine, destination))
    views = block_copy.widest_first(engine.runner.kv_caches, num_blocks)
    assert block_copy.dense_pages(views, num_blocks), "vLLM's helper copied it"


def test_output_after_a_hit_inside_a_block_is_right(engine):
    for seed in range(3):
        fresh, reused = reuse_inside_a_block(engine, seed + 10)
        assert fresh == reused
