"""Both event streams of a real engine: the standard one and ours."""

from __future__ import annotations

import msgspec
import pytest

from vllm_fork import events


@pytest.fixture(scope="module")
def turns(engine):
    """Two turns of one session; the first decodes across two block boundaries."""
    assert engine.reset()
    prompt = engine.new_prompt(500)
    first = engine.ask(prompt, 500, session_id="streams")
    history = [*prompt, *first.token_ids, *engine.new_prompt(40)]
    second = engine.ask(history, 30, session_id="streams")
    return first, second


def of_kind(found, kind):
    return [event for event in found if isinstance(event, kind)]


def test_vllms_own_decoder_reads_the_standard_stream(engine, turns):
    """Its decoder is strict, and sees the published checkpoint as a stored block."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    published = {
        event.block_hash: event.boundary
        for event in of_kind(
            engine.events_of(turns[0].request_id), events.CheckpointPublished
        )
        if event.block_hash is not None
    }
    assert 2 * engine.block_size in published.values()
    stored = {
        block_hash: event.kv_cache_spec_kind
        for payload in engine.replay_kv_events()
        for event in of_kind(decoder.decode(payload).events, BlockStored)
        for block_hash in event.block_hashes
    }
    assert published.keys() <= stored.keys()
    assert any("mamba" in (stored[block_hash] or "") for block_hash in published)


def test_life_of_the_checkpoints_of_a_turn(engine, turns):
    """Each is pinned, promoted, and then published or discarded, once each."""
    first, _ = turns
    found = engine.events_of(first.request_id)
    lives: dict[int, list[events.CheckpointEvent]] = {}
    for event in of_kind(found, events.CheckpointEvent):
        lives.setdefault(event.checkpoint_id, []).append(event)
    told = {
        (life[0].boundary, life[0].boundary_kind): [type(e).__name__ for e in life]
        for life in lives.values()
    }
    block = engine.block_size
    executed = 500 + 500 - 1
    published = ["CheckpointPinned", "CheckpointPromoted", "CheckpointPublished"]
    assert told == {
        (2 * block, "decode_block"): published,
        (executed, "exact_tail"): published,
    }
    (finished,) = of_kind(found, events.RequestFinished)
    assert finished.retained_boundary == executed
    assert finished.retained_kind == "exact_tail"
    assert finished.no_checkpoint_reason is None


def test_reuse_names_its_source(engine, turns):
    first, second = turns
    (reused,) = of_kind(engine.events_of(second.request_id), events.PrefixReused)
    assert reused.num_cached_tokens == second.cached == 999
    assert reused.source_kind == "exact_tail"
    assert reused.source_external_request_id == first.request_id
    assert reused.source_boundary == second.cached
    assert reused.session_id == "streams"


def test_answer_that_crosses_no_block_leaves_its_exact_tail_alone(engine):
    answer = engine.ask(engine.new_prompt(40), 20)
    found = engine.events_of(answer.request_id)
    kinds = {e.boundary_kind for e in of_kind(found, events.CheckpointEvent)}
    assert kinds == {"exact_tail"}


def test_reset_is_told_of_every_published_checkpoint(engine, turns):
    engine.events_of(turns[1].request_id)
    assert engine.reset()
    last = engine.ask(engine.new_prompt(20), 2)
    engine.events_of(last.request_id)
    found = engine.replay_events()
    published = {
        e.checkpoint_id
        for e in of_kind(found, events.CheckpointPublished)
        if e.external_request_id != last.request_id
    }
    evicted = [e.checkpoint_id for e in of_kind(found, events.CheckpointEvicted)]
    assert sorted(evicted) == sorted(published)
