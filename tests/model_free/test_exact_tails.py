"""What a next turn finds when the state at the last executed token is kept."""

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from vllm_fork.events import (
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPublished,
    PrefixReused,
)
from vllm_fork.exact_tail import TailIndex
from vllm_fork.model_free import STOP_TOKEN, make_request

BLOCK, UNIT = 64, 16


@pytest.fixture
def talk(start):
    return start(exact_tail=True)


@pytest.fixture
def executed(is_async):
    """Tokens of a finished sequence whose state is there: under asynchronous
    scheduling one step too many has run, which consumed the stop token."""
    return lambda sequence: len(sequence) - (not is_async)


def turn(talk, prompt, num_answer):
    """Ask; returns prompt and answer."""
    answer = talk.answer(num_answer)
    talk.ask(prompt, answer)
    return prompt + answer


@pytest.mark.parametrize("num_answer", [1, 2, 5, 18, 33, 50, 120, 300])
def test_next_turn_reuses_everything_that_was_executed(talk, executed, num_answer):
    history = turn(talk, talk.tokens(30), num_answer)
    for _ in range(3):
        prompt = history + talk.tokens(7)
        assert talk.cached_tokens(prompt) >= executed(history)
        history = turn(talk, prompt, num_answer)


@pytest.mark.parametrize("total", range(BLOCK - 2, BLOCK + 3))
def test_stop_around_a_block_edge(talk, executed, total):
    """The edge itself is the block-aligned checkpoint's."""
    history = turn(talk, talk.tokens(20), total - 20)
    assert talk.cached_tokens(history + talk.tokens(9)) == executed(history)


@pytest.mark.parametrize("total", range(3 * UNIT - 2, 3 * UNIT + 3))
def test_stop_around_the_hash_grid(talk, executed, total):
    history = turn(talk, talk.tokens(20), total - 20)
    assert talk.cached_tokens(history + talk.tokens(9)) == executed(history)


def test_a_template_that_drops_the_stop_token(start, is_async):
    """Asynchronous scheduling has a state with the stop token in it: the tail misses,
    and the block-aligned checkpoint serves."""
    talk = start(exact_tail=True)
    history = turn(talk, talk.tokens(30), 200)
    prompt = history[:-1] + talk.tokens(9)
    request = talk.begin(prompt, [STOP_TOKEN])
    talk.engine.run()
    cached = talk.engine.finished[request.request_id].cached_tokens
    assert cached == (3 * BLOCK if is_async else len(history) - 1)
    (reused,) = [
        event
        for event in talk.events.of_type(PrefixReused)
        if event.request_id == request.request_id
    ]
    assert reused.source_kind == ("decode_block" if is_async else "exact_tail")
    if is_async:
        # Of the last block, attention is on the hash grid nowhere either.
        assert reused.hit_limited_by == "attention"


def test_a_rewritten_answer_gets_the_block_below(talk):
    """Thinking that is not rendered again: what lies below the change is reused."""
    history = turn(talk, talk.tokens(30), 200)
    changed = history[: 3 * BLOCK + 4] + talk.tokens(30)
    assert talk.cached_tokens(changed) == 3 * BLOCK


def test_tails_that_start_alike(talk, executed):
    """Two answers to one prompt, and one that is a prefix of another."""
    prompt = talk.tokens(30)
    first, second = turn(talk, prompt, 29), turn(talk, prompt, 29)
    longer_answer = [*first[len(prompt) : -1], *talk.answer(20)]
    talk.ask(prompt, longer_answer)
    longer = prompt + longer_answer
    for history in (first, second, longer):
        assert talk.cached_tokens(history + talk.tokens(9)) == executed(history)
    # Diverging inside the tail: no tail, but no wrong state either.
    assert talk.cached_tokens(first[:-3] + talk.tokens(20)) < len(first) - 3


def test_many_next_turns_in_one_step(talk, executed):
    """A conversation that forks: each gets private blocks of its own."""
    history = turn(talk, talk.tokens(30), 100)
    requests = [
        talk.begin(history + talk.tokens(9), talk.answer(50 + i)) for i in range(4)
    ]
    talk.engine.run()
    for request in requests:
        record = talk.engine.finished[request.request_id]
        assert record.cached_tokens == executed(history)


