"""Each stage of a checkpoint's life, and each way it ends, as told by the scheduler."""

import pytest
from vllm.v1.request import RequestStatus

from vllm_fork.events import (
    DISCARD_REASONS,
    CheckpointDiscarded,
    CheckpointEvent,
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
    EngineStopped,
    PrefixReused,
    RequestFinished,
)

BLOCK = 64


def of_request(talk, request, kind):
    return [e for e in talk.events.of_type(kind) if e.request_id == request.request_id]


def test_the_stages_of_one_checkpoint(start, is_async):
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(2 * BLOCK)
    request = talk.begin(prompt, answer, session_id="session")
    request.external_req_id = "outside"
    when = {}
    while not request.is_finished():
        talk.engine.step()
        for event in talk.events.of_type(CheckpointEvent):
            if event.boundary == 2 * BLOCK:
                when.setdefault(type(event).__name__, request.num_tokens)
    stages = [
        e for e in talk.events.of_type(CheckpointEvent) if e.boundary == 2 * BLOCK
    ]
    pinned, promoted, published = stages
    assert [type(e) for e in stages] == [
        CheckpointPinned,
        CheckpointPromoted,
        CheckpointPublished,
    ]
    assert len({event.checkpoint_id for event in stages}) == 1
    assert {event.boundary_kind for event in stages} == {"decode_block"}
    assert {event.external_request_id for event in stages} == {"outside"}
    assert {event.session_id for event in stages} == {"session"}
    assert pinned.monotonic_ns <= promoted.monotonic_ns <= published.monotonic_ns
    assert pinned.num_blocks == len(set(pinned.block_ids)) == 2  # Mamba groups
    assert promoted.supersedes_boundary == BLOCK
    assert published.finish_reason == "stop"
    # Pinned when the step was scheduled, promoted when the first step after its output
    # is; asynchronous scheduling has the output one turn of the engine later.
    assert when["CheckpointPromoted"] - when["CheckpointPinned"] == 1 + is_async


def test_a_checkpoint_is_told_before_the_end_of_its_request(start):
    talk = start(exact_tail=True)
    request = talk.begin(talk.tokens(30), talk.answer(200))
    talk.engine.run()
    last = talk.events.events[-1]
    assert isinstance(last, RequestFinished)
    assert last.request_id == request.request_id


def test_every_discard_reason(start, is_async, abort):
    """All that can be reached without a KV connector: ``rewound`` has a test of its
    own among the traps."""
    reasons = set()

    def run(talk, until=None, end=None, **options):
        request = talk.begin(talk.tokens(30), talk.answer(300), **options)
        if until:
            talk.decode_until(request, until)
        if end:
            end(request)
        talk.engine.run()
        reasons.update(talk.discard_reasons(request))
        return request

    talk = start()
    run(talk)
    assert reasons == {"superseded"}
    request = talk.begin(talk.tokens(30), talk.tokens(200), max_tokens=200)
    talk.engine.run()
    reasons.update(talk.discard_reasons(request))
    run(talk, 150, lambda request: abort(talk, request))
    run(
        talk,
        150,
        lambda r: talk.engine.finish(r.request_id, RequestStatus.FINISHED_ERROR),
    )
    run(talk, 150, lambda r: talk.scheduler.reset_prefix_cache(True))
    assert reasons == {"superseded", "length", "aborted", "error", "cache_reset"}

    # Aborted while the step that completes the boundary is in flight.
    def abort_at_boundary(request):
        while request.num_computed_tokens < 3 * BLOCK:
            talk.engine.step()
        talk.engine.finish(request.request_id, RequestStatus.FINISHED_ABORTED)

    run(talk, 150, abort_at_boundary)
    if is_async:
        assert "unaccepted" in reasons

    # A boundary that vLLM itself has cached for the prompt.
    talk = start(publish_on=["stop", "length"])
    request = talk.begin(talk.tokens(BLOCK + 10), talk.answer(1))
    talk.engine.run()
    prompt, answer = talk.tokens(30), talk.answer(2 * BLOCK)
    for _ in range(2):
        request = talk.begin(prompt, answer, cache_salt="again")
        talk.engine.run()
    reasons.update(talk.discard_reasons(request))

    for num_blocks in range(24, 36, 4):
        talk = start(num_blocks=num_blocks, num_mamba_groups=1)
        requests = [talk.begin(talk.tokens(30), talk.answer(400)) for _ in range(4)]
        talk.engine.run()
        reasons.update(*(talk.discard_reasons(request) for request in requests))

    talk = start()
    request = talk.begin(talk.tokens(30), talk.answer(300))
    talk.decode_until(request, 150)
    talk.scheduler.shutdown()
    reasons.update(talk.discard_reasons(request))
    assert isinstance(talk.events.events[-1], EngineStopped)
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ABORTED)

    expected = {"superseded", "length", "aborted", "error", "cache_reset", "preempted"}
    expected |= {"memory_pressure", "shutdown"}
    assert expected <= reasons <= set(DISCARD_REASONS)


