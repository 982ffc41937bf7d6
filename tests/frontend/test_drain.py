"""An engine that is to stop ends its requests before it is killed over them."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core

from vllm_fork import drain, plugin
from vllm_fork.events import CheckpointDiscarded, EngineStopped, RequestFinished
from vllm_fork.model_free import (
    ModelFreeEngine,
    make_engine,
    make_request,
    with_recorded_checkpoints,
)

LONG = 1_000_000
TIMEOUT_S = 0.4


def running_engine(scheduler_class: type[Scheduler]) -> ModelFreeEngine:
    """With a request that has no end within a test, and a checkpoint of it."""
    engine = make_engine(
        scheduler_class,
        block_size=64,
        num_blocks=40_000,
        max_model_len=LONG,
        settings={"retain": True},
    )
    engine.add(make_request("long", range(20, 50)), [9] * LONG)
    for _ in range(100):
        engine.step()
    return engine


def core_around(engine: ModelFreeEngine, shutdown_timeout: float) -> Mock:
    """vLLM's engine core, as the loop around ``engine`` sees it."""
    plugin.register()
    proc = object.__new__(core.EngineCoreProc)
    proc.scheduler = engine.scheduler
    proc.vllm_config = Mock(shutdown_timeout=shutdown_timeout)
    proc.engines_running = False
    proc.batch_queue = None
    proc.structured_output_manager = Mock()
    proc.model_executor = None
    proc._send_abort_outputs = Mock()
    proc.shutdown_state = core.EngineShutdownState.RUNNING
    return proc


def run_until(proc: Mock, engine: ModelFreeEngine, deadline_s: float) -> bool:
    """Whether the loop ends by itself within that time."""
    deadline = time.monotonic() + deadline_s
    while proc._handle_shutdown():
        if time.monotonic() > deadline:
            return False
        engine.step()
    return True


def test_the_last_events_leave_before_the_front_end_kills_the_engine(monkeypatch):
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
    engine = running_engine(with_recorded_checkpoints(Scheduler))
    proc = core_around(engine, TIMEOUT_S)
    assert not run_until(proc, engine, 0.05)
    proc.shutdown_state = core.EngineShutdownState.REQUESTED
    began = time.monotonic()
    assert run_until(proc, engine, TIMEOUT_S)
    assert time.monotonic() - began >= drain.drain_time_s(TIMEOUT_S)
    ((aborted,), _) = proc._send_abort_outputs.call_args
    assert [request.request_id for request in aborted] == ["long"]
    proc.shutdown()
    discarded, finished, stopped = engine.events.events[-3:]
    assert isinstance(discarded, CheckpointDiscarded)
    assert discarded.reason == "aborted"
    assert isinstance(finished, RequestFinished)
    assert finished.finish_reason == "abort"
    assert isinstance(stopped, EngineStopped)


def test_a_request_that_ends_in_time_is_not_touched():
    engine = running_engine(with_recorded_checkpoints(Scheduler))
    proc = core_around(engine, 1000)
    proc.shutdown_state = core.EngineShutdownState.REQUESTED
    assert not run_until(proc, engine, 0.05)
    engine.scheduler.requests["long"].max_tokens = 200
    assert run_until(proc, engine, 20)
    assert engine.events.of_type(RequestFinished)[0].finish_reason == "length"


def test_vllm_drains_as_ever_where_no_events_are_sent():
    engine = running_engine(Scheduler)
    proc = core_around(engine, TIMEOUT_S / 10)
    proc.shutdown_state = core.EngineShutdownState.REQUESTED
    assert not run_until(proc, engine, 2 * TIMEOUT_S / 10)


@pytest.mark.parametrize(
    ("timeout", "for_requests"), [(30, 28), (5, 3), (3, 1.5), (1, 0.5)]
)
def test_time_for_draining(timeout, for_requests):
    assert drain.drain_time_s(timeout) == for_requests


def test_what_an_engine_in_trouble_takes_with_it_is_told():
    """vLLM ends no request when a worker dies: it fails."""
    engine = running_engine(with_recorded_checkpoints(Scheduler))
    engine.add(make_request("waiting", range(20, 50)), [9] * LONG)
    engine.scheduler.shutdown()
    told = {e.request_id: e for e in engine.events.of_type(RequestFinished)}
    assert {i: event.finish_reason for i, event in told.items()} == {
        "long": "error",
        "waiting": "error",
    }
    assert told["long"].num_output_tokens > 0
    assert told["long"].no_checkpoint_reason == "shutdown"
    assert told["waiting"].no_checkpoint_reason == "never_admitted"
    assert isinstance(engine.events.events[-1], EngineStopped)
