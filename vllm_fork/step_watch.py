"""What every step of the scheduler looks at, in one place.

At one running request a step takes some 70 us, and each attribute that is looked up in
it counts; at many, each request that is looked at is another miss of the processor's
caches. So a step in which requests merely decode looks at none of them: one that is 500
tokens short of what it is watched for has an *alarm* 500 steps ahead. What advances by
more in a step (a prefill) is found by the step's token counts. Rolling copies note
their *turns* here in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_fork.event_queue import QueuedEvent


class StepWatch:
    """Kept by whoever wants to be called; looked at by ``schedule``.

    Args:
        free_blocks: the pool's free blocks.
        events: the events to be handed over after the step, always the same list.
        decode_tokens: tokens that a step runs of a decoding request at most.
    """

    __slots__ = (
        "_watched",
        "alarms",
        "ample_blocks",
        "decode_tokens",
        "events",
        "free_blocks",
        "is_due",
        "num_steps",
        "turns",
    )

    def __init__(
        self,
        free_blocks: FreeKVCacheBlockQueue,
        events: list[QueuedEvent],
        decode_tokens: int,
    ) -> None:
        self.free_blocks = free_blocks
        self.events = events
        self.decode_tokens = decode_tokens
        self.is_due = False
        """Whether there is something to do before the next step, or for it."""
        self.ample_blocks = 0
        """With fewer free blocks there is as well: memory may run short."""
        self.num_steps = 0
        """Steps scheduled so far; ``schedule`` counts."""
        self.alarms: dict[int, dict[str, Request]] = {}
        """Requests to look at after a step, by its number."""
        self.turns: dict[int, list[Any]] = {}
        """What rolling copies have to do with a step just scheduled, by its number."""
        # By id: the request; the computed tokens it is to have, None: whatever it has;
        # and the step of its one alarm, before which it cannot have them.
        self._watched: dict[str, tuple[Request, int | None, int]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._watched

    def __iter__(self) -> Iterator[str]:
        """The ids of the requests that are watched."""
        return iter(self._watched)

    def boundary(self, request_id: str) -> int | None:
        """The computed tokens that a request is watched for."""
        return self._watched[request_id][1]

    def await_tokens(self, request: Request, boundary: int | None) -> None:
        """Tell of ``request`` after the step that gives it ``boundary`` computed
        tokens, of the next one if it has them; None: never."""
        request_id = request.request_id
        self._silence(request_id)
        alarm = 0
        if boundary is not None:
            alarm = self.num_steps + self._fewest_steps(request, boundary)
            if alarm in self.alarms:
                self.alarms[alarm][request_id] = request
            else:
                self.alarms[alarm] = {request_id: request}
        self._watched[request_id] = request, boundary, alarm

    def forget(self, request_id: str) -> None:
        """Look at a request no more."""
        self._silence(request_id)
        self._watched.pop(request_id, None)

    def arrived(self, step: SchedulerOutput) -> list[Request]:
        """The requests that now have the tokens they are watched for: give each another
        boundary.

        Call after each step that has an alarm, or that may run more of a request than a
        decode step does; ``num_computed_tokens`` count it.
        """
        candidates = self.alarms.pop(self.num_steps, {})
        if self.may_leap(step):
            for request_id, num_tokens in step.num_scheduled_tokens.items():
                if num_tokens > self.decode_tokens and request_id in self._watched:
                    candidates[request_id] = self._watched[request_id][0]
        arrived = []
        for request_id, request in candidates.items():
            boundary = self._watched[request_id][1]
            if boundary is None:
                continue
            if request.num_computed_tokens >= boundary:
                arrived.append(request)
            else:
                self.await_tokens(request, boundary)
        return arrived

    def may_leap(self, step: SchedulerOutput) -> bool:
        """Whether a step may run more of a request than a decode step does."""
        num_requests = len(step.num_scheduled_tokens)
        return step.total_num_scheduled_tokens - num_requests >= self.decode_tokens

    def missed(self) -> list[str]:
        """Ids of running requests that nobody would be told of in time; call between
        steps."""
        return [
            request_id
            for request_id, (request, boundary, alarm) in self._watched.items()
            if boundary is not None
            and request.status == RequestStatus.RUNNING
            and not (
                request_id in self.alarms.get(alarm, ())
                and self.num_steps
                < alarm
                <= self.num_steps + self._fewest_steps(request, boundary)
            )
        ]

    def stop(self) -> None:
        """Look at nothing but events from here on."""
        self._watched.clear()
        self.alarms.clear()
        self.turns.clear()
        self.is_due = False
        self.ample_blocks = 0

    def _silence(self, request_id: str) -> None:
        watched = self._watched.get(request_id)
        if watched is not None and (others := self.alarms.get(watched[2])):
            others.pop(request_id, None)
            if not others:
                del self.alarms[watched[2]]

    def _fewest_steps(self, request: Request, boundary: int) -> int:
        distance = boundary - request.num_computed_tokens
        return -(-distance // self.decode_tokens) if distance > 1 else 1
