"""Whatever is published: numbers without holes, and every event sent or counted."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_fork.event_queue import EventQueue
from vllm_fork.events import EngineStopped, EventsDropped
from vllm_fork.history import History


@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.integers(1, 10),
    st.integers(1, 120),
)
def test_history_holds_the_longest_tail_it_may(sizes, max_batches, max_bytes):
    history = History(max_batches, max_bytes)
    for seq, size in enumerate(sizes):
        assert history.append(bytes([seq]) * size) == seq
        kept = list(range(history.first_seq, history.next_seq))
        assert history.next_seq == seq + 1
        assert [history[n] for n in kept] == [bytes([n]) * sizes[n] for n in kept]
        assert history.num_bytes == sum(sizes[n] for n in kept)
        assert len(kept) <= max_batches
        assert history.num_bytes <= max_bytes
        if history.first_seq:
            one_more = sizes[history.first_seq - 1] + history.num_bytes
            assert len(kept) == max_batches or one_more > max_bytes


class QueueAgainstAList(RuleBasedStateMachine):
    limit = 7
    drop_oldest = True

    def __init__(self) -> None:
        super().__init__()
        self.queue = EventQueue(self.limit, drop_oldest=self.drop_oldest)
        self.first: list[int] | None = None
        self.model: list[int] = []
        self.next_number = 0
        self.num_taken = 0

    @rule(size=st.integers(0, 20))
    def put(self, size: int) -> None:
        numbers = list(range(self.next_number, self.next_number + size))
        self.next_number += size
        self.queue.put([_numbered(number) for number in numbers])
        if self.first is None and numbers:
            self.first = numbers
            return
        self.model += numbers
        excess = max(0, len(self.model) - self.limit)
        if self.drop_oldest:
            self.model = self.model[excess:]
        else:
            self.model = self.model[: self.limit]

    @rule(size=st.integers(1, 10))
    def take(self, size: int) -> None:
        taken = [event.time_unix_ns for event in self.queue.take(size)]
        self.num_taken += len(taken)
        if self.first:
            assert taken == self.first
            self.first = []
        else:
            assert taken == self.model[:size]
            self.model = self.model[size:]

    @precondition(lambda self: self.next_number)
    @invariant()
    def everything_is_accounted_for(self) -> None:
        queue = self.queue
        assert queue.num_put == self.next_number
        assert queue.num_put == self.num_taken + queue.num_dropped + len(queue)
        assert len(queue) == len(self.model) + len(self.first or ())


class DropNewestAgainstAList(QueueAgainstAList):
    drop_oldest = False


TestDropOldest = QueueAgainstAList.TestCase
TestDropNewest = DropNewestAgainstAList.TestCase
TestDropOldest.settings = TestDropNewest.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)


def _numbered(number: int) -> EngineStopped:
    return EngineStopped(time_unix_ns=number, monotonic_ns=0)


@pytest.mark.timeout(60)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    publishes=st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=30),
    queue_size=st.integers(1, 40),
    overflow=st.sampled_from(["drop_oldest", "drop_newest"]),
)
def test_sent_plus_dropped_is_published(
    make_publisher, context, wire, publishes, queue_size, overflow
):
    """Over real sockets, with events that do not encode (False) among the others and
    a queue that is too small for some of the bursts."""
    publisher = make_publisher(queue_size=queue_size, overflow=overflow)
    publisher.publish([wire.started()])
    number = 0
    for burst in publishes:
        events = []
        for good in burst:
            number += 1
            events.append(
                wire.numbered(number)
                if good
                else wire.Unencodable(
                    time_unix_ns=number, monotonic_ns=0, thing=object()
                )
            )
        publisher.publish(events)

    def told() -> list:
        batches, _ = wire.ReplayReader(context, publisher.replay_endpoint).replay(0)
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        return [e for _, payload in batches for e in wire.decode(payload).events]

    def is_settled() -> bool:
        events = told()
        lost = sum(e.count for e in events if isinstance(e, EventsDropped))
        sent = [e for e in events if not isinstance(e, EventsDropped)]
        return lost + len(sent) == 1 + number

    wire.wait_for(is_settled, "sent + announced as lost = published")
    events = told()
    arrived = [e.time_unix_ns for e in events if isinstance(e, EngineStopped)]
    assert arrived == sorted(set(arrived))
    stats = publisher.stats()
    assert stats.num_queued == 0
    assert stats.num_published == 1 + number
    assert stats.num_sent == 1 + len(arrived)
    assert stats.num_dropped + stats.num_encode_errors == number - len(arrived)
    announced = [e for e in events if isinstance(e, EventsDropped)]
    assert sum(e.num_encode_errors for e in announced) == stats.num_encode_errors
    publisher.shutdown(timeout_s=0)