def test_engine_started_comes_first(start, is_async):
    talk = start(exact_tail=True, publish_on=["stop", "abort"])
    talk.ask(talk.tokens(30), talk.answer(5))
    assert isinstance(talk.events.events[0], EngineStarted)
    started = talk.events.started
    assert started.retention == "on"
    assert started.retention_reason is None
    assert (started.block_size, started.hash_unit) == (BLOCK, 16)
    assert started.num_mamba_groups == 2
    assert started.num_blocks == 2000
    assert started.async_scheduling is is_async
    assert started.publish_on == ["abort", "stop"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"retain": False}, "disabled"),
        ({"retention_interval": None}, "unsupported:dense_retention"),
        ({"enable_prefix_caching": False}, "unsupported:prefix_caching_off"),
        (
            {"num_mamba_groups": 0, "hash_unit": BLOCK},
            "unsupported:no_align_mamba_groups",
        ),
    ],
)
def test_where_nothing_is_retained(start, options, reason):
    """The engine runs, and every request says why it left nothing."""
    talk = start(**options)
    assert talk.events.started.retention == "off"
    assert talk.events.started.retention_reason == reason
    request = talk.begin(talk.tokens(30), talk.answer(200))
    talk.engine.run()
    assert talk.finished_event(request).no_checkpoint_reason == reason
    assert talk.events.of_type(CheckpointEvent) == []


def test_eviction(start):
    """By the pool, by a reset; with its age and how often it was hit."""
    talk = start(num_blocks=24)
    history = talk.tokens(30) + talk.answer(100)
    request = talk.begin(history[:30], history[30:])
    talk.engine.run()
    for _ in range(2):
        assert talk.cached_tokens(history + talk.tokens(3)) == 2 * BLOCK
    while not of_request(talk, request, CheckpointEvicted):
        talk.ask(talk.tokens(100), talk.answer(5))
    (evicted,) = of_request(talk, request, CheckpointEvicted)
    (published,) = of_request(talk, request, CheckpointPublished)
    assert (evicted.reason, evicted.num_hits) == ("lru", 2)
    assert evicted.checkpoint_id == published.checkpoint_id
    assert evicted.boundary == published.boundary
    lived = (evicted.monotonic_ns - published.monotonic_ns) / 1e9
    assert evicted.age_s == pytest.approx(lived, abs=0.01)

    other = talk.begin(talk.tokens(30), talk.answer(100))
    talk.engine.run()
    assert talk.scheduler.reset_prefix_cache()
    (evicted,) = of_request(talk, other, CheckpointEvicted)
    assert (evicted.reason, evicted.num_hits) == ("cache_reset", 0)


