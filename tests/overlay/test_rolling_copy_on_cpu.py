"""A rolling copy is the state at its boundary, and resuming from it is exact."""

from __future__ import annotations

import pytest
import torch

from vllm_fork import events

INTERVAL = 64


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request, start_engine):
    settings = {
        "exact_tail": False,
        "copy_interval": INTERVAL,
        "publish_on": ["stop", "length", "abort"],
    }
    return start_engine(settings, asynchronous=request.param)


@pytest.fixture
def copies(engine):
    engine.events.clear()
    yield lambda kind: [
        e
        for e in engine.events
        if isinstance(e, kind) and e.boundary_kind == events.COPY
    ]
    engine.scheduler.check_integrity()
    assert engine.num_leaked_blocks == 0


@pytest.mark.parametrize(
    ("prompt_length", "decoded"), [(500, 150), (90, 110), (640, 140)]
)
def test_resuming_from_a_copy_is_exact(engine, copies, prompt_length, decoded):
    """The request ends by length: nothing but copies can be left below a block."""
    prompt = engine.prompt(prompt_length, seed=prompt_length)
    control = engine.ask(prompt, decoded, cached=False)
    # 640 + 128 is a block edge, where the block itself is the checkpoint.
    boundary = max(
        e.boundary for e in engine.events if isinstance(e, events.CheckpointPublished)
    )
    executed = prompt_length + decoded - 1
    assert boundary == executed // INTERVAL * INTERVAL
    # A prompt of one token more than the boundary resumes there, and its first
    # step is the very decode step that the control run did.
    said = prompt + control.token_ids
    steps = min(8, len(said) - boundary - 1)
    resumed = engine.ask(said[: boundary + 1], steps)
    assert resumed.num_cached_tokens == boundary
    expected = control.logprobs[boundary + 1 - prompt_length :]
    for got, want in zip(resumed.logprobs, expected, strict=False):
        common = got.keys() & want.keys()
        assert common
        assert max(abs(got[t] - want[t]) for t in common) == 0.0


def test_every_copy_is_the_live_state_bit_for_bit(engine, copies):
    checked = []
    execute = engine.runner.execute_model

    def compare(output, *args, **kwargs):
        # What the running block holds now is what the step's copies have to take.
        live = {
            copy.src_block_id: copy.dst_block_id
            for copy in output.kv_cache_block_copies or ()
        }
        before = {
            source: [engine.state(group, source) for group in engine.mamba_groups()]
            for source in live
        }
        result = execute(output, *args, **kwargs)
        for source, destination in live.items():
            after = [
                engine.state(group, destination) for group in engine.mamba_groups()
            ]
            checked.append(
                all(
                    torch.equal(x, y)
                    for was, kept in zip(before[source], after, strict=True)
                    for x, y in zip(was, kept, strict=True)
                )
            )
        return result

    engine.runner.execute_model = compare
    try:
        engine.ask(engine.prompt(200, seed=9), 300, cached=False)
    finally:
        engine.runner.execute_model = execute
    num_groups = len(engine.mamba_groups())
    assert len(checked) >= 3 * num_groups
    assert all(checked)
    assert copies(events.CheckpointPublished)
