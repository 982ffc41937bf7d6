"""The traps of retention at block boundaries, one test each.

The ninth, ``--use-replayssm``, is refused by the front end: see tests/frontend.
Blocks have 64 tokens, prefixes are matched every 16.
"""

from dataclasses import replace

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus, StreamingUpdate

from vllm_fork.events import CheckpointPinned, CheckpointPublished, PrefixReused
from vllm_fork.model_free import STOP_TOKEN, blocks_only_pins_hold, make_request

BLOCK = 64


@pytest.mark.parametrize(
    ("publish_on", "expected"), [(["stop"], 16), (["stop", "abort"], 192)]
)
def test_1_a_stop_string_reaches_the_core_as_an_abort(
    start, abort, publish_on, expected
):
    """So what may publish is a policy: the state is valid whatever ended it."""
    talk = start(publish_on=publish_on)
    prompt, answer = talk.tokens(30), talk.tokens(300)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 200)
    abort(talk, request)
    assert talk.cached_tokens((prompt + answer)[:220]) == expected
    reason = talk.finished_event(request).no_checkpoint_reason
    assert reason == ("aborted" if expected == 16 else None)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_2_a_resumed_prefill_leaves_a_state_inside_a_block(start, num_drafts):
    """Backends that export prefill states (Mamba2, KDA) put it in the very column
    that would hold the boundary."""
    talk = start(
        num_prefill_checkpoint_blocks=1,
        num_speculative_tokens=num_drafts,
        accept=lambda request_id, position, drafts: 0,
    )
    for length in range(200, 216):
        prompt, answer = talk.tokens(30), talk.answer(length - 30)
        request = talk.begin(prompt, answer)
        talk.decode_until(request, length - 3)
        talk.scheduler.reset_prefix_cache(reset_running_requests=True)
        talk.engine.run()
        assert request.num_preemptions == 1
        # check() of the fixture: no wrong state in the cache, none was read.
        talk.cached_tokens(prompt + answer + talk.tokens(20))
        assert talk.scheduler.reset_prefix_cache()


def test_3_drafts_accepted_past_the_stop_token(start):
    """They advance ``num_computed_tokens``, but are no part of the request."""
    talk = start(num_speculative_tokens=4)
    past_the_end = []
    talk.engine.before_update = lambda: past_the_end.extend(
        r for r in talk.scheduler.running if r.num_computed_tokens > 2 * BLOCK
    )
    for length in range(2 * BLOCK - 8, 2 * BLOCK):
        prompt, answer = talk.tokens(20), talk.answer(length - 20)
        request = talk.begin(prompt, answer)
        talk.engine.run()
        assert talk.cached_tokens(prompt + answer + talk.tokens(90)) <= length
        assert talk.finished_event(request).retained_boundary in (None, BLOCK)
    assert past_the_end, "no draft crossed the boundary after the stop token"


def test_4_the_last_step_crosses_a_boundary_with_drafts(start):
    """The attention blocks below it were hashed up to the last allocation only."""
    talk = start(num_speculative_tokens=4)
    for length in range(2 * BLOCK + 1, 2 * BLOCK + 12):
        prompt, answer = talk.tokens(20), talk.answer(length - 20)
        talk.ask(prompt, answer)
        assert talk.cached_tokens(prompt + answer + talk.tokens(30)) == 2 * BLOCK


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("exact_tail", [False, True])
def test_5_a_pin_never_costs_a_running_request(start, exact_tail, num_groups):
    """When somebody is preempted no block is held by pins alone: stock vLLM would
    have had to preempt as well. (Histories part from there: what is evicted, and so
    who is admitted when, differs. Over many pools stock preempts more.)"""
    preemptions = {"stock": 0, "retained": 0}
    relieved = 0
    for num_blocks in range(24, 36, 4):
        options = {"num_blocks": num_blocks, "num_mamba_groups": num_groups}
        for name in preemptions:
            talk = start(stock=name == "stock", exact_tail=exact_tail, **options)
            held_by_pins = talk.note_at_preemptions(blocks_only_pins_hold)
            for i in range(4):
                talk.begin(talk.tokens(30 + i), talk.answer(400 - 10 * i))
            talk.engine.run()
            assert not any(held_by_pins)
            preemptions[name] += talk.engine.num_preemptions
        relieved += sum(
            talk.discard_reasons(request).count("memory_pressure")
            for request in talk.engine.requests.values()
        )
    assert 0 < preemptions["retained"] <= preemptions["stock"]
    assert relieved, "no pin ever stood in the way"


