"""The state machine of one endpoint: puts batches in order and recovers what is
missing. Pure: no sockets, no clock; :mod:`event_consumer.subscriber` drives it.

Inputs are what a stream can do: a live batch, a heartbeat, a replayed batch, the
end of a replay, a connection made or broken, the passing of time. Each returns the
actions to take, in order. Every batch of an epoch is applied at most once, in the
order of its sequence; what is not applied is said to be lost, with its range.

A gap is recovered from the publisher's replay buffer. It is *lost* where the buffer
begins after it, where the batch is there but does not decode, where there is no
replay endpoint, where the replay stays silent ``max_failures`` times, where too
many batches wait behind it, and where its engine is no more.

No single message moves the position past what is missing. A live batch or heartbeat
only *claims* that a batch exists: nothing is given up before a second message, or the
replay, confirms it. The publisher's numbers never fall, so a claim is refuted by a
later message with a lower number, and by the end of a replay that was asked for after
it and knows of fewer batches. A position that two false messages made all the same is
left again as soon as the engine's own batches go on in sequence far below it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from event_consumer.records import (
    DISCONNECTED,
    GAP_OPEN,
    GAP_RECOVERED,
    GAPPED,
    LIVE,
    LOST,
    REPLAYING,
)

MAX_PAST_EPOCHS: Final = 8
"""Former epochs whose stragglers are still told from a restart."""

UNREADABLE: Final[Any] = object()
"""Stands for a batch that the replay holds but that does not decode."""


class StreamTimes(NamedTuple):
    """How patient a stream is. Seconds, and counts of batches."""

    replay_timeout_s: float = 3.0
    """Silence of a replay after which it has failed."""
    max_failures: int = 4
    """Replays in a row that may fail before the gap is given up."""
    first_retry_s: float = 0.25
    """Pause before the second replay; doubled for each one after it."""
    max_retry_s: float = 10.0
    max_waiting: int = 10_000
    """Batches that may wait behind a gap."""
    lost_after_s: float = 5.0
    """How long a connection may be broken before its engine counts as lost; and how
    long a former epoch beats alone before it counts as the present one."""


DEFAULT_TIMES: Final = StreamTimes()


class Apply(NamedTuple):
    """Hand ``item`` to the ledger: batch ``seq`` of ``epoch``, next in order."""

    epoch: str
    seq: int
    item: Any
    replayed: bool


class AskReplay(NamedTuple):
    """Ask the publisher for ``[first_seq, …)`` on a new socket; drop the former.

    What it answers comes back with ``attempt``."""

    attempt: int
    first_seq: int


class Gap(NamedTuple):
    """Batches ``[first_seq, end_seq)`` of ``epoch`` are missing, recovered or lost."""

    epoch: str
    first_seq: int
    end_seq: int
    status: str


class Refuted(NamedTuple):
    """Something that claimed to be batch ``seq`` of ``epoch``, or to come after it,
    was not the engine's; it was left out."""

    epoch: str
    seq: int


class Rewound(NamedTuple):
    """Batches of ``epoch`` after ``applied_seq`` were not the engine's: its own, with
    the same numbers, are still to come."""

    epoch: str
    applied_seq: int


class EngineGone(NamedTuple):
    """``epoch`` is over: another speaks in its place, or none does any more."""

    epoch: str


class EngineBack(NamedTuple):
    """``epoch``, which was gone, speaks again."""

    epoch: str


Action = Apply | AskReplay | Gap | Refuted | Rewound | EngineGone | EngineBack


class _Waiting(NamedTuple):
    """A batch that waits for those before it; ``attempt`` was the last replay that
    had been asked for when it came."""

    item: Any
    replayed: bool
    attempt: int


