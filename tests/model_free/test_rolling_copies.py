"""What a next turn finds when the running state is copied every few tokens."""

from collections import Counter

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.v1.request import RequestStatus

from vllm_fork.events import (
    CheckpointEvent,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    PrefixReused,
)
from vllm_fork.model_free import blocks_only_pins_hold

BLOCK, UNIT = 64, 16


@pytest.fixture
def talk(start):
    return start(copy_interval=UNIT, publish_on=["stop", "length", "abort"])


@pytest.mark.parametrize("beyond", [-1, 0, 1, 7])
@pytest.mark.parametrize("num_units", [3, 4, 5, 11])
def test_length(talk, beyond, num_units):
    """The deepest multiple of the interval that was executed: the last token sampled
    was not."""
    prompt = talk.tokens(20)
    answer = talk.tokens(num_units * UNIT + beyond - len(prompt))
    talk.ask(prompt, answer, max_tokens=len(answer))
    executed = len(prompt) + len(answer) - 1
    hit = talk.cached_tokens(prompt + answer + talk.tokens(30))
    assert hit == executed // UNIT * UNIT


def test_abort(talk, abort):
    prompt, answer = talk.tokens(20), talk.tokens(300)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 107)
    abort(talk, request)
    assert talk.cached_tokens((prompt + answer)[:130]) == 96


def test_stop_of_an_answer_below_a_block(talk):
    prompt, answer = talk.tokens(20), talk.answer(25)
    request = talk.begin(prompt, answer)
    talk.engine.run()
    assert talk.finished_event(request).retained_kind == "copy"
    follow_up = talk.begin(prompt + answer + talk.tokens(30), talk.answer(2))
    talk.engine.run()
    (reused,) = [
        event
        for event in talk.events.of_type(PrefixReused)
        if event.request_id == follow_up.request_id
    ]
    assert (reused.num_cached_tokens, reused.source_kind) == (32, "copy")


def test_a_copy_from_the_block_after_the_former_copys(start):
    """Where no checkpoint at the end of a block came between them."""
    talk = start(copy_interval=UNIT, publish_on=["length"])
    talk.scheduler.retention._pin = lambda *args: None
    prompt, answer = talk.tokens(20), talk.tokens(75)
    talk.ask(prompt, answer, max_tokens=len(answer))
    assert "superseded" in talk.discard_reasons(talk.engine.requests["request-1"])
    assert talk.cached_tokens(prompt + answer + talk.tokens(30)) == BLOCK + UNIT


def test_a_longer_interval(start):
    talk = start(copy_interval=3 * UNIT, publish_on=["length"])
    prompt, answer = talk.tokens(20), talk.tokens(90)
    talk.ask(prompt, answer, max_tokens=90)
    assert talk.cached_tokens(prompt + answer + talk.tokens(30)) == 96


@pytest.mark.parametrize("interval", [BLOCK, 2 * BLOCK])
def test_an_interval_of_whole_blocks_leaves_them_to_the_other_kind(start, interval):
    talk = start(copy_interval=interval, publish_on=["length"], exact_tail=False)
    prompt, answer = talk.tokens(20), talk.tokens(200)
    talk.ask(prompt, answer, max_tokens=200)
    kinds = {event.boundary_kind for event in talk.events.of_type(CheckpointPinned)}
    assert kinds == {"decode_block"}
    assert talk.cached_tokens(prompt + answer + talk.tokens(30)) == 3 * BLOCK


def test_where_the_copies_of_a_long_answer_are(start):
    """At each multiple of the interval that is not the end of a block."""
    talk = start(copy_interval=3 * UNIT)
    request = talk.begin(talk.tokens(20), talk.answer(500))
    talk.engine.run()
    boundaries = copied_boundaries(talk, request)
    ends = range(3 * UNIT, request.num_tokens - 1, 3 * UNIT)
    assert boundaries == [end for end in ends if end % BLOCK]
    assert talk.finished_event(request).num_superseded == (
        len(boundaries) + (request.num_tokens - 1) // BLOCK - 1
    )


def copied_boundaries(talk, request):
    return [
        event.boundary
        for event in talk.events.of_type(CheckpointPinned)
        if event.request_id == request.request_id and event.boundary_kind == "copy"
    ]


