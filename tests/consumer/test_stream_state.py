"""The state machine against a model of a publisher and of the wires between.

The model drops, repeats and delays; it restarts with and without a new count; its
buffer forgets; its replays break off. Whatever it does, each batch of an epoch is
applied once and in order, or said to be lost, and never both. Once in a run somebody
else sends a batch or a heartbeat in the engine's name, with a number that the engine
has not reached: it moves nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from event_consumer.records import (
    DISCONNECTED,
    GAP_OPEN,
    GAP_RECOVERED,
    GAPPED,
    LIVE,
    LOST,
    REPLAYING,
)
from event_consumer.stream_state import (
    UNREADABLE,
    Action,
    Apply,
    AskReplay,
    EngineBack,
    EngineGone,
    Gap,
    Refuted,
    Rewound,
    StreamState,
    StreamTimes,
)

TIMES = StreamTimes(
    replay_timeout_s=1,
    max_failures=3,
    first_retry_s=0.5,
    max_retry_s=2,
    max_waiting=30,
    lost_after_s=5,
)


class Reader:
    """Checks every action of a state machine, and remembers what was applied."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.applied: dict[str, list[int]] = {}
        self.lost: dict[str, set[int]] = {}
        self.gaps: dict[tuple[str, int], Gap] = {}
        self.gone: list[str] = []
        self.refuted: list[int] = []
        self.false: list[int] = []
        """Applied, and found not to be the engine's afterwards."""
        self.asks: list[AskReplay] = []

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Apply(epoch, seq, item, _):
                    assert item == (epoch, seq)
                    before = self.applied.setdefault(epoch, [])
                    lost = self.lost.setdefault(epoch, set())
                    assert seq == max([-1, *before[-1:], *lost]) + 1 or not (
                        before or lost
                    )
                    before.append(seq)
                case Gap(epoch, first, end, status):
                    assert first < end or (first == end and status == GAP_RECOVERED)
                    self.gaps[epoch, first] = action
                    if status == LOST:
                        self._lose(epoch, range(first, end))
                case Refuted(_, seq):
                    self.refuted.append(seq)
                case Rewound(epoch, last):
                    before = self.applied.get(epoch, [])
                    self.false += [seq for seq in before if seq > last]
                    self.applied[epoch] = [seq for seq in before if seq <= last]
                    lost = self.lost.get(epoch, set())
                    self.lost[epoch] = {seq for seq in lost if seq <= last}
                case EngineGone(epoch):
                    self.gone.append(epoch)
                case EngineBack(epoch):
                    assert epoch == self.state.epoch
                case AskReplay():
                    self.asks.append(action)

    def _lose(self, epoch: str, seqs: range) -> None:
        lost = self.lost.setdefault(epoch, set())
        assert not lost & set(seqs)
        assert not set(self.applied.get(epoch, ())) & set(seqs)
        lost.update(seqs)

    def open_gaps(self) -> list[Gap]:
        return [gap for gap in self.gaps.values() if gap.status == GAP_OPEN]


class Publisher:
    """One epoch after another, with a buffer that may forget its beginning."""

    def __init__(self) -> None:
        self.number = 0
        self.first_seq = 0
        self.next_seq = 0
        self.begins_at = 0
        self.unreadable: set[int] = set()

    @property
    def epoch(self) -> str:
        return f"epoch-{self.number}"

    def restart(self, *, count_on: bool) -> None:
        self.number += 1
        self.begins_at = self.next_seq if count_on else 0
        self.first_seq = self.next_seq = self.begins_at
        self.unreadable = set()

    def frame(self, seq: int) -> tuple[str, int]:
        return self.epoch, seq