class TestAdmission:
    """Why a prompt was reused as deep as it was."""

    def admission(self, talk, prompt, **options):
        request = talk.begin(prompt, talk.answer(3), **options)
        talk.engine.run()
        (event,) = of_request(talk, request, PrefixReused)
        cached = talk.engine.finished[request.request_id].cached_tokens
        assert event.num_cached_tokens == cached
        assert event.num_prompt_tokens == len(prompt)
        assert not event.resumed
        return event

    def test_nothing_is_cached(self, start):
        event = self.admission(talk := start(), talk.tokens(200))
        assert (event.num_cached_tokens, event.source_kind) == (0, "none")
        assert event.hit_limited_by == "attention"

    def test_everything_is_reused(self, start):
        talk = start(exact_tail=True)
        history = talk.tokens(30) + talk.answer(100)
        first = talk.begin(history[:30], history[30:])
        talk.engine.run()
        event = self.admission(talk, history + talk.tokens(1))
        assert event.source_kind == "exact_tail"
        assert event.source_request_id == first.request_id
        assert event.source_boundary == event.num_cached_tokens
        assert event.hit_limited_by == "prompt_end"

    def test_the_same_prompt_again(self, start):
        talk = start()
        prompt = talk.tokens(100)
        first = talk.begin(prompt, talk.answer(3))
        talk.engine.run()
        event = self.admission(talk, prompt)
        assert (event.num_cached_tokens, event.source_kind) == (96, "prompt_replay")
        assert event.source_request_id == first.request_id
        assert event.hit_limited_by == "prompt_end"

    def test_attention_is_deeper_than_the_state(self, start):
        talk = start()
        history = talk.tokens(30) + talk.answer(4 * BLOCK)
        talk.ask(history[:30], history[30:])
        event = self.admission(talk, history[: 3 * BLOCK + 10] + talk.tokens(50))
        assert event.num_cached_tokens == 16
        assert event.hit_limited_by == "recurrent_state"
        assert event.shared_prefix_boundary == 3 * BLOCK

    def test_a_shared_prefix(self, start):
        """The third of its kind finds the junction that the second left."""
        talk = start()
        shared = talk.tokens(2 * BLOCK + 10)
        for _ in range(2):
            talk.ask(shared + talk.tokens(60), talk.answer(3))
        event = self.admission(talk, shared + talk.tokens(60))
        assert (event.num_cached_tokens, event.source_kind) == (
            2 * BLOCK,
            "shared_prefix",
        )

    def test_not_asked_for(self, start):
        talk = start()
        prompt = talk.tokens(100)
        talk.ask(prompt, talk.answer(3))
        request = talk.begin(prompt, talk.answer(3))
        request.skip_reading_prefix_cache = True
        talk.engine.run()
        (event,) = of_request(talk, request, PrefixReused)
        assert (event.num_cached_tokens, event.hit_limited_by) == (0, "skipped")

    def test_a_readmission_is_marked(self, start):
        talk = start()
        request = talk.begin(talk.tokens(100), talk.answer(200))
        talk.decode_until(request, 150)
        talk.scheduler.reset_prefix_cache(reset_running_requests=True)
        talk.engine.run()
        events = of_request(talk, request, PrefixReused)
        assert [event.resumed for event in events] == [False, True]
        assert talk.finished_event(request).num_cached_tokens == 0


def test_request_finished_adds_up(start):
    """One for each request, with what its client was told."""
    talk = start(exact_tail=True)
    requests = [talk.begin(talk.tokens(30 + i), talk.answer(60 + i)) for i in range(5)]
    talk.engine.run()
    for request in requests:
        event = talk.finished_event(request)
        record = talk.engine.finished[request.request_id]
        assert event.num_output_tokens == record.num_output_tokens
        assert event.num_cached_tokens == record.cached_tokens
        assert event.finish_reason == record.finish_reason == "stop"
        assert event.num_prompt_tokens == request.num_prompt_tokens
        assert event.retained_kind == "exact_tail"


def test_events_off_costs_no_event(start):
    """The observer collects nothing for a publisher that is not there."""
    talk = start()
    talk.scheduler.observer.enabled = False
    before = len(talk.events.events)
    talk.ask(talk.tokens(30), talk.answer(200))
    assert len(talk.events.events) == before
    talk.scheduler.observer.enabled = True
    talk.events.events.extend(
        RequestFinished(
            time_unix_ns=0,
            monotonic_ns=0,
            request_id=request_id,
            num_prompt_tokens=0,
            num_output_tokens=0,
            num_cached_tokens=0,
            finish_reason="stop",
        )
        for request_id in talk.engine.requests
    )


def test_discard_is_never_told_twice(start):
    talk = start(exact_tail=True)
    for _ in range(4):
        talk.begin(talk.tokens(30), talk.answer(300))
    talk.engine.run()
    told = [e.checkpoint_id for e in talk.events.of_type(CheckpointDiscarded)]
    assert len(told) == len(set(told))
