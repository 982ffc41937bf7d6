"""Into which steps the prefill of a follow-up turn is split."""

import pytest
from vllm.v1.request import RequestStatus

from vllm_fork.events import PrefixReused
from vllm_fork.model_free import STOP_TOKEN

BLOCK, UNIT = 64, 16


def turn(talk, num_prompt, num_answer):
    """A first turn; returns what was said."""
    prompt, answer = talk.tokens(num_prompt), talk.answer(num_answer)
    talk.ask(prompt, answer)
    return prompt + answer


@pytest.fixture
def watch(monkeypatch):
    """The tokens that each step of an engine schedules from here on, by request."""

    def record(talk):
        steps, schedule = [], talk.scheduler.schedule

        def recorded(*args, **kwargs):
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                steps.append(output.num_scheduled_tokens)
            return output

        monkeypatch.setattr(talk.scheduler, "schedule", recorded)
        return steps

    return record


@pytest.fixture
def prefill(watch):
    """Asks for one token, and returns what of the prompt was reused and by which steps
    the rest ran (tokens a step)."""

    def ask(talk, prompt):
        steps = watch(talk)
        request = talk.begin(prompt, [STOP_TOKEN])
        talk.engine.run()
        tokens = [step[request.request_id] for step in steps]
        cached = talk.engine.finished[request.request_id].cached_tokens
        while sum(tokens) > len(prompt) - cached:  # the overrun of async scheduling
            tokens.pop()
        return cached, tokens

    return ask


def is_armed(talk):
    """Whether the next call for a split finds ours in vLLM's place."""
    return "_mamba_block_aligned_split" in vars(talk.scheduler)


def look_up(talk, prompt):
    """A request that was looked up, and nothing more."""
    request = talk.begin(prompt, [STOP_TOKEN])
    talk.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert is_armed(talk)
    return request


def in_two(prompt, cached):
    """The steps by which vLLM runs the rest of ``prompt``."""
    last = (len(prompt) - 1) // UNIT * UNIT
    return [last - cached, len(prompt) - last]


def test_a_follow_up_runs_in_one_step(start, prefill):
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    cached, steps = prefill(talk, said + talk.tokens(20))
    assert cached >= 33
    assert steps == [len(said) + 20 - cached]


def test_vllm_alone_takes_two(start, prefill):
    """And so does whoever sets ``one_step_tokens`` to 0."""
    stock, off = start(stock=True), start(exact_tail=True, one_step_tokens=0)
    prompt = stock.tokens(30)
    assert prefill(stock, prompt) == (0, [16, 14])
    said = turn(off, 30, 4)
    prompt = said + off.tokens(20)
    cached, steps = prefill(off, prompt)
    assert steps == in_two(prompt, cached)


def test_only_so_many_tokens_run_in_one_step(start, prefill, is_async):
    talk = start(exact_tail=True, one_step_tokens=18)
    said = turn(talk, 30, 4)
    executed = len(said) - (not is_async)
    prompt = said + talk.tokens(executed + 18 - len(said))
    assert prefill(talk, prompt) == (executed, [18])
    prompt = said + talk.tokens(executed + 19 - len(said))
    cached, steps = prefill(talk, prompt)
    assert steps == in_two(prompt, cached)


def test_the_same_prompt_again_leaves_its_state(start, prefill):
    """A retry runs as in vLLM, and leaves what the next one resumes from."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    prompt = said + talk.tokens(20)
    cached, _ = prefill(talk, prompt)
    assert prefill(talk, prompt) == (cached, in_two(prompt, cached))
    cached, steps = prefill(talk, prompt)
    assert cached == (len(prompt) - 1) // UNIT * UNIT
    assert steps == [len(prompt) - cached]


def test_other_follow_ups_of_the_same_answer(start, prefill):
    """A conversation that forks: each prompt is asked for the first time."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    for _ in range(3):
        cached, steps = prefill(talk, said + talk.tokens(20))
        assert steps == [len(said) + 20 - cached]


def test_prompts_that_differ_in_their_last_unit_only(start, prefill):
    """They would share the state that the first one did not leave."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    prompt = said + talk.tokens(20)
    cached, _ = prefill(talk, prompt)
    other = [*prompt[:-1], prompt[-1] + 1]
    assert prefill(talk, other) == (cached, in_two(other, cached))


def test_no_step_runs_over_the_end_of_a_block(start, prefill):
    """The state of a prompt's last block is cached there, as in vLLM."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 24)
    prompt = said + talk.tokens(20)
    cached, steps = prefill(talk, prompt)
    assert cached < BLOCK < len(prompt)
    assert steps == [BLOCK - cached, len(prompt) - BLOCK]