class StreamMachine(RuleBasedStateMachine):
    """Rules are what a publisher and a network do; the reader checks the rest."""

    @initialize(
        count=st.integers(0, 12), trimmed=st.integers(0, 6), known=st.integers(-1, 4)
    )
    def begin(self, count: int, trimmed: int, known: int) -> None:
        """A late consumer, or one that goes on at a position it has stored."""
        self.now = 0.0
        self.publisher = Publisher()
        self.publisher.next_seq = max(count, known + 1)
        self.publisher.first_seq = min(trimmed, self.publisher.next_seq)
        restored = known >= 0
        self.reader = Reader(
            StreamState(
                epoch=self.publisher.epoch if restored else None,
                applied_seq=known,
                times=TIMES,
            )
        )
        if restored:
            self.reader.applied[self.publisher.epoch] = list(range(known + 1))
        self.live: list[tuple[str, int, bool]] = []
        self.replay: list[tuple[str, object]] = []
        self.serving: AskReplay | None = None
        # Losses are legitimate where the model made the batch unreachable.
        self.unreachable: dict[str, set[int]] = {
            self.publisher.epoch: set(range(self.publisher.first_seq))
        }
        self.patience_tried = False
        self.has_forged = False
        self.begins = {self.publisher.epoch: 0}

    # -- the publisher -------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def publish(self, count: int) -> None:
        for _ in range(count):
            seq = self.publisher.next_seq
            self.publisher.next_seq += 1
            if self.state.connected:
                self.live.append((self.publisher.epoch, seq, False))

    @rule()
    def publish_unreadable(self) -> None:
        """A batch that does not decode, live or replayed."""
        seq = self.publisher.next_seq
        self.publisher.next_seq += 1
        self.publisher.unreadable.add(seq)
        self.unreachable[self.publisher.epoch].add(seq)

    @rule()
    @precondition(lambda self: self.publisher.next_seq > self.publisher.begins_at)
    def beat(self) -> None:
        if self.state.connected:
            self.live.append((self.publisher.epoch, self.publisher.next_seq - 1, True))

    @rule(count=st.integers(1, 6))
    def forget(self, count: int) -> None:
        """The replay buffer is full: its oldest batches go."""
        publisher = self.publisher
        end = min(publisher.first_seq + count, publisher.next_seq)
        self.unreachable[publisher.epoch].update(range(publisher.first_seq, end))
        publisher.first_seq = end

    @rule(count_on=st.booleans(), stragglers=st.booleans())
    def restart(self, count_on: bool, stragglers: bool) -> None:
        former = self.publisher.epoch
        self.unreachable[former].update(range(self.publisher.next_seq))
        if not stragglers:
            self.live.clear()
        # Nothing could tell which is the later of two epochs, both never heard.
        self.live = [each for each in self.live if each[0] in self.heard()]
        self.replay.clear()
        self.serving = None
        self.publisher.restart(count_on=count_on)
        self.begins[self.publisher.epoch] = self.publisher.begins_at
        # Where the batch that says so is lost, those before it seem to be as well.
        self.unreachable[self.publisher.epoch] = set(range(self.publisher.begins_at))
        self.disconnect()

    # -- the wires -----------------------------------------------------------

    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            epoch, seq, is_beat = self.live.pop(0)
            if is_beat:
                self.take(self.state.on_heartbeat(epoch, seq, self.now))
            else:
                begins = self.begins.get(epoch) == seq
                self.take(
                    self.state.on_live(
                        epoch, seq, (epoch, seq), self.now, begins=begins
                    )
                )

    @rule(count=st.integers(1, 4))
    def lose_live(self, count: int) -> None:
        """The subscriber was slow."""
        del self.live[:count]

    @rule(back=st.integers(1, 5))
    @precondition(lambda self: self.state.connected)
    def repeat(self, back: int) -> None:
        """A batch comes twice, and before the stragglers of the former epoch.

        Not before those of one that was never heard: nothing could tell which of the
        two is the later.
        """
        seq = self.publisher.next_seq - back
        others = {epoch for epoch, _, _ in self.live} - {self.publisher.epoch}
        if others - self.heard():
            return
        if seq >= self.publisher.first_seq and seq not in self.publisher.unreadable:
            self.live.insert(0, (self.publisher.epoch, seq, False))

    @rule(
        ahead=st.sampled_from([1_000, 100_000]),
        is_beat=st.booleans(),
    )
    @precondition(lambda self: self.state.connected and not self.has_forged)
    def forge(self, ahead: int, is_beat: bool) -> None:
        """Somebody else speaks in the engine's name."""
        self.has_forged = True
        seq = self.publisher.next_seq + ahead
        if is_beat:
            self.take(self.state.on_heartbeat(self.publisher.epoch, seq, self.now))
        else:
            item = "forged"
            self.take(self.state.on_live(self.publisher.epoch, seq, item, self.now))

    @rule()
    def serve(self) -> None:
        """The publisher answers the last replay that was asked for."""
        if not self.reader.asks or not self.state.connected:
            return
        ask = self.serving = self.reader.asks.pop()
        self.reader.asks.clear()
        publisher = self.publisher
        start = max(min(ask.first_seq, publisher.next_seq), publisher.first_seq)
        self.replay = [("batch", seq) for seq in range(start, publisher.next_seq)]
        self.replay.append(("end", None))

    @rule(count=st.integers(1, 10))
    def deliver_replay(self, count: int) -> None:
        publisher, ask = self.publisher, self.serving
        for _ in range(count):
            if not self.replay or ask is None:
                return
            kind, seq = self.replay.pop(0)
            if kind == "end":
                actions = self.state.on_replay_end(
                    ask.attempt,
                    self.now,
                    epoch=publisher.epoch,
                    first_buffered_seq=publisher.first_seq,
                    next_seq=publisher.next_seq,
                )
            elif seq < publisher.first_seq:  # it left the buffer meanwhile
                continue
            elif seq in publisher.unreadable:
                actions = self.state.on_replayed(
                    ask.attempt, None, seq, UNREADABLE, self.now
                )
            else:
                actions = self.state.on_replayed(
                    ask.attempt,
                    publisher.epoch,
                    seq,
                    publisher.frame(seq),
                    self.now,
                    begins=seq == publisher.begins_at,
                )
            self.take(actions)

    @rule()
    def break_replay(self) -> None:
        """The rest of a replay never comes."""
        self.replay.clear()

    @rule()
    def connect(self) -> None:
        if not self.state.connected:
            self.take(self.state.on_connected(self.now))

    @rule()
    def disconnect(self) -> None:
        if self.state.connected:
            self.replay.clear()
            self.take(self.state.on_disconnected(self.now))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.1, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.patience_tried |= seconds > 1 or bool(self.state.attempt)
        self.take(self.state.on_tick(self.now))

    # -- what must hold ------------------------------------------------------

    @property
    def state(self) -> StreamState:
        return self.reader.state

    def take(self, actions: list[Action]) -> None:
        self.reader.take(actions)

    def heard(self) -> set[str | None]:
        """The epochs that the reader knows of."""
        return {self.state.epoch, *self.reader.applied, *self.reader.lost}

    @invariant()
    def waits_within_bounds(self) -> None:
        assert self.state.num_waiting <= TIMES.max_waiting

    @invariant()
    def shows_what_is_missing(self) -> None:
        shown = [] if self.state.gap is None else [self.state.gap]
        assert self.reader.open_gaps() == shown
        if not self.state.connected:
            assert self.state.state == DISCONNECTED
        elif shown:
            assert self.state.state == GAPPED
        else:
            assert self.state.state in (LIVE, REPLAYING)

    @invariant()
    def loses_only_what_was_out_of_reach(self) -> None:
        if self.patience_tried:
            return
        for epoch, lost in self.reader.lost.items():
            assert lost <= self.unreachable[epoch] | self.overtaken(epoch), epoch

    def overtaken(self, epoch: str) -> set[int]:
        """Given up because too much waited behind it."""
        return set(range(self.publisher.next_seq)) if self.busy(epoch) else set()

    def busy(self, epoch: str) -> bool:
        """Whether so many came that more than allowed may have waited at once."""
        num_came = len(self.reader.applied.get(epoch, ()))
        if epoch == self.state.epoch:
            num_came += self.state.num_waiting
        return num_came > TIMES.max_waiting

    def teardown(self) -> None:
        """Left alone with a working publisher, the stream comes whole again."""
        if not hasattr(self, "reader"):
            return
        if self.publisher.next_seq == self.publisher.begins_at:
            self.publish(1)
        if self.publisher.next_seq - 1 in self.publisher.unreadable:
            self.publish(1)
        self.connect()
        for _ in range(20):
            self.beat()
            self.deliver(10_000)
            self.serve()
            self.deliver_replay(10_000)
            self.now += 0.9
            self.take(self.state.on_tick(self.now))
        epoch = self.publisher.epoch
        assert self.state.state == LIVE
        assert self.state.epoch == epoch
        assert self.state.applied_seq == self.publisher.next_seq - 1
        assert not self.reader.open_gaps()
        for each, applied in self.reader.applied.items():
            # Everything up to the last batch is either applied or lost.
            lost = self.reader.lost.get(each, set())
            begins = min([*applied, *lost])
            assert set(applied) | lost == set(range(begins, max([*applied, *lost]) + 1))
        assert sum(map(len, self.reader.lost.values())) == self.state.num_lost


