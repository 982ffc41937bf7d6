"""What a checkpoint's block copy costs the device, and what other ways would.

A rolling copy moves one block a Mamba group, which is one page in each of the group's
layers, on the stream that runs the model: the step waits for it. Each way copies the
same blocks of an idle engine's pool:

``installed``     vLLM's helper as the worker calls it, repaired by ``block_copy``
``stock``         vLLM's helper as it comes: an index kernel to gather and one to
                  scatter, a layer, over the layer's own element type
``wide pages``    the same helper over dense pages of 8-byte elements
``straight``      no index: one strided copy a block over all layers
``foreach``       no index: all pages of a step in ``torch._foreach_copy_``
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from arms import empty_cache, switch
from model import runner_of

Copies = Sequence[tuple[int, int]]
Copy = Callable[[Copies], None]

WIDE = 8
"""Bytes of an element of a wide page."""


def run(engine: Any, requests: str = "1 2 4", repeats: int = 20) -> dict[str, Any]:
    """Time each way for the copies of so many ``requests`` in a step."""
    switch(engine, "stock")
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    pool = manager.block_pool
    groups = len(manager.coordinator.single_type_managers) - 1
    most = groups * max(map(int, requests.split()))
    held = pool.get_new_blocks(2 * most)
    ids = [block.block_id for block in held]
    pairs = list(zip(ids[:most], ids[most:], strict=True))
    ways, pages = _ways(engine)
    rows = []
    try:
        for name, copy in ways.items():
            whole = _arrives_whole(copy, pairs[:groups], pages)
            for count in map(int, requests.split()):
                copies = pairs[: count * groups]
                rows.append(
                    {
                        "way": name,
                        "requests": count,
                        "whole": whole,
                        **_timed(copy, copies, repeats),
                        "launches": _launches(copy, copies),
                    }
                )
    finally:
        pool.free_blocks(held)
        empty_cache(engine)
    return {
        "bytes_a_request": groups * sum(page.shape[1] * WIDE for page in pages),
        "views": len(runner_of(engine).kv_caches),
        "pages_of_a_block": len(pages),
        "rows": rows,
    }


def _ways(engine: Any) -> tuple[dict[str, Copy], list[Any]]:
    import torch
    from vllm.v1.worker import utils

    runner = runner_of(engine)
    views, num_blocks = runner.kv_caches, runner.kv_cache_config.num_blocks
    installed = utils.copy_kv_cache_blocks_inplace
    stock = getattr(installed, "__wrapped__", installed)
    pages = wide_pages(views, num_blocks)
    stacked = _stacked(pages)

    def helper(copy_blocks: Any, over: Any) -> Copy:
        return lambda copies: copy_blocks(over, num_blocks, copies)

    def straight(copies: Copies) -> None:
        for source, target in copies:
            stacked[:, target].copy_(stacked[:, source])

    def foreach(copies: Copies) -> None:
        torch._foreach_copy_(
            [page[target] for page in pages for _, target in copies],
            [page[source] for page in pages for source, _ in copies],
        )

    return {
        "installed": helper(installed, views),
        "stock": helper(stock, views),
        "wide pages": helper(stock, pages),
        **({"straight": straight} if stacked is not None else {}),
        "foreach": foreach,
    }, pages


def wide_pages(views: Sequence[Any], num_blocks: int) -> list[Any]:
    """Each page of a block once, as ``[num_blocks, bytes // WIDE]`` elements."""
    import torch

    from vllm_fork.block_copy import bytes_of_block

    widest: dict[int, Any] = {}
    for view in views:
        former = widest.get(view.data_ptr())
        size = bytes_of_block(view, num_blocks)
        if former is None or size > bytes_of_block(former, num_blocks):
            widest[view.data_ptr()] = view
    pages = []
    for _, view in sorted(widest.items()):
        size = bytes_of_block(view, num_blocks)
        kernel_blocks = view.shape[0] // num_blocks
        stride = view.stride(0) * kernel_blocks * view.element_size()
        offset = view.data_ptr() - view.untyped_storage().data_ptr()
        assert size % WIDE == stride % WIDE == offset % WIDE == 0
        raw = torch.empty(0, dtype=torch.int64, device=view.device)
        raw.set_(view.untyped_storage())
        pages.append(
            raw.as_strided((num_blocks, size // WIDE), (stride // WIDE, 1), offset // 8)
        )
    return pages


def _stacked(pages: Sequence[Any]) -> Any:
    """``[pages, num_blocks, elements]``, or None where they lie unevenly."""
    offsets = [page.storage_offset() for page in pages]
    gaps = {b - a for a, b in itertools.pairwise(offsets)} or {0}
    if len(gaps) > 1 or len({(page.shape, page.stride()) for page in pages}) > 1:
        return None
    first = pages[0]
    return first.as_strided(
        (len(pages), *first.shape), (gaps.pop(), *first.stride()), offsets[0]
    )


def _timed(copy: Copy, copies: Copies, repeats: int) -> dict[str, float]:
    """Medians: device time, and the time until the call returned."""
    import torch

    cuda = torch.cuda.is_available()
    device_s, host_s = [], []
    for repeat in range(3 + repeats):
        if cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            # So that the launches lie ready when the first of them may run.
            torch.cuda._sleep(4_000_000)
            first.record()
        start = time.perf_counter()
        copy(copies)
        elapsed = time.perf_counter() - start
        if cuda:
            last.record()
            torch.cuda.synchronize()
        if repeat >= 3:
            host_s.append(elapsed)
            device_s.append(first.elapsed_time(last) / 1e3 if cuda else elapsed)
    return {
        "device_us": round(1e6 * median(device_s), 1),
        "host_us": round(1e6 * median(host_s), 1),
    }


def _launches(copy: Copy, copies: Copies) -> dict[str, int]:
    """How often which kernel ran, for one call; empty without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        copy(copies)
        torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    for event in profiled.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.key[:40]] += event.count
    return dict(launches)


def _arrives_whole(copy: Copy, copies: Copies, pages: Sequence[Any]) -> bool:
    """Whether no byte of a page stays behind. Leaves the blocks zeroed."""
    blocks = [page[block] for page in pages for pair in copies for block in pair]
    for source, target in zip(blocks[::2], blocks[1::2], strict=True):
        source.random_()
        target.zero_()
    copy(copies)
    whole = all(
        bool((source == target).all())
        for source, target in zip(blocks[::2], blocks[1::2], strict=True)
    )
    for block in blocks:
        block.zero_()
    return whole
