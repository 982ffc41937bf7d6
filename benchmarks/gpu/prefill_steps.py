"""Into which steps vLLM splits a prefill, for a follow-up turn and for baselines.

In ``align`` mode vLLM stops a prefill at the last multiple of the hash unit before the
prompt's end (``Scheduler._mamba_block_aligned_split``), to cache the recurrent state
there, and runs the 1 to ``unit`` tokens behind it as a further step. A single token
left over is a decode step, which a CUDA graph runs in a tenth of the time. So a
follow-up and a prompt of as many new tokens alone can take unlike steps:
:func:`alike` is a prompt of no more tokens that splits as the follow-up does. With the
overlay a short follow-up takes one step (``vllm_fork.short_follow_up``).

Without a GPU, on vLLM's own scheduler with no model behind it:

    python benchmarks/gpu/prefill_steps.py
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

UNIT = 16
"""The hash unit, in tokens."""


def alike(prompt: int, new: int, unit: int = UNIT) -> int:
    """Tokens of the longest prompt with no more than ``new`` tokens whose last step
    is as long as that of a prompt of ``prompt`` tokens, ``new`` of them uncached."""
    last = (prompt - 1) % unit + 1
    return new - (new - last) % unit if new >= last else new


def steps_of(scheduled: Sequence[int], uncached: int) -> list[int]:
    """The prefill among a request's ``scheduled`` tokens by step: the first steps
    that add up to ``uncached``."""
    steps: list[int] = []
    for tokens in scheduled:
        if sum(steps) >= uncached:
            break
        steps.append(tokens)
    return steps


@contextlib.contextmanager
def recorded(scheduler: Any) -> Iterator[list[int]]:
    """Tokens of each step that ``scheduler`` schedules meanwhile; idle ones apart."""
    schedule = scheduler.schedule
    scheduled: list[int] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            scheduled.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = recording
    try:
        yield scheduled
    finally:
        del scheduler.schedule


def main() -> None:
    from dialog import LENGTHS

    print("| lengths | new tokens | cached | follow-up | alone | alone, alike |")
    print("|---|---|---|---|---|---|")
    for column in ("stock", "retained"):
        for row in _rows(LENGTHS[column]):
            print("| " + " | ".join(map(str, [column, *row])) + " |")


def _rows(lengths: Sequence[tuple[int, int]]) -> Iterator[list[object]]:
    """A row for each turn after the first, exact tails on."""
    from generate import random_tokens
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vllm_fork.model_free import (
        STOP_TOKEN,
        make_engine,
        make_request,
        with_recorded_checkpoints,
    )

    engine = make_engine(
        with_recorded_checkpoints(AsyncScheduler),
        async_scheduling=True,
        num_mamba_groups=3,
        max_num_batched_tokens=16384,
        settings={"retain": True},
    )

    def draw(count: int, *seed: object) -> list[int]:
        return [token + STOP_TOKEN for token in random_tokens(count, seed, 400)]

    def ask(prompt: list[int], answer: list[int]) -> tuple[int, str]:
        name = f"r{len(engine.requests)}"
        with recorded(engine.scheduler) as scheduled:
            engine.add(make_request(name, prompt), [*answer, STOP_TOKEN])
            engine.run()
        cached = engine.finished[name].cached_tokens or 0
        steps = steps_of(scheduled, len(prompt) - cached)
        return cached, " + ".join(map(str, steps))

    said = draw(lengths[0][0], "first")
    for (_, completion), (prompt, _) in pairwise(lengths):
        answer = draw(completion - 1, prompt)
        ask(said, answer)
        said = [*said, *answer, STOP_TOKEN]
        count = prompt - len(said)
        said += draw(count, prompt, "new")
        cached, follow_up = ask(said, [])
        _, alone = ask(draw(count, prompt, "alone"), [])
        _, same = ask(draw(alike(prompt, count), prompt, "alike"), [])
        yield [count, cached, follow_up, alone, same]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