def test_a_prompt_that_ends_with_a_block(start, prefill):
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    prompt = said + talk.tokens(BLOCK - len(said))
    cached, steps = prefill(talk, prompt)
    assert steps == [BLOCK - cached]


@pytest.mark.parametrize("copy_interval", [0, 16])
def test_behind_a_block_boundary_or_a_copy(start, prefill, copy_interval):
    """Whichever checkpoint a conversation goes on from."""
    talk = start(exact_tail=True, copy_interval=copy_interval)
    said = turn(talk, 30, 120)
    kept = said[: 2 * BLOCK + (17 if copy_interval else 1)]
    prompt = kept + talk.tokens(21)
    cached, steps = prefill(talk, prompt)
    assert cached == 2 * BLOCK + (16 if copy_interval else 0)
    assert steps == [len(prompt) - cached]


def test_behind_a_state_of_vllms_own(start, prefill):
    """A template that drops the thinking resumes from prompts' states alone: none of
    them may be missing."""
    talk = start(exact_tail=True)
    said = turn(talk, 33, 20)
    prompt = said[:34] + talk.tokens(21)
    assert prefill(talk, prompt) == (32, in_two(prompt, 32))


def test_prompts_that_share_more_than_the_checkpoint(start, prefill):
    """A state is wanted where they part: attention alone is cached up to there."""
    talk = start(exact_tail=True)
    said = turn(talk, 20, 4)
    document = talk.tokens(30)
    first = said + document
    cached, steps = prefill(talk, first)
    assert steps == [len(first) - cached]
    second = said + document[:-4] + talk.tokens(4)
    assert prefill(talk, second) == (cached, in_two(second, cached))
    third = said + document[:-4] + talk.tokens(4)
    assert prefill(talk, third)[0] == 48


def test_a_step_that_is_too_small_for_it(start, prefill):
    talk = start(exact_tail=True, max_num_batched_tokens=16)
    said = turn(talk, 30, 4)
    prompt = said + talk.tokens(18)
    cached, steps = prefill(talk, prompt)
    stock = start(stock=True, max_num_batched_tokens=16)
    assert max(steps) <= 16
    assert len(steps) > 1
    assert sum(steps) == len(prompt) - cached
    assert sum(prefill(stock, prompt)[1]) == len(prompt)


def test_one_that_waits_for_memory(start, watch, is_async):
    """It is looked up in every step, and admitted in one of them."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    pool = talk.scheduler.kv_cache_manager.block_pool
    # All but the blocks of the checkpoint, which has none beside it to be copied to.
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    steps = watch(talk)
    talk.begin(said + talk.tokens(20), [STOP_TOKEN], request_id="waiting")
    for _ in range(3):
        talk.engine.step()
    assert steps == []
    pool.free_blocks(held)
    talk.engine.run()
    assert steps[0] == {"waiting": 20 + (not is_async)}


def test_running_requests_are_asked_nothing(start, prefill):
    """vLLM's own method is back in its place after the one call."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    prefill(talk, said + talk.tokens(20))
    assert not is_armed(talk)


def test_a_look_up_that_led_to_no_admission(start, watch):
    """What was meant for one request does nothing to the next."""
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    request = look_up(talk, said + talk.tokens(20))
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ABORTED)
    other = talk.begin(talk.tokens(30), [STOP_TOKEN])
    steps = watch(talk)
    talk.engine.run()
    assert steps[0] == {other.request_id: 16}
    assert not is_armed(talk)


def test_a_look_up_that_another_one_of_the_request_follows(start, watch):
    """No split was asked for in between; the checkpoint is gone meanwhile."""
    talk = start(exact_tail=True)
    said = turn(talk, 100, 40)
    request = look_up(talk, said + talk.tokens(12))
    assert talk.scheduler.reset_prefix_cache()
    steps = watch(talk)
    talk.engine.run()
    assert [step[request.request_id] for step in steps][:2] == [2 * BLOCK, 16]
    assert not is_armed(talk)


def test_the_answer_of_a_follow_up_is_retained_as_ever(start, is_async):
    talk = start(exact_tail=True)
    said = turn(talk, 30, 4)
    for _ in range(3):
        prompt, answer = said + talk.tokens(20), talk.answer(17)
        record = talk.ask(prompt, answer)
        assert record.cached_tokens == len(said) - (not is_async)
        said = prompt + answer
    kinds = [e.source_kind for e in talk.events.of_type(PrefixReused)]
    assert kinds == ["none", "exact_tail", "exact_tail", "exact_tail"]