TestStream = StreamMachine.TestCase
TestStream.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.nightly
class TestStreamLong(StreamMachine.TestCase):
    settings = settings(max_examples=5_000, stateful_step_count=80, deadline=None)


# -- one by one --------------------------------------------------------------


def reader(**given: object) -> Reader:
    made = Reader(StreamState(times=TIMES, **given))  # type: ignore[arg-type]
    made.take(made.state.on_connected(0.0))
    return made


def live(made: Reader, epoch: str, *seqs: int, now: float = 0.0) -> None:
    for seq in seqs:
        made.take(made.state.on_live(epoch, seq, (epoch, seq), now))


def end(made: Reader, now: float = 0.0, **summary: object) -> None:
    attempt = made.state.attempt
    assert attempt is not None
    made.take(made.state.on_replay_end(attempt, now, **summary))  # type: ignore[arg-type]


def statuses(made: Reader) -> dict[tuple[int, int], str]:
    return {(gap.first_seq, gap.end_seq): gap.status for gap in made.gaps.values()}


def test_a_first_sequence_above_zero_is_a_cold_start_gap() -> None:
    made = reader()
    live(made, "e", 7, 8)
    assert made.applied == {}, "the replay may still bring what came before"
    end(made, epoch="e", first_buffered_seq=7, next_seq=9)
    assert made.applied == {"e": [7, 8]}
    assert statuses(made) == {(0, 7): LOST}
    assert made.state.num_lost == 7
    assert made.state.state == LIVE