def test_5_the_smallest_pool(start):
    """Where stock finishes a lone request, so does retention, in as many steps."""

    def steps(talk, prompt, answer):
        request = talk.begin(prompt, answer)
        talk.engine.run(max_steps=2000)
        assert request.num_preemptions == 0
        return talk.engine.worker.num_steps

    for num_groups in (1, 3):
        prompt = list(range(20, 50))
        answer = [*range(50, 380), STOP_TOKEN]
        for num_blocks in range(7, 40):
            options = {"num_blocks": num_blocks, "num_mamba_groups": num_groups}
            stock = start(stock=True, **options)
            try:
                expected = steps(stock, prompt, answer)
            except (RuntimeError, AssertionError):
                stock.engine.finish("request-1", RequestStatus.FINISHED_ABORTED)
                continue
            assert steps(start(**options), prompt, answer) == expected
            break
        else:
            pytest.fail("stock finished in no pool")


def test_6_a_streaming_session_may_rewrite_its_last_token(start, is_async):
    """Its next input discards the token sampled last: nothing of it is retained."""
    talk = start(exact_tail=True)
    prompt, answer = talk.tokens(30), talk.answer(200)
    session = talk.begin(prompt, answer, resumable=True)
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        talk.engine.step()
    assert talk.events.of_type(CheckpointPinned) == []
    follow_up = make_request("request-1", talk.tokens(70), hash_unit=16, resumable=True)
    update = StreamingUpdate.from_request(follow_up)
    kept = prompt + answer[:-1]
    talk.scheduler._update_request_as_session(session, update)
    talk.scheduler.finish_requests("request-1", RequestStatus.FINISHED_ABORTED)
    talk.engine.run()
    assert talk.finished_event(session).no_checkpoint_reason == "resumable"
    assert talk.cached_tokens(kept + talk.tokens(20)) < BLOCK


def test_7_a_rewind_drops_what_lies_beyond(start, is_async):
    """KV blocks that failed to load take a running request back."""

    class Rewinding(Scheduler):
        """What vLLM does for layouts with one group."""

        def _handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens):
            for request in self.running:
                request.num_computed_tokens = BLOCK
            return {request.request_id for request in self.running}

    if is_async:
        pytest.skip("vLLM rewinds between synchronous steps")
    talk = start(scheduler_cls=Rewinding)
    talk.expects_wrong_states = True  # no worker of vLLM restores a state on this path
    request = talk.begin(talk.tokens(30), talk.answer(250))
    talk.decode_until(request, 3 * BLOCK + 5)
    assert talk.discard_reasons(request) == ["superseded", "superseded"]

    execute = talk.engine.worker.execute
    failed = KVConnectorOutput(invalid_block_ids={1})
    talk.engine.worker.execute = lambda output: replace(
        execute(output), kv_connector_output=failed
    )
    talk.engine.step()
    talk.engine.worker.execute = execute
    assert talk.discard_reasons(request)[2:] == ["rewound"]
    assert talk.scheduler.check_integrity().num_pinned_checkpoints == 0
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ABORTED)


def test_8_the_standard_stream_has_empty_hash_lists(start):
    """Stock vLLM emits ``BlockStored`` without hashes for masked blocks; a published
    checkpoint is one ordinary ``BlockStored`` of one block in it."""
    talk = start(kv_cache_events=True)
    stored = []
    take = talk.scheduler.kv_cache_manager.take_events

    def take_events():
        events = take()
        stored.extend(e for e in events if isinstance(e, BlockStored))
        return events

    talk.scheduler.kv_cache_manager.take_events = take_events
    prompt, answer = talk.tokens(30), talk.answer(200)
    request = talk.begin(prompt, answer)
    talk.engine.run()
    talk.engine.step()
    take_events()
    assert [] in [event.block_hashes for event in stored]
    (published,) = talk.events.of_type(CheckpointPublished)
    of_checkpoint = [e for e in stored if published.block_hash in e.block_hashes]
    # Attention first, which was there while decoding, then each Mamba group.
    assert [event.group_idx for event in of_checkpoint] == [0, 1, 2]
    for event in of_checkpoint[1:]:
        assert event.block_hashes == [published.block_hash]
        assert event.block_size == BLOCK
        boundary = published.boundary
        assert event.token_ids == (prompt + answer)[boundary - BLOCK : boundary]
    assert request.num_tokens // BLOCK * BLOCK == published.boundary


def test_a_conversation_is_found_again(start):
    """The counterpart of all of the above: in order, it is reused, and told."""
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(200)
    request = talk.begin(prompt, answer)
    talk.engine.run()
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 3 * BLOCK
    (reused,) = [
        event
        for event in talk.events.of_type(PrefixReused)
        if event.source_request_id == request.request_id
    ]
    assert (reused.source_kind, reused.source_boundary) == ("decode_block", 3 * BLOCK)