class StreamState:
    """Where the consumer stands in one endpoint's stream."""

    def __init__(
        self,
        *,
        epoch: str | None = None,
        applied_seq: int = -1,
        open_gap: tuple[int, int] | None = None,
        can_replay: bool = True,
        gone: bool = False,
        times: StreamTimes = DEFAULT_TIMES,
    ) -> None:
        """Begin with nothing, or at the position that a store holds.

        Args:
            epoch: the engine id of the position; None where there is none.
            applied_seq: its last applied batch.
            open_gap: the gap that was open, ``[first, end)``.
            can_replay: whether there is a replay endpoint.
            gone: whether ``epoch`` is known to be gone.
        """
        self.epoch = epoch
        self.applied_seq = applied_seq
        self.connected = False
        self.num_duplicates = 0
        self.num_replayed = 0
        self.num_lost = 0
        self.num_restarts = 0
        self._times = times
        self._can_replay = can_replay
        # The highest batch said to exist; more than applied: something is missing.
        self._head = applied_seq
        self._waiting: dict[int, _Waiting] = {}
        # What the last live message named, and the last replay asked for before it.
        # Live numbers never fall. One that does without a new epoch (vLLM's own
        # stream has none) is a restart; one that a replay overtook is a duplicate.
        self._heard = applied_seq
        self._heard_attempt = 0
        # Batches up to this one exist: two messages say so, or the replay.
        self._confirmed = applied_seq
        self._gap: Gap | None = None
        if open_gap is not None and epoch is not None:
            self._gap = Gap(epoch, *open_gap, GAP_OPEN)
            self._head = self._heard = max(self._head, open_gap[1] - 1)
        self._last_lost: Gap | None = None
        # A live batch far below those before it.
        self._fallen: tuple[int, Any] | None = None
        self._past: dict[str, int] = {}
        self._stray_since: float | None = None
        self._far_stray: tuple[str, int] | None = None
        self._attempt = 0
        self._asked_from: int | None = None
        self._reply_first: int | None = None
        self._unreadable: list[int] = []
        self._deadline = 0.0
        self._failures = 0
        self._retry_at: float | None = None
        # Until the first replay has ended nothing is known to be missing.
        self._catching_up = can_replay
        # An engine that went while nobody was looking must be noticed too.
        self._silent_since: float | None = None
        self._gone = gone or epoch is None
        self._actions: list[Action] = []

    @property
    def state(self) -> str:
        """As the store shows it."""
        if not self.connected:
            return DISCONNECTED
        if self._gap is not None:
            return GAPPED
        return REPLAYING if self._asked_from is not None else LIVE

    @property
    def gap(self) -> Gap | None:
        """The gap that is open now."""
        return self._gap

    @property
    def num_waiting(self) -> int:
        """Batches that wait behind what is missing."""
        return len(self._waiting)

    @property
    def attempt(self) -> int | None:
        """The replay under way."""
        return self._attempt if self._asked_from is not None else None

    # -- inputs --------------------------------------------------------------

    def on_connected(self, now: float) -> list[Action]:
        """The subscription stands: ask for what came before it."""
        self.connected = True
        self._silent_since = None
        self._failures = 0
        if self._asked_from is None:
            self._catching_up = self._can_replay
            self._ask(now)
        return self._done(now)

    def on_disconnected(self, now: float) -> list[Action]:
        """The connection broke; a new one may follow."""
        self.connected = False
        self._silent_since = now
        self._asked_from = self._retry_at = None
        return self._take()

    def on_live(
        self, epoch: str, seq: int, item: Any, now: float, *, begins: bool = False
    ) -> list[Action]:
        """A batch came on the subscription. ``begins``: the epoch begins with it,
        whatever its number."""
        if epoch == self.epoch and seq == self._head + 1 and self._is_quiet():
            # By far the most: the next batch of a stream that is whole.
            self.applied_seq = self._head = self._heard = seq
            self._fallen = self._stray_since = None
            return [Apply(epoch, seq, item, False)]
        self._speaks_again(epoch, now)
        if not self._enter(epoch, seq, is_live=True):
            return self._take()
        if begins:
            self._begin_at(seq)
        if not self._goes_on_below(seq, item):
            self._hear(seq, is_news=seq > self.applied_seq)
            self._receive(seq, item, replayed=False)
        return self._done(now)

    def on_heartbeat(self, epoch: str, seq: int, now: float) -> list[Action]:
        """The last batch that the publisher sent was ``seq``."""
        self._speaks_again(epoch, now)
        if epoch in self._past:
            return self._take()
        self._enter(epoch, seq, is_live=False)
        self._hear(seq, is_news=True)
        self._head = max(self._head, seq)
        return self._done(now)

    def on_replayed(
        self,
        attempt: int,
        epoch: str | None,
        seq: int,
        item: Any,
        now: float,
        *,
        begins: bool = False,
    ) -> list[Action]:
        """A batch came on the replay; ``epoch`` is None and ``item`` is
        :data:`UNREADABLE` where it does not decode."""
        if attempt != self.attempt:
            return self._take()
        self._deadline = now + self._times.replay_timeout_s
        if epoch is not None and not self._enter(epoch, seq, is_live=False):
            return self._take()
        if self._reply_first is None:
            self._reply_first = seq
        if begins:
            self._begin_at(seq)
        if epoch is None:
            self._unreadable.append(seq)  # of which epoch, the next one tells
            return self._take()
        self._receive_unreadable()
        self._confirmed = max(self._confirmed, seq)
        self._receive(seq, item, replayed=True)
        return self._done(now)

    def on_replay_end(
        self,
        attempt: int,
        now: float,
        *,
        epoch: str | None = None,
        first_buffered_seq: int | None = None,
        next_seq: int | None = None,
    ) -> list[Action]:
        """The replay has ended. The publisher holds
        ``[first_buffered_seq, next_seq)``; vLLM's own does not say so (None)."""
        if attempt != self.attempt:
            return self._take()
        asked_from, self._asked_from = self._asked_from, None
        if epoch:
            is_new = epoch != self.epoch
            if not self._enter(epoch, 0, is_live=False):
                return self._take()
            # Asked for a position of the former epoch: the answer says nothing.
            if is_new and asked_from != 0:
                return self._done(now)
        self._receive_unreadable()
        was_misled = False
        if next_seq is not None:
            was_misled = self._believe(next_seq, asked_from or 0)
        begins = first_buffered_seq
        if begins is None:
            begins = self._reply_first
            if begins is None and self._is_confirmed():
                begins = self._next_known()
        while begins is not None and not self._is_whole():
            # What left the buffer while it was being sent may have come before.
            if begins <= self.applied_seq + 1:
                break
            self._lose(min(begins, self._next_known()))
        self._catching_up = False
        if was_misled or self._is_whole() or self.applied_seq >= (asked_from or 0):
            self._failures = 0
        else:
            self._replay_failed(now)
        return self._done(now)

    def on_removed(self) -> list[Action]:
        """Nobody watches this stream any more: what is missing stays so."""
        self.connected = False
        if self.epoch is not None:
            self._end_epoch()
        return self._take()

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self._asked_from is not None and now >= self._deadline:
            self._asked_from = None
            self._catching_up = False
            self._replay_failed(now)
        if (
            not self.connected
            and not self._gone
            and self._silent_since is not None
            and now - self._silent_since >= self._times.lost_after_s
        ):
            self._end_epoch()
        elif self._silent_since is None and not self.connected:
            self._silent_since = now
        return self._done(now)

    # -- epochs --------------------------------------------------------------

    def _enter(self, epoch: str, seq: int, *, is_live: bool) -> bool:
        """Whether a batch of ``epoch`` belongs here; begins the epoch if it is new."""
        if epoch == self.epoch:
            self._stray_since = None
            if is_live and not epoch and seq <= self._heard:
                self._restart(epoch)
            elif self._gone:
                self._gone = False
                self._actions.append(EngineBack(epoch))
            return True
        if epoch in self._past:
            self._straggler(epoch, seq)
            return False
        if self.epoch is None:
            self.epoch = epoch
            self._gone = False
        else:
            self._restart(epoch)
        return True

    def _speaks_again(self, epoch: str, now: float) -> None:
        """A former epoch speaks: as a straggler; or, if the present one has long been
        silent, as what speaks here now, and the other one was."""
        if epoch not in self._past:
            return
        if self._stray_since is None:
            self._stray_since = now
        if now - self._stray_since < self._times.lost_after_s:
            return
        applied_seq = self._past.pop(epoch)
        self._restart(epoch)
        self.applied_seq = self._head = self._heard = self._confirmed = applied_seq

    def _straggler(self, epoch: str, seq: int) -> None:
        """A batch of an epoch that is over: too late to be put in its place."""
        applied = self._past[epoch]
        if seq <= applied:
            self.num_duplicates += 1
            return
        former, self._far_stray = self._far_stray, None
        if seq - applied > self._times.max_waiting and not (
            former is not None and former[0] == epoch and former[1] < seq
        ):
            self._far_stray = (epoch, seq)  # a claim; the next one may confirm it
            self._actions.append(Refuted(epoch, seq))
            return
        self._past[epoch] = seq
        self.num_lost += seq - applied
        self._actions.append(Gap(epoch, applied + 1, seq + 1, LOST))

    def _restart(self, epoch: str) -> None:
        assert self.epoch is not None
        self._end_epoch()
        if self.epoch != epoch:
            self._past[self.epoch] = self.applied_seq
            if len(self._past) > MAX_PAST_EPOCHS:
                del self._past[next(iter(self._past))]
        self.num_restarts += 1
        self.epoch = epoch
        self.applied_seq = self._head = self._heard = self._confirmed = -1
        self._last_lost = self._fallen = None
        self._asked_from = self._retry_at = None
        self._failures = 0
        self._catching_up = self._can_replay
        self._gone = False

    def _end_epoch(self) -> None:
        """Apply what waits, give up what is missing, say that the engine is gone."""
        # Nothing will confirm the last claim any more: it is believed where it is near.
        if self._heard - self.applied_seq > self._times.max_waiting:
            self._refute_heard()
        while not self._is_whole():
            self._lose(self._next_known())
        self._close_what_came()
        if not self._gone:
            self._gone = True
            assert self.epoch is not None
            self._actions.append(EngineGone(self.epoch))

    def _begin_at(self, seq: int) -> None:
        """A publisher that counts on across its restart has no batch before."""
        if self.applied_seq == -1 and seq > 0:
            self.applied_seq = seq - 1
            self._head = max(self._head, self.applied_seq)
            if self._gap is not None:
                self._close_gap(self._gap, self._gap.end_seq)

    # -- claims --------------------------------------------------------------

    def _hear(self, seq: int, *, is_news: bool) -> None:
        """A live message says that ``seq`` was sent last. ``is_news``: it is not a
        batch that came before."""
        if seq >= self._heard:
            self._confirmed = max(self._confirmed, self._heard)
        elif not is_news:
            return
        else:
            self._refute_heard()
        self._heard = seq
        self._heard_attempt = self._attempt

    def _refute_heard(self) -> None:
        """What the last live message claimed is not so."""
        heard = self._heard
        if heard <= max(self._confirmed, self.applied_seq):
            return
        assert self.epoch is not None
        self._waiting.pop(heard, None)
        self._heard = self.applied_seq
        self._head = max(self.applied_seq, self._confirmed, *self._waiting)
        self._actions.append(Refuted(self.epoch, heard))

    def _believe(self, next_seq: int, asked_from: int) -> bool:
        """The publisher itself says, at the end of a replay, that it has sent the
        batches before ``next_seq``; whether that refutes anything.

        Only what came before the replay was asked for is refuted: what came after it
        may be newer than the answer.
        """
        assert self.epoch is not None
        is_misled = next_seq < asked_from
        if is_misled:
            self._rewind(next_seq - 1)
        false = [
            seq
            for seq, waiting in self._waiting.items()
            if seq >= next_seq and waiting.attempt < self._attempt
        ]
        for seq in false:
            del self._waiting[seq]
        if self._heard >= next_seq and self._heard_attempt < self._attempt:
            if self._heard > self.applied_seq:
                false.append(self._heard)
            self._heard = next_seq - 1
        if false:
            self._actions.append(Refuted(self.epoch, max(false)))
        self._confirmed = next_seq - 1
        self._head = max(self.applied_seq, self._confirmed, self._heard, *self._waiting)
        return is_misled or bool(false)

    def _goes_on_below(self, seq: int, item: Any) -> bool:
        """Whether the position is false: live batches go on in sequence far below it.
        If so, they are taken."""
        fallen, self._fallen = self._fallen, None
        if min(self.applied_seq, self._heard) - seq <= self._times.max_waiting:
            return False
        if fallen is None or fallen[0] != seq - 1:
            self._fallen = (seq, item)
            return False
        self._rewind(seq - 2)
        self.num_duplicates -= 1  # the one before
        self._heard, self._heard_attempt = seq, self._attempt
        self._confirmed = seq - 1
        self._receive(seq - 1, fallen[1], replayed=False)
        self._receive(seq, item, replayed=False)
        return True

    def _rewind(self, applied_seq: int) -> None:
        """Whatever led past ``applied_seq`` was false: go on from there, or from where
        it led away, if that is known: what was given up then may be had after all."""
        assert self.epoch is not None
        if self._gap is not None:
            self._close_gap(self._gap, self._gap.first_seq)
        lost, self._last_lost = self._last_lost, None
        if lost is not None and applied_seq + 1 < lost.end_seq:
            applied_seq = min(applied_seq, lost.first_seq - 1)
            self.num_lost -= lost.end_seq - lost.first_seq
            self._close_gap(lost, lost.first_seq)
        self._waiting.clear()
        self._asked_from = None
        self.applied_seq = self._head = self._heard = self._confirmed = applied_seq
        self._actions.append(Rewound(self.epoch, applied_seq))

    def _close_gap(self, gap: Gap, end_seq: int) -> None:
        """Batches ``[first_seq, end_seq)`` were missing, and are not any more."""
        self._actions.append(gap._replace(end_seq=end_seq, status=GAP_RECOVERED))
        self._gap = None

    def _is_confirmed(self) -> bool:
        """Whether what is missing next exists for certain."""
        return min(self._next_known(), self._head) <= self._confirmed

    # -- order ---------------------------------------------------------------

    def _receive(self, seq: int, item: Any, *, replayed: bool) -> None:
        if seq <= self.applied_seq or (
            seq in self._waiting and self._waiting[seq].item is not UNREADABLE
        ):
            self.num_duplicates += item is not UNREADABLE
            return
        self._head = max(self._head, seq)
        self._waiting[seq] = _Waiting(item, replayed, self._attempt)
        self._apply_waiting()

    def _receive_unreadable(self) -> None:
        """What did not decode belongs to the epoch of what follows it."""
        for seq in self._unreadable:
            if self.epoch is not None and seq not in self._waiting:
                self._receive(seq, UNREADABLE, replayed=True)
        self._unreadable.clear()

    def _apply_waiting(self) -> None:
        """Apply the batches that are next in order."""
        waiting = self._waiting
        while waiting:
            seq = self.applied_seq + 1
            found = waiting.pop(seq, None)
            if found is None:
                return
            item, replayed, _ = found
            if item is UNREADABLE:
                self._lose(seq + 1)
                continue
            assert self.epoch is not None
            self.applied_seq = seq
            self.num_replayed += replayed
            self._actions.append(Apply(self.epoch, seq, item, replayed))

    def _is_whole(self) -> bool:
        """Whether everything that is known to exist was applied."""
        return self.applied_seq >= self._head and not self._waiting

    def _is_quiet(self) -> bool:
        """Whether nothing is missing, nor being looked for."""
        return self.applied_seq == self._head and not (
            self._waiting or self._catching_up or self._gap or self._gone
        )

    def _next_known(self) -> int:
        """Where what is missing ends."""
        return min(self._waiting, default=self._head + 1)

    def _lose(self, end: int) -> None:
        """``[applied_seq + 1, end)`` will not come; go on after it."""
        first = self.applied_seq + 1
        assert self.epoch is not None
        gap, self._gap = self._gap, None
        if gap is not None and gap.first_seq < first:
            self._close_gap(gap, first)
        self.num_lost += end - first
        self._last_lost = Gap(self.epoch, first, end, LOST)
        self._actions.append(self._last_lost)
        self.applied_seq = end - 1
        self._head = max(self._head, end - 1)
        for seq in [seq for seq in self._waiting if seq < end]:
            del self._waiting[seq]
        self._apply_waiting()

    # -- recovery ------------------------------------------------------------

    def _ask(self, now: float) -> None:
        if not self._can_replay:
            return
        self._attempt += 1
        self._asked_from = self.applied_seq + 1
        self._reply_first = None
        self._unreadable.clear()
        self._retry_at = None
        self._deadline = now + self._times.replay_timeout_s
        self._actions.append(AskReplay(self._attempt, self._asked_from))

    def _done(self, now: float) -> list[Action]:
        """Open or close the gap, ask again where that may help; take the actions."""
        gives_up = not self._can_replay or self._failures >= self._times.max_failures
        while (
            not self._is_whole()
            and self._is_confirmed()
            and (gives_up or len(self._waiting) > self._times.max_waiting)
        ):
            self._asked_from = None
            self._lose(self._next_known())
            self._failures = 0
        self._follow_gap()
        if self._is_whole() and not self._catching_up:
            self._retry_at = None
        elif (
            self.connected
            and self._asked_from is None
            and (self._retry_at is None or now >= self._retry_at)
        ):
            self._ask(now)
        return self._take()

    def _replay_failed(self, now: float) -> None:
        """It brought nothing: wait a while, longer each time."""
        pause = self._times.first_retry_s * 2**self._failures
        self._retry_at = now + min(pause, self._times.max_retry_s)
        self._failures += 1

    def _follow_gap(self) -> None:
        """The open gap is what is missing now, once the first replay has ended."""
        self._close_what_came()
        if self._is_whole() or self._catching_up:
            return
        assert self.epoch is not None
        gap, end = self._gap, self._next_known()
        if gap is None:
            self._gap = Gap(self.epoch, self.applied_seq + 1, end, GAP_OPEN)
            self._actions.append(self._gap)
        elif gap.end_seq != end:
            self._gap = gap._replace(end_seq=end)
            self._actions.append(self._gap)

    def _close_what_came(self) -> None:
        """Close the open gap if nothing of it is missing any more."""
        gap = self._gap
        if gap is not None and (self._is_whole() or self.applied_seq >= gap.end_seq):
            # What was said to be missing may have been refuted.
            known = max(gap.first_seq, self.applied_seq + 1)
            self._close_gap(gap, min(gap.end_seq, known))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