def test_live_batches_wait_while_a_replay_runs() -> None:
    made = reader()
    attempt = made.state.attempt
    live(made, "e", 2)
    for seq in (0, 1, 2):
        made.take(made.state.on_replayed(attempt, "e", seq, ("e", seq), 0.0))
    end(made, epoch="e", first_buffered_seq=0, next_seq=3)
    assert made.applied == {"e": [0, 1, 2]}
    assert made.state.num_duplicates == 1
    assert made.state.num_replayed == 2


def test_a_new_epoch_is_a_restart_even_if_the_sequence_goes_on() -> None:
    made = reader(epoch="a", applied_seq=4)
    end(made, epoch="a", first_buffered_seq=0, next_seq=5)
    made.take(made.state.on_live("b", 5, ("b", 5), 1.0, begins=True))
    assert made.applied == {"b": [5]}
    assert made.gone == ["a"]
    assert made.state.num_restarts == 1
    assert made.state.num_lost == 0


def test_a_backward_sequence_is_a_restart_without_an_epoch_too() -> None:
    made = reader(epoch="", applied_seq=-1)
    end(made)
    live(made, "", 0, 1, 2)
    actions = made.state.on_live("", 0, ("", 0), 1.0)
    assert actions[:2] == [EngineGone(""), Apply("", 0, ("", 0), False)]
    assert made.state.num_restarts == 1
    assert made.state.applied_seq == 0


def test_a_replay_that_stays_silent_is_retried_with_back_off_then_lost() -> None:
    made = reader(epoch="e", applied_seq=0)
    end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    live(made, "e", 3, now=10.0)
    made.take(made.state.on_heartbeat("e", 3, 10.0))
    assert made.state.state == GAPPED
    asked = []
    now = 10.0
    while made.open_gaps():
        now += 0.1
        before = len(made.asks)
        made.take(made.state.on_tick(now))
        asked += [now] * (len(made.asks) - before)
        assert now < 60
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert len(asked) == TIMES.max_failures - 1
    assert pauses == sorted(pauses)
    assert pauses[0] > TIMES.replay_timeout_s
    assert statuses(made) == {(1, 3): LOST}
    assert made.applied == {"e": [3]}
    assert made.state.state == LIVE


