"""Resuming from an exact tail is the same as never having stopped."""

from __future__ import annotations

import pytest
import torch

from vllm_fork import events

DIALOGS = [  # prompt tokens, tokens before the stop token is looked for
    (500, 50),
    (300, 67),
    (1000, 84),
    (90, 101),
    (30, 118),
    (700, 60),
    (383, 70),
    (64, 40),
    (129, 90),
    (760, 55),
]


def largest_difference(a: dict[int, float], b: dict[int, float]) -> float:
    return max(abs(a[token] - b[token]) for token in a.keys() & b.keys())


def distances(a, b) -> list[float]:
    return [largest_difference(x, y) for x, y in zip(a, b, strict=False)]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request, start_engine):
    return start_engine({}, asynchronous=request.param)


@pytest.fixture
def is_async(engine) -> bool:
    return engine.core.batch_queue is not None


@pytest.mark.parametrize(("prompt_length", "earliest"), DIALOGS)
def test_next_turn_resumes_at_the_last_executed_token(
    engine, is_async, prompt_length, earliest
):
    prompt = engine.prompt(prompt_length, seed=prompt_length)
    control = engine.ask(prompt, 190, cached=False)
    tokens = control.token_ids
    stop = next(i for i in range(earliest, 180) if tokens[i] not in tokens[:i])

    answer = engine.ask(prompt, 400, cached=False, stop_at=tokens[stop])
    assert answer.finish_reason == "stop"
    assert answer.token_ids == tokens[: stop + 1]
    said = prompt + answer.token_ids
    # The overrun step of asynchronous scheduling has consumed the stop token.
    executed = len(said) if is_async else len(said) - 1

    # A prompt has to leave one token to run, so the one that continues the control
    # run needs a token more where the whole turn was executed.
    ahead = [tokens[stop + 1]] if is_async else []
    resumed = engine.ask(said + ahead, 8)
    assert resumed.num_cached_tokens == executed
    assert distances(resumed.logprobs, control.logprobs[stop + 1 + len(ahead) :]) == (
        [0.0] * 8
    )

    next_turn = said + engine.prompt(40, seed=7)
    assert engine.ask(next_turn, 4).num_cached_tokens == executed
    assert engine.num_leaked_blocks == 0
    engine.scheduler.check_integrity()


def test_a_prompt_that_diverges_in_the_tail_gets_what_lies_below(engine):
    prompt = engine.prompt(200, seed=1)
    control = engine.ask(prompt, 120, cached=False)
    stop = next(
        i for i in range(100, 120) if control.token_ids[i] not in control.token_ids[:i]
    )
    answer = engine.ask(prompt, 200, cached=False, stop_at=control.token_ids[stop])
    said = prompt + answer.token_ids
    changed = said[-3:][::-1]
    diverged = said[:-3] + changed + engine.prompt(20, seed=2)
    reused = engine.ask(diverged, 4)
    fresh = engine.ask(diverged, 4, cached=False)
    assert reused.num_cached_tokens == 192  # the prompt's own boundary
    assert reused.token_ids == fresh.token_ids


def test_published_blocks_are_the_live_state_bit_for_bit(engine, is_async):
    """Compared with what the running block held before the next step ran."""
    live: dict[tuple[str, int], dict[int, list[torch.Tensor]]] = {}
    execute = engine.runner.execute_model

    def snapshot(output, *args, **kwargs):
        # Before the step: its running block holds the state at num_computed_tokens.
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            tables = engine.runner.requests[request_id].block_ids
            column = (computed - 1) // engine.scheduler.retention.block_size
            live[request_id, computed] = {
                group: engine.state(group, tables[group][column])
                for group in engine.mamba_groups()
            }
        return execute(output, *args, **kwargs)

    prompt = engine.prompt(250, seed=3)
    control = engine.ask(prompt, 100, cached=False)
    stop = next(
        i for i in range(70, 90) if control.token_ids[i] not in control.token_ids[:i]
    )
    # One more token than the turn that stops, so that the position it stops at is
    # seen here by a step that goes on.
    engine.runner.execute_model = snapshot
    try:
        engine.ask(prompt, stop + 4, cached=False)
    finally:
        engine.runner.execute_model = execute

    engine.events.clear()
    engine.ask(prompt, 200, cached=False, stop_at=control.token_ids[stop])
    pinned = {
        e.checkpoint_id: e
        for e in engine.events
        if isinstance(e, events.CheckpointPinned)
    }
    (published,) = (
        e for e in engine.events if isinstance(e, events.CheckpointPublished)
    )
    assert published.boundary_kind == events.EXACT_TAIL
    assert published.boundary == 250 + stop + (1 if is_async else 0)
    (seen,) = [s for (_, n), s in live.items() if n == published.boundary]
    blocks = pinned[published.checkpoint_id].block_ids
    for group, block_id in zip(engine.mamba_groups(), blocks, strict=False):
        tensors = engine.state(group, block_id)
        assert any(t.float().abs().sum() > 0 for t in tensors)
        for kept, was in zip(tensors, seen[group], strict=True):
            assert torch.equal(kept, was)


def test_against_no_cache_within_the_engines_own_noise(engine, record_property):
    """Decode and prefill differ in the last bits already, with no cache at all."""
    prompt = engine.prompt(420, seed=5)
    control = engine.ask(prompt, 150, cached=False)
    floor = []
    for i in (60, 80, 100, 120):
        prefilled = engine.ask(prompt + control.token_ids[:i], 1, cached=False)
        floor += distances(prefilled.logprobs, control.logprobs[i:])
    stop = next(
        i for i in range(90, 140) if control.token_ids[i] not in control.token_ids[:i]
    )
    answer = engine.ask(prompt, 200, cached=False, stop_at=control.token_ids[stop])
    next_turn = prompt + answer.token_ids + engine.prompt(30, seed=6)
    reused = engine.ask(next_turn, 1)
    fresh = engine.ask(next_turn, 1, cached=False)
    (difference,) = distances(reused.logprobs, fresh.logprobs)
    print(f"noise floor {max(floor):.4f}, reused against fresh {difference:.4f}")
    record_property("noise_floor", max(floor))
    record_property("reused_against_fresh", difference)
    assert reused.num_cached_tokens >= 420 + stop
    assert difference <= 3 * max(floor)
