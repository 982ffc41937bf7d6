"""Copy-on-write done right: repairs three faults of vLLM 0.32.0's block copies.

The first two exist without this project; hits inside a block, which it makes common,
are what shows them.

**Truncated pages** (worker). A hybrid model overlays the views of an attention layer
and of a Mamba layer on one page. After a hit inside a block vLLM copies the page for
the new request, but ``copy_kv_cache_blocks_inplace`` copies each address once, through
whichever view it meets first. Where that is the Mamba view and its page is padded, the
tail of the attention page stays behind. Copying the *widest* view of each address
moves everything.

**Slow pages** (worker). The helper gathers and scatters each layer by index kernels, an
element of two bytes at a time. Pages copied as such, all of a step in one launch, take
a sixth to a tenth of that time on an H200 (``benchmarks/gpu/copying.py``), and the step
waits for them. vLLM's helper still does what does not consist of dense pages.

**Chained copies** (scheduler). Two requests admitted in one step can share a block
that the first of them is still to receive: then one copy's destination is the next
one's source. The helper gathers every source before it scatters, so the second gets
what the block held *before*, and the wrong page stays in the cache.
:func:`resolve_chains` lets it copy from where the content is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

HELPER: Final = "copy_kv_cache_blocks_inplace"
HOLDERS: Final = (
    "vllm.v1.worker.utils",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
)
"""Modules that hold the helper under its name; the first one defines it."""

_WORD: Final = 8
"""Bytes of what a page is copied by."""

CopyBlocks = Callable[[Iterable["torch.Tensor"], int, Sequence[Any]], None]


def install() -> None:
    """Let this process's model runner copy whole pages. Safe to call repeatedly.

    Raises:
        AttributeError: this vLLM has no such helper.
    """
    import vllm.v1.worker.utils as defining

    stock: CopyBlocks = getattr(defining, HELPER)
    if getattr(stock, "_copies_whole_pages", False):
        return
    repaired = copying_whole_pages(stock)
    for name in HOLDERS:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, HELPER):
            setattr(module, HELPER, repaired)


def copying_whole_pages(stock: CopyBlocks) -> CopyBlocks:
    """A helper that copies pages as such; ``stock``, with the widest view of each
    address first, where it cannot."""

    @functools.wraps(stock)
    def copy_kv_cache_blocks(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, copies: Sequence[Any]
    ) -> None:
        if not copies:
            return
        views = widest_first(kv_caches, num_blocks)
        pages = dense_pages(views, num_blocks)
        if pages is None or _is_chained(copies):
            stock(views, num_blocks, copies)
        else:
            _copy_pages(pages, copies)

    copy_kv_cache_blocks._copies_whole_pages = True  # type: ignore[attr-defined]
    return copy_kv_cache_blocks


def dense_pages(
    views: Sequence[torch.Tensor], num_blocks: int
) -> list[torch.Tensor] | None:
    """The pages of a block, each address once: ``[num_blocks, words]`` of 8 bytes.

    ``views``: the widest of each address first. None where a page has holes or is not
    made of whole words.
    """
    import torch

    pages: dict[int, torch.Tensor] = {}
    for view in views:
        address = view.data_ptr()
        if address in pages:
            continue
        kernel_blocks = view.shape[0] // num_blocks
        size = bytes_of_block(view, num_blocks)
        stride = view.stride(0) * kernel_blocks * view.element_size()
        storage = view.untyped_storage()
        offset = address - storage.data_ptr()
        dense = view[0].numel() * kernel_blocks * view.element_size() == size
        if not dense or size % _WORD or stride % _WORD or offset % _WORD:
            return None
        words = torch.empty(0, dtype=torch.int64, device=view.device).set_(storage)
        pages[address] = words.as_strided(
            (num_blocks, size // _WORD), (stride // _WORD, 1), offset // _WORD
        )
    return list(pages.values())


def _is_chained(copies: Sequence[Any]) -> bool:
    """Whether a block is read and written by the same step's copies."""
    return not {source for source, _ in copies}.isdisjoint(
        target for _, target in copies
    )


def _copy_pages(pages: Sequence[torch.Tensor], copies: Sequence[Any]) -> None:
    import torch

    torch._foreach_copy_(
        [page[target] for page in pages for _, target in copies],
        [page[source] for page in pages for source, _ in copies],
    )


def widest_first(
    kv_caches: Iterable[torch.Tensor], num_blocks: int
) -> list[torch.Tensor]:
    """The views of ``kv_caches``, those that cover more of a block first.

    The order among equals is kept. Views that share an address share a page, so the
    first of them covers what the others do.
    """
    return sorted(
        kv_caches, key=lambda view: bytes_of_block(view, num_blocks), reverse=True
    )


def bytes_of_block(view: torch.Tensor, num_blocks: int) -> int:
    """Bytes from the first to past the last element of one block of ``view``.

    ``view`` has shape ``[num_blocks * k, ...]``: ``k`` kernel blocks a block.
    """
    kernel_blocks = view.shape[0] // num_blocks
    shape = (kernel_blocks, *view.shape[1:])
    last = sum((n - 1) * stride for n, stride in zip(shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()


def resolve_chains(copies: list[Any]) -> list[Any]:
    """``copies`` of one step with every source a block that no earlier one fills.

    ``copies`` are vLLM's ``KVCacheBlockCopy``, in the order they were queued. Of two to
    one block, which was handed on within the step, the last is meant and remains: on a
    device they race.
    """
    if len(copies) == 1:
        return copies
    targets = {target for _, target in copies}
    if len(targets) == len(copies) and targets.isdisjoint([s for s, _ in copies]):
        return copies
    by_target = {copy.dst_block_id: copy for copy in copies}
    origin: dict[int, int] = {}
    for source, target in copies:
        origin[target] = origin.get(source, source)
    return [
        copy._replace(src_block_id=origin[target]) for target, copy in by_target.items()
    ]


def truncated_bytes(kv_caches: Iterable[torch.Tensor], num_blocks: int) -> int:
    """Bytes of a block that stock vLLM leaves behind at most; 0 where it is right."""
    first: dict[int, int] = {}
    widest: dict[int, int] = {}
    for view in kv_caches:
        size = bytes_of_block(view, num_blocks)
        first.setdefault(view.data_ptr(), size)
        widest[view.data_ptr()] = max(widest.get(view.data_ptr(), 0), size)
    return max((widest[p] - first[p] for p in first), default=0)