def test_a_heartbeat_shows_a_loss_at_the_end_of_a_quiet_stream() -> None:
    made = reader(epoch="e", applied_seq=0)
    end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    made.take(made.state.on_heartbeat("e", 2, 5.0))
    assert [(g.first_seq, g.end_seq) for g in made.open_gaps()] == [(1, 3)]
    assert made.asks[-1].first_seq == 1
    attempt = made.state.attempt
    for seq in (1, 2):
        made.take(made.state.on_replayed(attempt, "e", seq, ("e", seq), 5.0))
    assert statuses(made) == {(1, 3): GAP_RECOVERED}


def test_without_a_replay_endpoint_a_gap_is_lost_with_the_next_message() -> None:
    made = reader(can_replay=False)
    live(made, "e", 0, 3)
    assert statuses(made) == {(1, 3): GAP_OPEN}
    live(made, "e", 4)
    assert statuses(made) == {(1, 3): LOST}
    assert made.applied == {"e": [0, 3, 4]}
    made.take(made.state.on_heartbeat("e", 6, 1.0))
    assert statuses(made)[5, 7] == GAP_OPEN
    made.take(made.state.on_heartbeat("e", 6, 2.0))
    assert statuses(made)[5, 7] == LOST


def test_too_much_waiting_gives_the_gap_up() -> None:
    made = reader(epoch="e", applied_seq=0)
    live(made, "e", *range(2, 2 + TIMES.max_waiting))
    assert made.applied == {}
    live(made, "e", 2 + TIMES.max_waiting)
    assert statuses(made) == {(1, 2): LOST}
    assert len(made.applied["e"]) == TIMES.max_waiting + 1


def test_a_batch_that_does_not_decode_costs_itself() -> None:
    made = reader(epoch="e", applied_seq=0)
    end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    live(made, "e", 2)
    attempt = made.state.attempt
    made.take(made.state.on_replayed(attempt, None, 1, UNREADABLE, 0.0))
    end(made, epoch="e", first_buffered_seq=0, next_seq=3)
    assert statuses(made) == {(1, 2): LOST}
    assert made.applied == {"e": [2]}


def test_an_engine_that_stays_away_is_gone_and_may_come_back() -> None:
    made = reader(epoch="e", applied_seq=0)
    end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    live(made, "e", 2, now=1.0)
    made.take(made.state.on_disconnected(1.0))
    made.take(made.state.on_tick(5.9))
    assert made.gone == []
    made.take(made.state.on_tick(6.1))
    assert made.gone == ["e"]
    assert statuses(made) == {(1, 2): LOST}, "its buffer went with it"
    made.take(made.state.on_tick(20.0))
    assert made.gone == ["e"], "once"
    made.take(made.state.on_connected(30.0))
    assert made.state.on_heartbeat("e", 2, 30.0) == [EngineBack("e")]
    live(made, "e", 3, now=30.0)
    assert made.applied == {"e": [2, 3]}


def test_an_engine_that_was_lost_before_the_restart_comes_back() -> None:
    made = reader(epoch="e", applied_seq=0, gone=True)
    attempt = made.state.attempt
    assert attempt is not None
    actions = made.state.on_replay_end(
        attempt, 0.0, epoch="e", first_buffered_seq=0, next_seq=1
    )
    assert actions == [EngineBack("e")]


def test_an_engine_that_went_while_nobody_looked_is_noticed() -> None:
    """The position is restored, and nothing ever connects."""
    made = Reader(StreamState(epoch="e", applied_seq=9, times=TIMES))
    made.take(made.state.on_tick(0.0))
    made.take(made.state.on_tick(5.1))
    assert made.gone == ["e"]


def test_stragglers_of_a_former_epoch_are_counted_as_lost() -> None:
    made = reader(epoch="a", applied_seq=0)
    live(made, "b", 0)
    live(made, "a", 1)
    assert made.applied == {"b": [0]}
    assert made.gaps["a", 1].status == LOST
    assert made.state.epoch == "b"


