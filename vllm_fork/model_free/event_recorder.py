"""Schedulers with checkpoints whose events are kept instead of sent."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_fork.event_queue import QueuedEvent, made
from vllm_fork.events import (
    CheckpointDiscarded,
    CheckpointEvent,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
    Event,
    RequestFinished,
)
from vllm_fork.scheduler import with_checkpoints

EventType = TypeVar("EventType", bound=Event)


class EventRecorder:
    """Stands in for the publisher: keeps what it is given, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, events: Sequence[QueuedEvent]) -> None:
        self.events.extend(map(made, events))

    def shutdown(self, timeout_s: float = 1.0) -> None:
        pass

    def of_type(self, kind: type[EventType]) -> list[EventType]:
        """The events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def started(self) -> EngineStarted:
        """What the engine said of itself."""
        return self.of_type(EngineStarted)[0]

    def open_checkpoints(self) -> list[int]:
        """Ids of checkpoints that were pinned and have not ended."""
        state = self._replay()
        return [i for i, stage in state.items() if stage in ("pinned", "promoted")]

    def lifecycle_problems(self) -> list[str]:
        """Every stage that no checkpoint may reach from the stage it was in.

        Pinned, then promoted, then published; discarded from either of the first
        two; one end each. And each end of a request that counts its superseded
        checkpoints wrongly. One sentence a problem.
        """
        problems: list[str] = []
        self._replay(problems)
        num_superseded: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, CheckpointDiscarded):
                num_superseded[event.request_id] += event.reason == "superseded"
            elif isinstance(event, RequestFinished):
                count = num_superseded.pop(event.request_id, 0)
                if event.num_superseded != count:
                    problems.append(
                        f"{event.request_id} ended with {event.num_superseded} "
                        f"superseded checkpoints, of {count}"
                    )
        return problems

    def _replay(self, problems: list[str] | None = None) -> dict[int, str]:
        allowed: dict[type[Event], tuple[str, set[str | None]]] = {
            CheckpointPinned: ("pinned", {None}),
            CheckpointPromoted: ("promoted", {"pinned"}),
            CheckpointPublished: ("published", {"promoted"}),
            CheckpointDiscarded: ("discarded", {"pinned", "promoted"}),
        }
        stages: dict[int, str] = {}
        for event in self.of_type(CheckpointEvent):
            if type(event) not in allowed:
                continue
            stage, before = allowed[type(event)]
            current = stages.get(event.checkpoint_id)
            if current not in before and problems is not None:
                problems.append(
                    f"checkpoint {event.checkpoint_id} of {event.request_id} was "
                    f"{current} when it was {stage}"
                )
            stages[event.checkpoint_id] = stage
        return stages


@functools.cache
def with_recorded_checkpoints(cls: type[Scheduler]) -> type[Scheduler]:
    """``with_checkpoints(cls)`` with an :class:`EventRecorder` as ``publisher``.

    An error inside a hook escapes instead of turning retention off.
    """

    class Recorded(with_checkpoints(cls)):  # type: ignore[misc]
        strict = True

        def _make_publisher(self, settings: Any) -> EventRecorder:
            return EventRecorder()

    Recorded.__name__ = f"Recorded{cls.__name__}"
    return Recorded
