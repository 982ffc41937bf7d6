"""An error inside any hook costs retention, never a token."""

from __future__ import annotations

import random

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_fork import events
from vllm_fork.cache_index import CacheIndex
from vllm_fork.event_queue import made
from vllm_fork.exact_tail import TailIndex
from vllm_fork.model_free import STOP_TOKEN, make_engine, make_request
from vllm_fork.observer import Observer
from vllm_fork.retention import RetentionController
from vllm_fork.rolling_copy import RollingCopies
from vllm_fork.scheduler import CheckpointSchedulerMixin, with_checkpoints

BLOCK = 64
HOOKS = [
    (RetentionController, "watch"),
    (RetentionController, "reach"),
    (RetentionController, "accept_outputs"),
    (RetentionController, "may_run_short"),
    (RetentionController, "relieve"),
    (RetentionController, "finish"),
    (RetentionController, "release"),
    (RetentionController, "preempt"),
    (TailIndex, "find"),
    (TailIndex, "insert"),
    (RollingCopies, "follow"),
    (RollingCopies, "take_turns"),
    (RollingCopies, "_copy"),
    (RollingCopies, "take"),
    (RollingCopies, "_lose"),
    (BlockPool, "unpin_blocks"),
    (CacheIndex, "publish"),
    (CacheIndex, "state_of"),
    (CacheIndex, "_evict"),
    (CheckpointSchedulerMixin, "_deepen"),
    (Observer, "identity"),
    (Observer, "pinned"),
    (Observer, "published"),
    (Observer, "discarded"),
    (Observer, "admitted"),
    (Observer, "evicted"),
    (Observer, "finished"),
]


class Sabotage(RuntimeError):
    pass


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request, monkeypatch):
    monkeypatch.setattr(CheckpointSchedulerMixin, "strict", False)
    asynchronous = request.param
    engine = make_engine(
        with_checkpoints(AsyncScheduler if asynchronous else Scheduler),
        async_scheduling=asynchronous,
        block_size=BLOCK,
        num_mamba_groups=2,
        num_blocks=44,
        max_num_batched_tokens=256,
        settings={"retain": True, "copy_interval": 16},
    )
    engine.told = []
    observer = engine.scheduler.observer
    observer.enabled = True
    observer._publish = lambda queued: engine.told.extend(map(made, queued))
    return engine


def play(engine, seed: int) -> None:
    """Conversations that fill the pool: hits, preemptions and evictions."""
    draw = random.Random(seed)
    said = {name: [] for name in "abcdef"}
    for turn in range(3):
        for name in said:
            prompt = said[name] + [draw.randrange(20, 500) for _ in range(50)]
            answer = [draw.randrange(20, 500) for _ in range(90)] + [STOP_TOKEN]
            said[name] = prompt + answer
            engine.add(make_request(f"{name}{turn}", prompt), answer)
        engine.run(50_000)


@pytest.mark.parametrize(
    ("owner", "name"), HOOKS, ids=[f"{o.__name__}.{n}" for o, n in HOOKS]
)
def test_the_engine_goes_on_without_retention(engine, monkeypatch, caplog, owner, name):
    calls = []

    def fail(*args, **kwargs):
        calls.append(name)
        raise Sabotage(name)

    monkeypatch.setattr(owner, name, fail)
    play(engine, seed=1)
    assert calls, f"{name} is never called here"
    assert engine.scheduler.retention is None
    assert engine.worker.errors == []
    assert all(r.finish_reason == "stop" for r in engine.finished.values())
    assert engine.num_leaked_blocks == 0
    assert engine.scheduler.reset_prefix_cache()
    if owner is not Observer:
        told = {e.request_id for e in engine.told if type(e) is events.RequestFinished}
        assert told == set(engine.finished)
    failures = [r for r in caplog.records if "failed at" in r.message]
    assert failures
    assert len(failures) == len({record.message for record in failures})


def test_without_sabotage_everything_is_used(engine):
    play(engine, seed=1)
    assert engine.scheduler.retention is not None
    kinds = {e.boundary_kind for e in engine.told if hasattr(e, "boundary_kind")}
    assert kinds == {events.DECODE_BLOCK, events.EXACT_TAIL, events.COPY}
    assert any(isinstance(e, events.CheckpointEvicted) for e in engine.told)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert engine.worker.errors == []
    engine.scheduler.check_integrity()


def test_an_eviction_that_fails_within_a_copy(monkeypatch):
    """Whose step ends a block and has another copy as well: all was let go by then."""
    monkeypatch.setattr(CheckpointSchedulerMixin, "strict", False)
    engine = make_engine(
        with_checkpoints(Scheduler),
        block_size=BLOCK,
        num_mamba_groups=2,
        num_blocks=60,
        max_num_batched_tokens=256,
        settings={"retain": True, "copy_interval": 16},
    )
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    draw = random.Random(0)
    words = draw.choices(range(20, 500), k=90)
    engine.add(make_request("old", words[:30]), [*words[30:], STOP_TOKEN])
    engine.run()
    # In one step the first ends a block, and both others are due for their first copy.
    names = {"ends a block": BLOCK - 12, "copies": 21, "copies too": 21}
    requests = [
        make_request(name, draw.choices(range(20, 500), k=length))
        for name, length in names.items()
    ]
    for request in requests:
        engine.add(request, [*words[:40], STOP_TOKEN])
    while requests[1].num_computed_tokens < 32:
        engine.step()
    unpublished = [
        block
        for block in pool.free_block_queue.get_all_free_blocks()
        if block.block_id not in scheduler.cache_index._published
    ]
    pool.touch(unpublished)

    def fail(*args, **kwargs):
        raise Sabotage

    scheduler.observer.enabled = True
    scheduler.observer._publish = lambda queued: None
    monkeypatch.setattr(Observer, "evicted", fail)
    outputs = []
    monkeypatch.setattr(
        scheduler,
        "schedule",
        lambda *args: (
            outputs.append(type(scheduler).schedule(scheduler, *args)) or outputs[-1]
        ),
    )
    engine.step()
    assert [request.num_computed_tokens for request in requests] == [BLOCK, 33, 33]
    assert outputs[0].kv_cache_block_copies is None
    assert scheduler.retention is None
    pool.free_blocks(unpublished)
    engine.run()
    for name in names:
        assert engine.finished[name].finish_reason == "stop"
    assert engine.num_leaked_blocks == 0
    assert scheduler.reset_prefix_cache()
    assert not scheduler._watch.alarms
    assert not scheduler._watch.turns
    assert not scheduler._watch.is_due
