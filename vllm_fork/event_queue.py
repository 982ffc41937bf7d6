"""The bounded queue between the scheduler's thread and the sending one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm_fork.events import Event

QueuedEvent = Event | tuple[Any, ...]
"""An event, or the function that makes one and its arguments: the scheduler's thread
leaves the making to the sending one. What it is made of must not change meanwhile."""


def made(queued: QueuedEvent) -> Event:
    """The event itself."""
    if isinstance(queued, Event):
        return queued
    make, *arguments = queued
    return make(*arguments)


class EventQueue:
    """Holds at most ``limit`` events; :meth:`put` drops rather than waits.

    One thread puts, one takes, and neither takes a lock: each counter has one
    writer, and a deque's ends are atomic. The events of the first :meth:`put` are
    kept apart, so that no overflow drops them, and come out first.
    """

    def __init__(self, limit: int, *, drop_oldest: bool) -> None:
        self._limit = limit
        self._drop_oldest = drop_oldest
        self._first: list[QueuedEvent] | None = None
        self._has_first = False
        self._rest: deque[QueuedEvent] = deque()
        self.num_put = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._rest) + len(self._first or ())

    def put(self, events: Sequence[QueuedEvent]) -> None:
        """Append ``events`` and drop what is too much."""
        new = list(events)
        self.num_put += len(new)
        if not self._has_first and new:
            self._first = new
            self._has_first = True
            return
        excess = len(self._rest) + len(new) - self._limit
        if excess > 0:
            new = self._make_room(new, excess)
        self._rest.extend(new)

    def take(self, max_events: int) -> list[QueuedEvent]:
        """The oldest events; those of the first :meth:`put` all at once and alone."""
        if self._first is not None:
            events, self._first = self._first, None
            return events
        events = []
        while len(events) < max_events:
            try:
                events.append(self._rest.popleft())
            except IndexError:  # empty, or emptied by an overflow just now
                break
        return events

    def _make_room(self, new: list[QueuedEvent], excess: int) -> list[QueuedEvent]:
        if not self._drop_oldest:
            kept = new[: max(0, len(new) - excess)]
            self.num_dropped += len(new) - len(kept)
            return kept
        kept = new[-self._limit :]
        self.num_dropped += len(new) - len(kept)
        for _ in range(len(self._rest) + len(kept) - self._limit):
            try:
                self._rest.popleft()
            except IndexError:  # the taking thread was faster
                break
            self.num_dropped += 1
        return kept
