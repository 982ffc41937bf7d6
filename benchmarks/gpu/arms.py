"""Which retention an engine runs, switched between requests of one process.

A start of the large model costs minutes, so that one engine serves every arm. The
stock arm is stock: the scheduler gets vLLM's own class back, and nothing of ours is
left on the block pool or the KV-cache manager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

Settings = dict[str, Any]

ARMS: dict[str, Settings | None] = {
    "stock": None,
    "block_aligned": {"retain": True, "exact_tail": False},
    "exact_tail": {"retain": True},
    "exact_tail_two_steps": {"retain": True, "one_step_tokens": 0},
    "copy_64": {"retain": True, "exact_tail": False, "copy_interval": 64},
    "copy_128": {"retain": True, "exact_tail": False, "copy_interval": 128},
    "copy_256": {"retain": True, "exact_tail": False, "copy_interval": 256},
    "everything": {
        "retain": True,
        "copy_interval": 64,
        "publish_on": ["stop", "length", "abort", "preempt"],
    },
}
EVENTS: Settings = {"enabled": True}


def switch(engine: Any, arm: str, *, empty: bool = True) -> None:
    """Let ``engine`` run ``arm`` from the next step on, events included.

    Args:
        engine: between steps; with ``empty`` it must be idle.
        empty: also empty the prefix cache, so that arms do not share states.
    """
    from vllm_fork.config import Settings as ForkSettings
    from vllm_fork.scheduler import with_checkpoints

    scheduler = engine.engine_core.engine_core.scheduler
    if empty:
        empty_cache(engine)
    stock = type(scheduler).__mro__[2]  # behind what was mixed in
    _detach(scheduler, stock)
    settings = ARMS[arm]
    if settings is None:
        return
    scheduler.__class__ = with_checkpoints(stock)
    scheduler.strict = True
    scheduler._attach(
        msgspec.convert({**settings, "events": EVENTS}, type=ForkSettings)
    )
    assert (scheduler.tails is not None) == settings.get("exact_tail", True)
    copies = scheduler.retention.copies
    assert (copies.interval if copies else 0) == settings.get("copy_interval", 0)


def empty_cache(engine: Any) -> None:
    """Empty the prefix cache; a block still held somewhere is a leak.

    Raises:
        AssertionError: the cache could not be emptied.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    if hasattr(scheduler, "check_integrity"):
        scheduler.check_integrity()
    assert scheduler.reset_prefix_cache(), "some blocks are still held: a leak"


class _Nothing:
    """Mixed into a stock class, it gives instances the layout that Python wants of
    them before they may change their class, and nothing else."""


def _detach(scheduler: Any, stock: type) -> None:
    if not hasattr(scheduler, "check_integrity"):
        return
    if scheduler.retention is not None:
        scheduler.retention.abandon("shutdown")
    scheduler.observer.flush()
    if scheduler.publisher is not None:
        scheduler.publisher.shutdown()
    assert not hasattr(stock, "check_integrity"), type(scheduler).__mro__
    for name in _OURS:
        vars(scheduler).pop(name, None)
    scheduler.__class__ = type(stock.__name__, (_Nothing, stock), {})
    manager = scheduler.kv_cache_manager
    for wrapped in (scheduler, manager, manager.block_pool):
        for name in list(vars(wrapped)):
            if callable(getattr(type(wrapped), name, None)):
                delattr(wrapped, name)


_OURS = (
    "retention",
    "tails",
    "cache_index",
    "observer",
    "publisher",
    "_follow_ups",
    "_repairs_copies",
    "_watch",
)
"""What the overlay keeps on a scheduler; the next arm must not find it."""


@contextlib.contextmanager
def counted_preemptions(engine: Any) -> Iterator[list[str]]:
    """The ids of the requests that were preempted, one entry a preemption."""
    scheduler = engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    preempted: list[str] = []

    def preempt_request(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_request
    try:
        yield preempted
    finally:
        del scheduler._preempt_request


@contextlib.contextmanager
def counted_one_steps(engine: Any) -> Iterator[set[str]]:
    """The ids of the requests whose prompt was to run in one step."""
    scheduler = engine.engine_core.engine_core.scheduler
    ran: set[str] = set()
    if not hasattr(scheduler, "check_integrity"):
        yield ran
        return
    run_in_one_step = scheduler._run_in_one_step

    def recording(request: Any) -> None:
        ran.add(request.request_id)
        run_in_one_step(request)

    scheduler._run_in_one_step = recording
    try:
        yield ran
    finally:
        del scheduler._run_in_one_step


@contextlib.contextmanager
def ballast(engine: Any, available: int) -> Iterator[None]:
    """Leave only ``available`` blocks of an idle engine's pool for requests."""
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - available)
    try:
        yield
    finally:
        pool.free_blocks(held)