def test_asking_the_same_again(talk):
    """The prompt's own tail key survives the exact tail in the same block."""
    prompt = talk.tokens(40)
    turn(talk, prompt, 10)
    assert talk.cached_tokens(prompt) == 32


def test_the_same_answer_twice(start):
    """Two states under one key: it is found until both are evicted, in any order."""
    talk = start(exact_tail=True, num_mamba_groups=1, num_blocks=30)
    prompt, answer = talk.tokens(30), talk.answer(20)
    for _ in range(2):
        talk.ask(prompt, answer)
    hit = talk.cached_tokens(prompt + answer + talk.tokens(12))  # uses one of them
    assert hit >= len(prompt + answer) - 1
    pinned = talk.events.of_type(CheckpointPinned)[1]
    assert pinned.boundary == hit
    talk.scheduler.kv_cache_manager.block_pool.evict_blocks(set(pinned.block_ids))
    assert talk.cached_tokens(prompt + answer + talk.tokens(12)) == hit
    while len(talk.events.of_type(CheckpointEvicted)) < 8:
        talk.ask(talk.tokens(200), talk.answer(3))
    assert talk.cached_tokens(prompt + answer + talk.tokens(12)) == 0


def test_next_prompt_is_the_tail_itself(talk):
    """One token has to run for its logits: the tail at the prompt's end is no use."""
    history = turn(talk, talk.tokens(30), 50)
    assert talk.cached_tokens(history[:-1]) < len(history) - 1


def test_the_key_separates_what_vllm_separates(talk, executed):
    prompt, answer = talk.tokens(10), talk.answer(4)  # below the first hash unit
    adapter = LoRARequest("adapter", 1, "/nowhere")
    kinds = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": adapter}]
    follow_up = prompt + answer + talk.tokens(9)
    for kind in kinds:
        assert talk.cached_tokens(follow_up, **kind) == 0
        assert talk.scheduler.reset_prefix_cache()
        talk.ask(prompt, answer, **kind)
        for other in kinds:
            if other is not kind:
                assert talk.cached_tokens(follow_up, **other) == 0
        assert talk.cached_tokens(follow_up, **kind) == executed(prompt + answer)
        assert talk.scheduler.reset_prefix_cache()


def test_chunked_prefill(start, executed):
    talk = start(exact_tail=True, max_num_batched_tokens=24)
    history = turn(talk, talk.tokens(150), 50)
    assert talk.cached_tokens(history + talk.tokens(60)) == executed(history)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_every_group_is_found(start, executed, num_groups):
    talk = start(exact_tail=True, num_mamba_groups=num_groups, num_attention_groups=2)
    history = turn(talk, talk.tokens(30), 75)
    assert talk.cached_tokens(history + talk.tokens(9)) == executed(history)
    published = talk.events.of_type(CheckpointPublished)
    assert {event.boundary_kind for event in published} == {
        "exact_tail",
        "decode_block",
    }


def test_a_tail_that_comes_while_a_prompt_waits(talk, executed):
    """That nothing was found for it before is remembered, but not for ever."""
    prompt, answer = talk.tokens(40), talk.answer(61)
    turn(talk, talk.tokens(21), 9)
    waiting = make_request("waiting", prompt + answer + talk.tokens(9))
    for _ in range(2):
        assert talk.scheduler.tails.find(waiting, 0) is None
    talk.ask(prompt, answer)
    hit = talk.scheduler.tails.find(waiting, 0)
    assert hit.num_tokens == executed(prompt + answer)


def test_a_look_up_goes_where_tails_are(talk, monkeypatch):
    """One unrelated tail does not make a huge prompt's look-up walk all of it."""
    turn(talk, talk.tokens(21), 9)
    huge = make_request("huge", talk.tokens(16 * 500))
    looked_at = []
    parent = TailIndex._parent
    monkeypatch.setattr(
        TailIndex, "_parent", lambda *a: looked_at.append(a[2]) or parent(*a)
    )
    assert talk.scheduler.tails.find(huge, 0) is None
    assert len(looked_at) == 1


