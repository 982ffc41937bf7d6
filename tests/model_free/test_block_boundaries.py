"""What a next turn finds when checkpoints at block boundaries are retained."""

import pytest
from vllm.v1.request import RequestStatus

from vllm_fork.events import CheckpointPinned
from vllm_fork.model_free import STOP_TOKEN

BLOCK = 64


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_stop_at_a_boundary(start, is_async, beyond):
    """Synchronous scheduling never runs the stop token; asynchronous scheduling has
    run it when it is found out, so the boundary right behind it is there."""
    talk = start()
    prompt = talk.tokens(30)
    answer = talk.answer(3 * BLOCK + beyond - len(prompt))
    request = talk.begin(prompt, answer)
    talk.engine.run()
    reached = 3 * BLOCK if beyond > 0 else 2 * BLOCK
    assert talk.finished_event(request).retained_boundary == reached
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == reached


@pytest.mark.parametrize("num_answer", [1, 2, 5])
def test_prompt_ends_at_a_boundary(start, num_answer):
    """Its state is decoding's too: vLLM itself keeps one unit less, to run a token."""
    talk = start()
    prompt, answer = talk.tokens(2 * BLOCK), talk.answer(num_answer)
    talk.ask(prompt, answer)
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 2 * BLOCK
    assert talk.cached_tokens(prompt) == 2 * BLOCK - 16


def test_prompt_ends_one_token_behind_a_boundary(start):
    """Its prefill ends at the boundary, which is the prompt's then, not decoding's."""
    talk = start()
    request = talk.begin(talk.tokens(2 * BLOCK + 1), talk.answer(20))
    talk.engine.run()
    assert talk.finished_event(request).no_checkpoint_reason == "below_block"
    assert talk.events.of_type(CheckpointPinned) == []


def test_answer_below_a_block(start):
    """Nothing is retained, and it is said why."""
    talk = start()
    prompt, answer = talk.tokens(70), talk.answer(40)
    request = talk.begin(prompt, answer)
    talk.engine.run()
    finished = talk.finished_event(request)
    assert finished.retained_boundary is None
    assert finished.no_checkpoint_reason == "below_block"
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == BLOCK


def test_long_answer_keeps_one_checkpoint(start):
    """Former ones are superseded: a running request pins what it needs last."""
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(600)
    request = talk.begin(prompt, answer)
    most = 0
    while not request.is_finished():
        talk.engine.step()
        most = max(most, talk.scheduler.check_integrity().num_pinned_checkpoints)
    assert most <= 2  # one promoted, one pending
    assert talk.finished_event(request).retained_boundary == 9 * BLOCK
    assert talk.discard_reasons(request) == ["superseded"] * 8
    assert talk.finished_event(request).num_superseded == 8


@pytest.mark.parametrize("publishes", [False, True])
def test_length(start, publishes):
    talk = start(publish_on=["stop", "length"] if publishes else ["stop"])
    prompt, answer = talk.tokens(30), talk.tokens(200)
    assert talk.ask(prompt, answer, max_tokens=200).finish_reason == "length"
    hit = talk.cached_tokens(prompt + answer + talk.tokens(20))
    assert hit == (3 * BLOCK if publishes else 16)


def test_stop_token_is_the_last_allowed_one(start):
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(200)
    assert talk.ask(prompt, answer, max_tokens=200).finish_reason == "stop"
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 3 * BLOCK


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_abort_with_steps_in_flight(start, abort, is_async, num_in_flight):
    talk = start(batch_queue_size=num_in_flight if is_async else 1)
    prompt, answer = talk.tokens(30), talk.tokens(400)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 3 * BLOCK)
    abort(talk, request)
    talk.engine.run()
    assert "aborted" in talk.discard_reasons(request)
    assert talk.cached_tokens((prompt + answer)[: 3 * BLOCK]) == 16


def test_abort_before_admission(start):
    """No step may follow: the event goes out at once."""
    talk = start()
    request = talk.begin(talk.tokens(30), talk.answer(10))
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert talk.finished_event(request).no_checkpoint_reason == "never_admitted"


