"""Conversations with model-free engines, whose books are checked at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_fork.events import CheckpointDiscarded, RequestFinished
from vllm_fork.model_free import (
    STOP_TOKEN,
    EventRecorder,
    FinishedRequest,
    ModelFreeEngine,
    PrefixCacheAudit,
    make_engine,
    make_request,
    references_beyond_requests,
    with_recorded_checkpoints,
)

BLOCK = 64
UNIT = 16


class Talk:
    """Requests to one engine, of blocks of :data:`BLOCK` and units of :data:`UNIT`."""

    def __init__(self, engine: ModelFreeEngine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.expects_wrong_states = False
        self._random = random.Random(0)
        self._num_requests = 0

    @property
    def events(self) -> EventRecorder:
        return self.engine.events

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(20, 500) for _ in range(count)]

    def answer(self, count: int) -> list[int]:
        """``count`` tokens, the stop token last."""
        return [*self.tokens(count - 1), STOP_TOKEN]

    def begin(
        self, prompt: Sequence[int], answer: Sequence[int], **options: Any
    ) -> Request:
        """Queue a request."""
        self._num_requests += 1
        request_id = options.pop("request_id", f"request-{self._num_requests}")
        request = make_request(
            request_id, prompt, hash_unit=self.scheduler.hash_block_size, **options
        )
        return self.engine.add(request, answer)

    def decode_until(self, request: Request, num_tokens: int) -> None:
        """Step until ``request`` has ``num_tokens``."""
        while request.num_tokens < num_tokens:
            assert not request.is_finished()
            self.engine.step()

    def ask(
        self, prompt: Sequence[int], answer: Sequence[int], **options: Any
    ) -> FinishedRequest:
        """A request and its end."""
        request = self.begin(prompt, answer, **options)
        self.engine.run()
        return self.engine.finished[request.request_id]

    def cached_tokens(self, prompt: Sequence[int], **options: Any) -> int:
        """What the prefix cache serves of ``prompt``."""
        return self.ask(prompt, [STOP_TOKEN], **options).cached_tokens

    def note_at_preemptions(self, note: Callable[[Scheduler], Any]) -> list[Any]:
        """What ``note`` says whenever somebody is about to be preempted."""
        notes: list[Any] = []
        preempt = self.scheduler._preempt_request

        def preempt_request(*args: Any, **kwargs: Any) -> None:
            notes.append(note(self.scheduler))
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempt_request
        return notes

    def finished_event(self, request: Request) -> RequestFinished:
        (event,) = [
            event
            for event in self.events.of_type(RequestFinished)
            if event.request_id == request.request_id
        ]
        return event

    def discard_reasons(self, request: Request) -> list[str]:
        return [
            event.reason
            for event in self.events.of_type(CheckpointDiscarded)
            if event.request_id == request.request_id
        ]

    def check(self) -> None:
        """What must hold once nothing runs."""
        self.engine.run()
        if not self.expects_wrong_states:
            assert self.engine.worker.errors == []
            assert PrefixCacheAudit(self.engine).problems() == []
        assert references_beyond_requests(self.scheduler) == {}
        assert self.engine.num_leaked_blocks == 0
        assert self.scheduler.reset_prefix_cache()
        if hasattr(self.scheduler, "publisher"):
            assert self.events.lifecycle_problems() == []
            assert self.events.open_checkpoints() == []
            assert {e.request_id for e in self.events.of_type(RequestFinished)} == set(
                self.engine.requests
            )


@pytest.fixture(params=["sync", "async"])
def is_async(request) -> bool:
    return request.param == "async"


@pytest.fixture
def start(is_async) -> Iterator[Callable[..., Talk]]:
    """Starts engines: ``start(retain=…, exact_tail=…, …)``; all are checked after
    the test. ``stock=True``: without any of our code."""
    talks: list[Talk] = []

    def start_engine(
        *,
        stock: bool = False,
        exact_tail: bool = False,
        copy_interval: int = 0,
        one_step_tokens: int = 256,
        publish_on: Sequence[str] = ("stop",),
        retain: bool = True,
        scheduler_cls: type[Scheduler] | None = None,
        **options: Any,
    ) -> Talk:
        cls = scheduler_cls or (AsyncScheduler if is_async else Scheduler)
        if not stock:
            cls = with_recorded_checkpoints(cls)
            options["settings"] = {
                "retain": retain,
                "exact_tail": exact_tail,
                "copy_interval": copy_interval,
                "one_step_tokens": one_step_tokens,
                "publish_on": list(publish_on),
            }
        options = {
            "block_size": BLOCK,
            "hash_unit": UNIT,
            "num_mamba_groups": 2,
        } | options
        talk = Talk(make_engine(cls, async_scheduling=is_async, **options))
        talks.append(talk)
        return talk

    yield start_engine
    for talk in talks:
        talk.check()


@pytest.fixture
def abort() -> Callable[[Talk, Request], None]:
    """Aborts as the engine core does: with a step whose output is not processed."""

    def abort_in_flight(talk: Talk, request: Request) -> None:
        talk.engine.abort(request.request_id)
        talk.engine.step()
        assert request.status == RequestStatus.FINISHED_ABORTED

    return abort_in_flight
