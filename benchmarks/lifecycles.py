"""Valid lives of requests and checkpoints, as an engine would tell them, from a seed.

No engine: a script of what the scheduler does, on a clock of its own. Several
conversations run side by side; a turn resumes from what the former turn published,
where that is still cached; requests are preempted, aborted, ended by length; the
cache is small enough to evict.
"""

from __future__ import annotations

import random
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_fork import events
from vllm_fork.events import Event

BLOCK = 1056
START_NS = 1_800_000_000 * 10**9
STEP_NS = 2_000_000
"""One scheduler step on the script's clock: 2 ms."""


@dataclass
class _Turn:
    request_id: str
    identity: dict[str, str | None]
    boundary: int
    num_left: int
    end: str
    conversation: _Conversation
    num_prompt: int
    num_cached: int
    arrival_ns: int
    num_output: int = 0
    pinned: tuple[int, int] | None = None
    promoted: tuple[int, int] | None = None
    num_superseded: int = 0
    num_preemptions: int = 0
    last_discard: str | None = None


@dataclass
class _Conversation:
    session_id: str | None
    num_turns: int
    depth: int = 0
    last: int | None = None
    """Checkpoint that its former turn published."""


@dataclass
class Lifecycles:
    """Iterate over scheduler steps, each a list of events; the first begins with
    ``EngineStarted``. Endless: stop when there is enough.

    ``concurrency``: requests open at once. ``cache``: checkpoints that stay
    published before the oldest is evicted.
    """

    seed: int = 0
    concurrency: int = 64
    cache: int = 2_000
    boundaries: int = 3
    """Block boundaries that an answer crosses, at most."""

    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now = START_NS
        self._num_requests = 0
        self._num_checkpoints = 0
        self._open: list[_Turn] = []
        self._waiting: list[_Conversation] = []
        self._published: OrderedDict[int, dict[str, object]] = OrderedDict()

    def engine_id(self) -> str:
        """The same for the same seed."""
        return str(uuid.UUID(int=random.Random(f"engine {self.seed}").getrandbits(128)))

    def __iter__(self) -> Iterator[list[Event]]:
        yield [
            self._event(
                events.EngineStarted,
                vllm_version="0.32.0",
                fork_version="0.1.0",
                retention="on",
                exact_tail="on",
                publish_on=["stop"],
                block_size=BLOCK,
                hash_unit=16,
                num_blocks=4 * self.cache,
                num_mamba_groups=1,
                async_scheduling=True,
            )
        ]
        while True:
            step: list[Event] = []
            self._now += STEP_NS
            if len(self._open) < self.concurrency:
                self._admit(step)
            turn = self._random.choice(self._open)
            self._advance(turn, step)
            if step:
                yield step

    def _event(self, kind: type[Event], **fields: object) -> Event:
        return kind(time_unix_ns=self._now, monotonic_ns=self._now - START_NS, **fields)

    def _admit(self, step: list[Event]) -> None:
        rng = self._random
        goes_on = rng.random() < 0.7 or len(self._waiting) > 8 * self.concurrency
        if self._waiting and goes_on:
            conversation = self._waiting.pop(rng.randrange(len(self._waiting)))
        else:
            name = f"session-{self._num_requests}" if rng.random() < 0.5 else None
            conversation = _Conversation(name, rng.randint(1, 8))
        self._num_requests += 1
        external = f"chatcmpl-{self.seed}-{self._num_requests}"
        request_id = f"{external}-{rng.getrandbits(32):08x}"
        identity = {
            "request_id": request_id,
            "external_request_id": external,
            "session_id": conversation.session_id,
        }
        source = None
        if conversation.last is not None:
            source = self._published.get(conversation.last)
        cached = int(source["boundary"]) if source else 0  # type: ignore[call-overload]
        num_prompt = conversation.depth + rng.randint(30, 3_000)
        turn = _Turn(
            request_id=request_id,
            identity=identity,
            boundary=num_prompt // BLOCK,
            num_left=rng.randint(0, self.boundaries),
            end=rng.choices(["stop", "length", "abort"], weights=[8, 1, 1])[0],
            conversation=conversation,
            num_prompt=num_prompt,
            num_cached=cached,
            arrival_ns=self._now - rng.randint(1, 5) * STEP_NS,
        )
        if source is not None:
            source["num_hits"] = int(source["num_hits"]) + 1  # type: ignore[call-overload]
        self._open.append(turn)
        self._reused(turn, step, source, resumed=False)

    def _reused(
        self,
        turn: _Turn,
        step: list[Event],
        source: dict[str, object] | None,
        *,
        resumed: bool,
    ) -> None:
        step.append(
            self._event(
                events.PrefixReused,
                **turn.identity,
                num_prompt_tokens=turn.num_prompt,
                num_cached_tokens=turn.num_cached,
                resumed=resumed,
                hit_limited_by="recurrent_state" if source else "attention",
                shared_prefix_boundary=turn.num_cached + 500 if source else None,
                source_kind=source["boundary_kind"] if source else events.NONE,
                source_request_id=source["request_id"] if source else None,
                source_external_request_id=(
                    source["external_request_id"] if source else None
                ),
                source_checkpoint_id=source["checkpoint_id"] if source else None,
                source_boundary=source["boundary"] if source else None,
                arrival_unix_ns=turn.arrival_ns,
            )
        )

    def _stage(
        self,
        kind: type[Event],
        turn: _Turn,
        checkpoint: tuple[int, int],
        **fields: object,
    ) -> Event:
        return self._event(
            kind,
            **turn.identity,
            checkpoint_id=checkpoint[0],
            boundary=checkpoint[1],
            boundary_kind=events.DECODE_BLOCK,
            **fields,
        )

    def _advance(self, turn: _Turn, step: list[Event]) -> None:
        """One request comes one stage further."""
        rng = self._random
        if turn.pinned is not None:
            self._promote(turn, step)
        elif turn.num_left:
            turn.num_left -= 1
            turn.boundary += 1
            turn.num_output += BLOCK
            if rng.random() < 0.02:
                self._preempt(turn, step)
                return
            self._num_checkpoints += 1
            turn.pinned = (self._num_checkpoints, turn.boundary * BLOCK)
            step.append(
                self._stage(
                    events.CheckpointPinned,
                    turn,
                    turn.pinned,
                    num_blocks=1,
                    block_ids=[rng.randrange(4 * self.cache)],
                )
            )
        else:
            self._finish(turn, step)

    def _promote(self, turn: _Turn, step: list[Event]) -> None:
        assert turn.pinned is not None
        former = turn.promoted
        step.append(
            self._stage(
                events.CheckpointPromoted,
                turn,
                turn.pinned,
                supersedes_checkpoint_id=former[0] if former else None,
                supersedes_boundary=former[1] if former else None,
            )
        )
        if former is not None:
            self._discard(turn, former, "superseded", step)
            turn.num_superseded += 1
        turn.promoted, turn.pinned = turn.pinned, None

    def _discard(
        self, turn: _Turn, checkpoint: tuple[int, int], reason: str, step: list[Event]
    ) -> None:
        turn.last_discard = reason
        step.append(
            self._stage(events.CheckpointDiscarded, turn, checkpoint, reason=reason)
        )

    def _preempt(self, turn: _Turn, step: list[Event]) -> None:
        if turn.promoted is not None:
            self._discard(turn, turn.promoted, "preempted", step)
            turn.promoted = None
        turn.num_preemptions += 1
        self._reused(turn, step, None, resumed=True)

    def _finish(self, turn: _Turn, step: list[Event]) -> None:
        conversation = turn.conversation
        retained = None
        turn.num_output += self._random.randint(1, BLOCK - 1)
        if turn.promoted is not None:
            if turn.end == "stop":
                retained = turn.promoted
                self._publish(turn, retained, step)
                conversation.last = retained[0]
            else:
                reason = "aborted" if turn.end == "abort" else turn.end
                self._discard(turn, turn.promoted, reason, step)
        step.append(
            self._event(
                events.RequestFinished,
                **turn.identity,
                num_prompt_tokens=turn.num_prompt,
                num_output_tokens=turn.num_output,
                num_cached_tokens=turn.num_cached,
                finish_reason=turn.end,
                num_preemptions=turn.num_preemptions,
                num_superseded=turn.num_superseded,
                retained_boundary=retained[1] if retained else None,
                retained_kind=events.DECODE_BLOCK if retained else None,
                no_checkpoint_reason=(
                    None if retained else turn.last_discard or "below_block"
                ),
                arrival_unix_ns=turn.arrival_ns,
            )
        )
        self._open.remove(turn)
        conversation.depth = turn.num_prompt + turn.num_output
        conversation.num_turns -= 1
        if conversation.num_turns > 0:
            self._waiting.append(conversation)

    def _publish(
        self, turn: _Turn, checkpoint: tuple[int, int], step: list[Event]
    ) -> None:
        step.append(
            self._stage(
                events.CheckpointPublished,
                turn,
                checkpoint,
                finish_reason=turn.end,
                block_hash=checkpoint[0].to_bytes(32, "big"),
            )
        )
        self._published[checkpoint[0]] = {
            **turn.identity,
            "checkpoint_id": checkpoint[0],
            "boundary": checkpoint[1],
            "boundary_kind": events.DECODE_BLOCK,
            "num_hits": 0,
        }
        if len(self._published) > self.cache:
            _, oldest = self._published.popitem(last=False)
            step.append(
                self._event(
                    events.CheckpointEvicted, **oldest, reason="lru", age_s=60.0
                )
            )


def batches(lives: Lifecycles, num_events: int, size: int) -> Iterator[list[Event]]:
    """``num_events`` events in batches of ``size``; the first is one step alone."""
    waiting: list[Event] = []
    for number, step in enumerate(lives):
        waiting += step[:num_events]
        num_events -= len(step)
        while number == 0 or len(waiting) >= size or (num_events <= 0 and waiting):
            yield waiting[:size]
            waiting = waiting[size:]
            if number == 0:
                break
        if num_events <= 0:
            return
