"""A next turn resumes from what the last one left, and nothing is computed wrong."""

from __future__ import annotations

import pytest


@pytest.fixture
def turn(engine):
    """A finished first turn: 500 prompt tokens, 500 decoded, the stop token last."""
    prompt = engine.new_prompt(500)
    answer = engine.ask(prompt, 500)
    assert answer.finish_reason == "stop"
    return prompt, answer


def test_next_turn_resumes_from_the_last_executed_token(engine, turn):
    prompt, answer = turn
    history = [*prompt, *answer.token_ids]
    follow_up = engine.ask([*history, *engine.new_prompt(40)], 8)
    # Synchronous scheduling: the stop token was sampled, but never executed.
    assert follow_up.cached == len(history) - 1


def test_diverging_turn_resumes_from_the_block_below(engine, turn):
    """A template that drops the answer's end leaves the block-aligned checkpoint."""
    prompt, answer = turn
    history = [*prompt, *answer.token_ids[:-20]]
    follow_up = engine.ask([*history, *engine.new_prompt(40)], 8)
    assert follow_up.cached == len(history) // engine.block_size * engine.block_size
    assert follow_up.cached > len(prompt)


def test_resumed_turn_decodes_what_the_uninterrupted_one_does(engine):
    """Token for token and probability for probability: the state is exact."""
    prompt = engine.new_prompt(500)
    whole = engine.ask(prompt, 600, stop=False)
    assert engine.reset()
    first = engine.ask(prompt, 500)
    assert first.token_ids[:-1] == whole.token_ids[:499]
    history = [*prompt, *whole.token_ids[:500]]
    resumed = engine.ask(history, 100, stop=False)
    assert resumed.cached == len(history) - 1
    assert resumed.token_ids == whole.token_ids[500:]
    assert resumed.logprobs == whole.logprobs[500:]


def test_nothing_stays_held(engine, turn):
    assert engine.reset()