def test_a_former_epoch_that_keeps_beating_is_the_present_one() -> None:
    made = reader(epoch="a", applied_seq=0)
    live(made, "b", 0)
    for second in range(5):
        made.take(made.state.on_heartbeat("a", 0, second))
        assert made.state.epoch == "b"
    made.take(made.state.on_heartbeat("a", 0, 5.0))
    assert made.state.epoch == "a"
    live(made, "a", 1)
    assert made.applied == {"b": [0], "a": [1]}


# -- what is not the engine's ------------------------------------------------

FAR = 100_000


@pytest.mark.parametrize("can_replay", [True, False])
@pytest.mark.parametrize("is_beat", [False, True])
def test_one_false_number_silences_nothing(can_replay: bool, is_beat: bool) -> None:
    """The next message of the engine refutes it, with or without a replay."""
    made = reader(epoch="e", applied_seq=0, can_replay=can_replay)
    if can_replay:
        end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    if is_beat:
        made.take(made.state.on_heartbeat("e", FAR, 1.0))
    else:
        live(made, "e", FAR, now=1.0)
    assert statuses(made) == {(1, FAR + is_beat): GAP_OPEN}
    live(made, "e", 1, 2, 3, now=1.1)
    assert made.applied == {"e": [1, 2, 3]}
    assert made.refuted == [FAR]
    assert statuses(made) == {(1, 2): GAP_RECOVERED}
    assert made.state.num_lost == 0


def test_a_heartbeat_refutes_what_came_before_it() -> None:
    """At the end of a quiet stream."""
    made = reader(epoch="e", applied_seq=0, can_replay=False)
    live(made, "e", FAR)
    made.take(made.state.on_heartbeat("e", 0, 1.0))
    assert made.refuted == [FAR]
    assert statuses(made) == {(1, 1): GAP_RECOVERED}, "nothing was missing"
    assert made.state.state == LIVE


def test_a_replay_that_knows_of_less_refutes_any_number_of_them() -> None:
    made = reader(epoch="e", applied_seq=0)
    end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    live(made, "e", FAR, FAR + 1, FAR + 2, now=1.0)
    assert made.asks[-1].first_seq == 1
    end(made, 1.1, epoch="e", first_buffered_seq=0, next_seq=1)
    # What came after the question could be newer than the answer: it is asked again.
    assert made.refuted == [FAR]
    end(made, 1.5, epoch="e", first_buffered_seq=0, next_seq=1)
    assert made.refuted == [FAR, FAR + 2]
    live(made, "e", 1, now=1.6)
    assert made.applied == {"e": [1]}
    assert made.state.num_lost == 0
    assert made.state.state == LIVE


def misled(*, can_replay: bool) -> Reader:
    """A reader that two false batches have led away from batch 1."""
    made = reader(epoch="e", applied_seq=0, can_replay=can_replay)
    if can_replay:
        end(made, epoch="e", first_buffered_seq=0, next_seq=1)
    live(made, "e", FAR, FAR + 1, now=1.0)
    now = 1.0
    while made.state.applied_seq == 0:  # nobody answers the replays
        now += 0.5
        made.take(made.state.on_tick(now))
    assert made.applied == {"e": [FAR, FAR + 1]}
    assert made.state.num_lost == FAR - 1
    return made


def test_a_position_that_two_false_batches_made_is_left_again() -> None:
    """By the engine's own batches, as soon as two of them go on below."""
    made = misled(can_replay=False)
    live(made, "e", 1)
    assert made.state.num_duplicates == 1
    live(made, "e", 2, 3)
    assert made.applied == {"e": [1, 2, 3]}
    assert made.false == [FAR, FAR + 1]
    assert (made.state.num_lost, made.state.num_duplicates) == (0, 0)
    assert statuses(made) == {(1, 1): GAP_RECOVERED}
    live(made, "e", 6, 7)
    assert statuses(made)[4, 6] == LOST, "a true gap is still one"


def test_what_was_missed_meanwhile_is_asked_for() -> None:
    made = misled(can_replay=True)
    live(made, "e", 4, 5, now=50.0)
    assert made.asks[-1].first_seq == 1
    attempt = made.state.attempt
    for seq in (1, 2, 3):
        made.take(made.state.on_replayed(attempt, "e", seq, ("e", seq), 50.0))
    assert made.applied == {"e": [1, 2, 3, 4, 5]}
    assert made.state.num_lost == 0