def test_error(start):
    talk = start(publish_on=["stop", "length", "abort"])
    prompt, answer = talk.tokens(30), talk.tokens(400)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 3 * BLOCK + 10)
    talk.engine.finish(request.request_id, RequestStatus.FINISHED_ERROR)
    talk.engine.run()
    assert talk.discard_reasons(request)[-1] == "error"
    assert talk.finished_event(request).no_checkpoint_reason == "error"
    assert talk.cached_tokens((prompt + answer)[: 3 * BLOCK + 10]) == 16


def test_reset_while_a_request_runs(start):
    """A plain reset is refused, as stock refuses it; a forced one drops the pins, and
    the request, run again, retains again."""
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(300)
    request = talk.begin(prompt, answer)
    talk.decode_until(request, 3 * BLOCK + 5)
    assert not talk.scheduler.reset_prefix_cache()
    assert talk.scheduler.check_integrity().num_pinned_checkpoints == 1
    assert talk.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert talk.scheduler.check_integrity().num_pinned_checkpoints == 0
    assert "cache_reset" in talk.discard_reasons(request)
    talk.engine.run()
    assert talk.finished_event(request).retained_boundary == 5 * BLOCK
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 5 * BLOCK


@pytest.mark.parametrize("publishes", [False, True])
def test_preemption(start, publishes):
    """A preempted request loses its checkpoint, or finds it again."""
    talk = start(
        num_blocks=15,
        num_mamba_groups=1,
        publish_on=["stop", "preempt"] if publishes else ["stop"],
    )
    requests = [talk.begin(talk.tokens(30), talk.answer(400)) for _ in range(2)]
    talk.engine.run()
    preempted = [request for request in requests if request.num_preemptions]
    assert preempted
    for request in preempted:
        assert "preempted" in talk.discard_reasons(request) or publishes
    assert all(talk.finished_event(r).retained_boundary for r in requests)
    for request in requests:
        events = talk.finished_event(request)
        assert events.num_preemptions == request.num_preemptions


def test_a_shared_prefix_is_published_once(start):
    """Two requests that answer alike: the second's blocks serve nobody new, and its
    pin must still end."""
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(200)
    requests = [talk.begin(prompt, answer) for _ in range(2)]
    talk.engine.run()
    assert all(talk.finished_event(r).retained_boundary == 3 * BLOCK for r in requests)
    assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 3 * BLOCK


def test_salted_requests_share_nothing(start):
    talk = start()
    prompt, answer = talk.tokens(30), talk.answer(200)
    talk.ask(prompt, answer, cache_salt="mine")
    follow_up = prompt + answer + talk.tokens(20)
    assert talk.cached_tokens(follow_up) == 0
    assert talk.cached_tokens(follow_up, cache_salt="yours") == 0
    assert talk.cached_tokens(follow_up, cache_salt="mine") == 3 * BLOCK


def test_retention_off_is_stock(start):
    """Off, the overlay observes: same hits as stock, and the reason is told."""
    off, stock = start(retain=False), start(stock=True)
    for talk in (off, stock):
        prompt, answer = talk.tokens(30), talk.answer(200)
        request = talk.begin(prompt, answer)
        talk.engine.run()
        assert talk.cached_tokens(prompt + answer + talk.tokens(20)) == 16
        if talk is off:
            assert talk.finished_event(request).no_checkpoint_reason == "disabled"


@pytest.mark.parametrize("num_drafts", [2, 4])
def test_with_drafts(start, num_drafts):
    """Whatever is accepted, every turn finds the last block boundary."""
    accepted = [0, 1, 2, 3, 4]

    def accept(request_id, position, drafts):
        accepted.append(accepted.pop(0))
        return accepted[0]

    talk = start(num_speculative_tokens=num_drafts, accept=accept)
    history = talk.tokens(30)
    for num_answer in (100, 67, 200, 131):
        prompt = history + talk.tokens(10)
        history = prompt + talk.answer(num_answer)
        talk.ask(prompt, history[len(prompt) :])
        reached = (len(history) - 1) // BLOCK * BLOCK
        assert talk.cached_tokens(history + [STOP_TOKEN] * 3) == reached
