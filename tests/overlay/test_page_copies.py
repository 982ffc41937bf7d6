"""Pages are copied as such where they are dense, and by vLLM's helper elsewhere."""

from __future__ import annotations

import random

import pytest
import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_fork import block_copy

NUM_BLOCKS = 12
STOCK = getattr(
    copy_kv_cache_blocks_inplace, "__wrapped__", copy_kv_cache_blocks_inplace
)


def storage(page_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BLOCKS * page_bytes,), dtype=torch.uint8)


def overlaid(kernel_blocks: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A padded Mamba page under a full attention page, of two slots."""
    raw = torch.stack([storage(128), storage(128)])
    views = []
    for slot in raw:
        numbers = slot.view(torch.bfloat16)
        views.append(numbers.as_strided((NUM_BLOCKS, 20), (64, 1)))  # Mamba, padded
        attention = numbers.view(NUM_BLOCKS * kernel_blocks, 2, 4, -1)
        views.append(attention.transpose(1, 2))  # keys and values inside the page
    return raw, views


def with_holes() -> tuple[torch.Tensor, list[torch.Tensor]]:
    raw = torch.stack([storage(128), storage(128)])
    shape, strides = (NUM_BLOCKS, 4, 8), (64, 16, 1)
    return raw, [slot.view(torch.bfloat16).as_strided(shape, strides) for slot in raw]


@pytest.mark.parametrize("kernel_blocks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_whole_pages_move(kernel_blocks, seed):
    draw = random.Random(seed)
    blocks = draw.sample(range(NUM_BLOCKS), 6)
    copies = list(zip(blocks[:3], blocks[3:], strict=True))
    raw, views = overlaid(kernel_blocks)
    expected = raw.clone().view(2, NUM_BLOCKS, -1)
    for source, target in copies:
        expected[:, target] = expected[:, source]

    def no_stock(*_):
        pytest.fail("these pages are dense")

    block_copy.copying_whole_pages(no_stock)(views, NUM_BLOCKS, copies)
    assert torch.equal(raw.view(2, NUM_BLOCKS, -1), expected)


def test_one_source_of_several_copies():
    raw, views = overlaid()
    block_copy.copying_whole_pages(STOCK)(views, NUM_BLOCKS, [(1, 2), (1, 3)])
    pages = raw.view(2, NUM_BLOCKS, -1)
    assert torch.equal(pages[:, 1], pages[:, 2])
    assert torch.equal(pages[:, 1], pages[:, 3])


def test_a_block_that_is_read_and_written_is_read_first():
    """The order of the list is no order of execution."""
    raw, views = overlaid()
    before = raw.clone().view(2, NUM_BLOCKS, -1)
    block_copy.copying_whole_pages(STOCK)(views, NUM_BLOCKS, [(4, 5), (6, 4)])
    after = raw.view(2, NUM_BLOCKS, -1)
    assert torch.equal(after[:, 5], before[:, 4])
    assert torch.equal(after[:, 4], before[:, 6])


def test_what_lies_between_strided_elements_is_left_alone():
    """A page with holes may share them with others: vLLM's helper copies it."""
    raw, views = with_holes()
    before = raw.clone().view(2, NUM_BLOCKS, 4, 32)
    assert block_copy.dense_pages(views, NUM_BLOCKS) is None
    block_copy.copying_whole_pages(STOCK)(views, NUM_BLOCKS, [(1, 2)])
    after = raw.view(2, NUM_BLOCKS, 4, 32)
    assert torch.equal(after[:, 2, :, :16], before[:, 1, :, :16])
    assert torch.equal(after[:, 2, :, 16:], before[:, 2, :, 16:])


def test_nothing_to_copy_touches_nothing():
    block_copy.copying_whole_pages(STOCK)(iter([]), NUM_BLOCKS, [])