def test_evicted_tails_are_never_found(start):
    """A full pool hands their blocks out: no entry may point at other content."""
    talk = start(exact_tail=True, num_blocks=24)
    histories = [turn(talk, talk.tokens(20), 30) for _ in range(12)]
    evicted = {e.checkpoint_id for e in talk.events.of_type(CheckpointEvicted)}
    assert evicted
    index = talk.scheduler.retention._tails
    assert len(index) <= talk.scheduler.kv_cache_config.num_blocks
    for history in histories:
        talk.cached_tokens(history + talk.tokens(5))  # check(): no wrong state
    talk.scheduler.reset_prefix_cache()
    assert len(index) == 0
    assert talk.cached_tokens(histories[-1] + talk.tokens(5)) == 0


def test_a_preempted_and_resumed_request(start, executed):
    talk = start(exact_tail=True)
    prompt, answer = talk.tokens(30), talk.answer(200)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 100)
    talk.scheduler.reset_prefix_cache(reset_running_requests=True)
    talk.engine.run()
    assert request.num_preemptions == 1
    history = prompt + answer
    assert talk.cached_tokens(history + talk.tokens(9)) == executed(history)


def test_publish_on_abort(start, abort, is_async):
    """A stop string. Under asynchronous scheduling a step in flight has consumed a
    token that is no part of the request: there the block-aligned checkpoint serves."""
    talk = start(exact_tail=True, publish_on=["stop", "abort"])
    prompt, answer = talk.tokens(30), talk.tokens(200)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 100)
    abort(talk, request)
    seen = list(request.all_token_ids)
    reached = BLOCK if is_async else len(seen)
    assert talk.cached_tokens(seen + talk.tokens(9)) == reached


def test_length_publishes_nothing_unless_asked(start):
    talk = start(exact_tail=True)
    prompt, answer = talk.tokens(30), talk.tokens(20)
    request = talk.begin(prompt, answer, max_tokens=20)
    talk.engine.run()
    assert talk.finished_event(request).no_checkpoint_reason == "length"
    assert talk.cached_tokens(prompt + answer + talk.tokens(9)) == 16


@pytest.mark.parametrize("num_drafts", [2, 4])
def test_off_with_drafts(start, num_drafts):
    """The accepted state sits in a scratch block: refused, and said."""
    talk = start(exact_tail=True, num_speculative_tokens=num_drafts)
    assert talk.events.started.exact_tail == "unsupported:speculative"
    history = turn(talk, talk.tokens(30), 50)
    talk.cached_tokens(history + talk.tokens(9))
    kinds = {e.boundary_kind for e in talk.events.of_type(CheckpointPublished)}
    assert "exact_tail" not in kinds


def test_the_standard_stream_keeps_quiet(start):
    """Nobody else could recompute a tail's key: it is not announced."""
    talk = start(exact_tail=True, kv_cache_events=True)
    announced = []
    take = talk.scheduler.kv_cache_manager.take_events

    def take_events():
        events = take()
        announced.extend(
            block_hash
            for event in events
            for block_hash in getattr(event, "block_hashes", ())
        )
        return events

    talk.scheduler.kv_cache_manager.take_events = take_events
    history = turn(talk, talk.tokens(20), 30)
    talk.cached_tokens(history + talk.tokens(9))
    for _ in range(3):
        turn(talk, talk.tokens(300), 5)
    talk.scheduler.reset_prefix_cache()
    take_events()
    known = {
        block_hash
        for request in talk.engine.requests.values()
        for block_hash in map(bytes, request.block_hashes)
    }
    assert announced
    assert {h for h in announced if isinstance(h, bytes)} <= known


def test_error_publishes_nothing(talk):
    prompt, answer = talk.tokens(30), talk.tokens(200)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 100)
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ERROR)
    assert talk.cached_tokens(list(request.all_token_ids) + talk.tokens(9)) == 16
