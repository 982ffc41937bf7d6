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
    (RollingCopies, "copy"),
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