def test_a_request_that_is_left_out_of_steps(start):
    """Its copies come as many steps later."""
    talk = start(copy_interval=UNIT)
    scheduler = talk.scheduler
    requests = [talk.begin(talk.tokens(20), talk.answer(180)) for _ in range(3)]
    talk.decode_until(requests[-1], 25)
    usual = scheduler.max_num_scheduled_tokens
    for step in range(120):
        # The last one, or the last two, find no room in it.
        scheduler.max_num_scheduled_tokens = (usual, 1, 2)[step // 3 % 3]
        talk.engine.step()
        scheduler.check_integrity()
    scheduler.max_num_scheduled_tokens = usual
    assert len({request.num_tokens for request in requests}) == 3
    talk.engine.run()
    for request in requests:
        ends = range(2 * UNIT, request.num_tokens - 1, UNIT)
        assert copied_boundaries(talk, request) == [end for end in ends if end % BLOCK]


@pytest.mark.parametrize("num_in_flight", [2, 4])
def test_a_copy_is_promoted_by_the_step_that_finds_it_accepted(
    start, is_async, num_in_flight
):
    talk = start(copy_interval=UNIT, batch_queue_size=num_in_flight if is_async else 1)
    scheduler = talk.scheduler
    requests = [talk.begin(talk.tokens(20 + i), talk.answer(150)) for i in range(3)]
    schedule = scheduler.schedule
    num_seen = 0

    def schedule_and_look(*args):
        nonlocal num_seen
        executed = {
            request.request_id: request.num_computed_tokens
            - request.num_in_flight_tokens
            for request in scheduler.running
        }
        output = schedule(*args)
        made = {
            event.checkpoint_id: event
            for event in talk.events.of_type(CheckpointPinned)
            if event.boundary_kind == "copy" and event.request_id in executed
        }
        promoted = {e.checkpoint_id for e in talk.events.of_type(CheckpointPromoted)}
        newest = {event.request_id: event for event in made.values()}
        for request_id, event in newest.items():
            is_accepted = event.boundary <= executed[request_id]
            # What this very step copied waits for the next one.
            is_new = (
                event.boundary == scheduler.requests[request_id].num_computed_tokens - 1
            )
            assert (event.checkpoint_id in promoted) == (is_accepted and not is_new)
            num_seen += is_new
        return output

    scheduler.schedule = schedule_and_look
    talk.engine.run()
    assert num_seen == sum(len(copied_boundaries(talk, r)) for r in requests)


def test_an_accepted_copy_is_promoted_before_the_next_step_takes_its_spare(start):
    talk = start(copy_interval=UNIT, num_blocks=40)
    request = talk.begin(talk.tokens(20), talk.answer(60))
    while 3 * UNIT not in copied_boundaries(talk, request):
        talk.engine.step()
    pool = talk.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    talk.begin(talk.tokens(20), talk.answer(5))
    while "memory_pressure" not in talk.discard_reasons(request):
        talk.engine.step()
    pool.free_blocks(held)
    stages = [
        type(event).__name__
        for event in talk.events.of_type(CheckpointEvent)
        if event.request_id == request.request_id and event.boundary == 3 * UNIT
    ]
    assert stages == ["CheckpointPinned", "CheckpointPromoted", "CheckpointDiscarded"]


def test_whoever_was_preempted_is_forgotten_in_the_end(start):
    """Also where nobody's copy ever looks for them."""
    talk = start(copy_interval=BLOCK, num_blocks=24)
    for _ in range(6):
        for _ in range(3):
            talk.begin(talk.tokens(30), talk.answer(300))
        talk.engine.run()
    assert talk.engine.num_preemptions > 6
    copies = talk.scheduler.retention.copies
    copies.note_preempted(next(iter(talk.engine.requests.values())))
    assert len(copies._displaced) == 1


def test_nothing_is_kept_of_who_has_ended(start):
    talk = start(copy_interval=50 * UNIT)
    for _ in range(5):
        talk.ask(talk.tokens(20), talk.answer(9))
    assert not any(talk.scheduler._watch.turns.values())
    assert not talk.scheduler._watch.alarms


def test_a_request_that_ends_takes_no_promotion_with_it(start):
    """It was due in the step that is to promote the other one's copy."""
    talk = start(copy_interval=UNIT)
    stays = talk.begin(talk.tokens(20), talk.answer(40))
    # One token behind, so that its copy is due one step later.
    leaves = talk.begin(talk.tokens(19), talk.answer(200))
    while stays.num_computed_tokens < 2 * UNIT + 1:
        talk.engine.step()
    talk.engine.finish(leaves.request_id, RequestStatus.FINISHED_ABORTED)
    for _ in range(4):
        talk.engine.step()
    assert not stays.is_finished()
    promoted = talk.events.of_type(CheckpointPromoted)
    assert [event.boundary for event in promoted] == [2 * UNIT]


def test_a_spare_in_use_does_not_come_to_the_front(start):
    """Free blocks are handed out from the front, and what others free goes behind."""
    talk = start(copy_interval=UNIT, num_blocks=60)
    talk.begin(talk.tokens(20), talk.answer(600))
    queue = talk.scheduler.kv_cache_manager.block_pool.free_block_queue
    watchers = talk.scheduler.kv_cache_manager.block_pool._reuse_watchers
    places = []
    while talk.engine.has_work:
        talk.engine.step()
        if watchers:
            # As another request would: one is taken and freed.
            queue.append(queue.popleft())
        free = [block.block_id for block in queue.get_all_free_blocks()]
        places += [free.index(block_id) / len(free) for block_id in watchers]
    assert places
    assert min(places) > 0


def test_spares_cost_no_running_request_a_block(start):
    """They are parked: the pool counts them as free, and takes them."""
    notes = []
    for num_blocks in range(24, 34, 3):
        talk = start(num_blocks=num_blocks, copy_interval=UNIT)
        notes += talk.note_at_preemptions(blocks_only_pins_hold)
        requests = [talk.begin(talk.tokens(30), talk.answer(400)) for _ in range(3)]
        talk.engine.run()
    assert not any(notes)
    reasons = {reason for r in requests for reason in talk.discard_reasons(r)}
    assert "memory_pressure" in reasons


def test_a_spare_that_is_handed_on_within_the_step(start):
    """Two copies are due and one has room: only the last one may be made."""
    talk = start(copy_interval=UNIT)
    requests = [talk.begin(talk.tokens(20), talk.answer(38)) for _ in range(2)]
    talk.decode_until(requests[0], 31)
    pool = talk.scheduler.kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    talk.engine.run()
    pool.free_blocks(held)
    assert "memory_pressure" in talk.discard_reasons(requests[0])
    hits = [talk.cached_tokens([*r.all_token_ids, *talk.tokens(9)]) for r in requests]
    assert hits == [0, 48]


def test_many_requests_at_once(talk):
    requests = [talk.begin(talk.tokens(20 + i), talk.answer(100 + i)) for i in range(8)]
    talk.engine.run()
    for request in requests:
        executed = request.num_tokens - 1
        follow_up = [*request.all_token_ids, *talk.tokens(20)]
        assert talk.cached_tokens(follow_up) >= executed // UNIT * UNIT
    published = talk.events.of_type(CheckpointPublished)
    assert {event.boundary_kind for event in published} >= {"copy"}


def test_off_with_drafts(start):
    talk = start(copy_interval=UNIT, num_speculative_tokens=2)
    assert talk.events.started.copy_interval == 0


def test_the_standard_stream_announces_what_it_takes_back(start):
    """A copy's attention key is in vLLM's KV events before its removal is."""
    talk = start(
        copy_interval=UNIT,
        publish_on=["length"],
        num_blocks=60,
        kv_cache_events=True,
    )
    told = []
    take = talk.scheduler.kv_cache_manager.take_events
    talk.scheduler.kv_cache_manager.take_events = lambda: told.extend(take() or ())
    prompt = talk.tokens(30)
    for num_tokens in [20, 45, 60] * 12:
        answer = talk.tokens(num_tokens)
        talk.ask(prompt, answer, max_tokens=num_tokens)
        prompt = prompt + answer + talk.tokens(7) if len(prompt) < 900 else prompt[:30]
    stored, removed = Counter(), Counter()
    for event in told:
        kind = stored if isinstance(event, BlockStored) else removed
        kind.update((event.group_idx, block_hash) for block_hash in event.block_hashes)
        assert not removed - stored
    assert removed


def test_none_while_a_preempted_request_waits(start):
    """Spares are taken from free blocks, which hold what is cached of it."""
    talk = start(copy_interval=UNIT, num_blocks=40)
    stays = talk.begin(talk.tokens(30), talk.answer(120))
    leaves = talk.begin(talk.tokens(30), talk.answer(120))

    def num_copies():
        pinned = talk.events.of_type(CheckpointPinned)
        return sum(
            event.boundary_kind == "copy" and event.request_id == stays.request_id
            for event in pinned
        )

    talk.decode_until(stays, 30 + 2 * UNIT)
    assert num_copies() > 0
    pool = talk.scheduler.kv_cache_manager.block_pool
    talk.scheduler.running.remove(leaves)
    talk.scheduler._preempt_request(leaves, 0.0)
    # Enough for one of them to go on.
    held = pool.get_new_blocks(pool.get_num_free_blocks() - 3)
    before = num_copies()
    talk.decode_until(stays, stays.num_tokens + 2 * UNIT)
    assert num_copies() == before
    assert "memory_pressure" in talk.discard_reasons(stays)
    pool.free_blocks(held)
    talk.engine.run()
    assert num_copies() > before