def test_a_publisher_that_has_sent_less_than_was_applied_is_believed() -> None:
    """A false position was stored, and the consumer started again."""
    made = reader(epoch="e", applied_seq=FAR)
    end(made, epoch="e", first_buffered_seq=0, next_seq=5)
    assert made.state.applied_seq == 4
    live(made, "e", 5, now=1.0)
    assert made.applied == {"e": [5]}


def test_old_batches_that_come_again_are_no_reason_to_go_back() -> None:
    made = reader(epoch="e", applied_seq=10_000, can_replay=False)
    live(made, "e", 10_001, 7, 10_002, 8, 9_990, 9_991, 10_003)
    assert made.applied == {"e": [10_001, 10_002, 10_003]}
    assert made.state.num_duplicates == 4
    assert made.false == []


def test_live_batches_that_a_replay_overtook_by_far_are_duplicates() -> None:
    made = reader(epoch="e", applied_seq=0)
    attempt = made.state.attempt
    for seq in range(1, 100):
        made.take(made.state.on_replayed(attempt, "e", seq, ("e", seq), 0.0))
    live(made, "e", *range(1, 100))
    end(made, epoch="e", first_buffered_seq=0, next_seq=100)
    assert made.applied == {"e": list(range(1, 100))}
    assert made.state.num_duplicates == 99


def test_an_engine_that_ends_does_not_confirm_a_far_number() -> None:
    made = reader(epoch="a", applied_seq=0)
    live(made, "a", FAR)
    live(made, "b", 0)
    assert made.applied == {"b": [0]}
    assert made.state.num_lost == 0
    assert made.refuted == [FAR]


def test_one_false_straggler_invents_no_loss() -> None:
    made = reader(epoch="a", applied_seq=0)
    live(made, "b", 0)
    live(made, "a", FAR)
    assert made.state.num_lost == 0
    live(made, "a", 1, 100, 101)
    assert made.state.num_lost == 101, "what two of them say is believed"


def test_a_former_epoch_that_goes_on_is_the_present_one() -> None:
    """One batch in another engine's name does not end the epoch for good."""
    made = reader(epoch="a", applied_seq=0)
    live(made, "b", 0)
    for number in range(1, 7):
        live(made, "a", number, now=float(number))
    assert made.state.epoch == "a"
    assert made.applied == {"b": [0], "a": [6]}
    assert made.state.num_lost == 5


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_endpoints_do_not_mix(seed: int) -> None:
    """Each stream has its own losses; each ends whole."""
    rng = random.Random(seed)
    readers = [reader() for _ in range(2_000)]
    sent = [0] * len(readers)
    for _ in range(20_000):
        which = rng.randrange(len(readers))
        seq = sent[which]
        sent[which] += 1
        if rng.random() < 0.8:
            live(readers[which], f"epoch-{which}", seq)
    for which, made in enumerate(readers):
        if not sent[which]:
            continue
        epoch = f"epoch-{which}"
        while made.state.applied_seq < sent[which] - 1:
            attempt = made.state.attempt
            for seq in range(made.asks[-1].first_seq, sent[which]):
                made.take(made.state.on_replayed(attempt, epoch, seq, (epoch, seq), 1))
            end(made, 1, epoch=epoch, first_buffered_seq=0, next_seq=sent[which])
        assert made.applied == {epoch: list(range(sent[which]))}
        assert made.state.num_lost == 0


def test_late_copies_of_what_was_replayed_rewind_nothing():
    """A false claim far ahead is no position: what comes late below it came before."""
    state = StreamState(epoch="e", applied_seq=0)
    (ask,) = state.on_connected(0.0)
    for seq in (1, 2):
        state.on_replayed(ask.attempt, "e", seq, seq, 0.0)
    state.on_replay_end(ask.attempt, 0.0, first_buffered_seq=0, next_seq=3)
    state.on_live("e", 1_000_000, "forged", 0.0)
    for seq in (1, 2):
        assert state.on_live("e", seq, seq, 0.0) == []
    assert (state.applied_seq, state.num_duplicates) == (2, 2)
