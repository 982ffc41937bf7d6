"""Sessions whose input arrives in pieces (``resumable``), beside ordinary requests.

Each piece comes as a request of the session's id, as from vLLM's front end; the last
one is not ``resumable``. Between two pieces vLLM drops the token sampled last, so
nothing that a session computed is published; what others left, it may reuse.
"""

import pytest
from vllm.v1.request import RequestStatus

from vllm_fork.events import CheckpointEvent, RequestFinished
from vllm_fork.model_free import make_request

UNIT = 16


class Session:
    """One session: each of its ``pieces`` is answered with the answer beside it."""

    def __init__(self, talk, pieces, answers):
        self._talk = talk
        self._pieces = pieces
        self._answers = iter(answers)
        self._update = talk.scheduler._update_request_as_session
        talk.scheduler._update_request_as_session = self._go_on
        self.request = talk.begin(
            pieces[0], next(self._answers), resumable=True, request_id="session"
        )

    def _go_on(self, request, update):
        self._update(request, update)
        self._talk.engine.worker.expect(request, next(self._answers))

    def send(self, index):
        self._talk.scheduler.add_request(
            make_request("session", self._pieces[index], hash_unit=UNIT, resumable=True)
        )

    def close(self):
        self._talk.scheduler.add_request(
            make_request("session", [1], hash_unit=UNIT, resumable=False)
        )

    def wait(self):
        """Until it waits for its next piece."""
        while self.request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._talk.engine.step()


def play(talk, in_advance):
    """A session of three pieces; returns what was said."""
    pieces = [talk.tokens(n) for n in (30, 50, 7)]
    session = Session(talk, pieces, [talk.answer(n) for n in (100, 90, 20)])
    for index in (1, 2):
        if not in_advance:
            session.wait()
        session.send(index)
    if not in_advance:
        session.wait()
    session.close()
    talk.engine.run()
    assert session.request.is_finished()
    return list(session.request.all_token_ids)


@pytest.mark.parametrize("copy_interval", [0, UNIT])
@pytest.mark.parametrize("in_advance", [False, True])
def test_nothing_of_a_session_is_retained(start, is_async, copy_interval, in_advance):
    """Others find what stock vLLM keeps of its pieces, no more and no less."""
    stock = start(stock=True)
    talk = start(
        exact_tail=True,
        copy_interval=copy_interval,
        publish_on=["stop", "length", "abort", "preempt"],
    )
    cached = []
    for each in (stock, talk):
        each.expects_wrong_states = is_async  # vLLM's own: see test_stock_faults.py
        said = play(each, in_advance)
        cached.append(each.cached_tokens(said + each.tokens(20)))
    assert cached[0] == cached[1]
    of_session = [
        event
        for event in talk.events.of_type(CheckpointEvent)
        if event.request_id == "session"
    ]
    assert of_session == []
    (finished,) = [
        event
        for event in talk.events.of_type(RequestFinished)
        if event.request_id == "session"
    ]
    assert finished.no_checkpoint_reason == "resumable"


def test_a_preempted_session(start, is_async):
    """It loses its blocks and is computed again: nothing of it was published."""
    talk = start(exact_tail=True, publish_on=["stop", "preempt"])
    talk.expects_wrong_states = is_async
    session = Session(talk, [talk.tokens(30)] * 2, [talk.answer(100)] * 2)
    talk.decode_until(session.request, 100)
    talk.scheduler.reset_prefix_cache(reset_running_requests=True)
    session.wait()
    session.send(1)
    session.wait()
    session.close()
    talk.engine.run()
    assert session.request.num_preemptions == 1
    assert talk.events.of_type(CheckpointEvent) == []


def test_a_session_goes_on_from_a_conversation(start, is_async):
    """Its first piece finds the exact tail that an ordinary request left."""
    talk = start(exact_tail=True)
    history = talk.tokens(30) + talk.answer(25)
    talk.ask(history[:30], history[30:])
    session = Session(talk, [history + talk.tokens(9)], [talk.answer(20)])
    session.wait()
    session.close()
    talk.engine.run()
    cached = talk.engine.finished["session"].cached_tokens
    assert cached == len(history) - (not is_async)
