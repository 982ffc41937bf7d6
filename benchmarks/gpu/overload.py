"""What retention costs where it can save nothing: an overloaded pool, without a GPU.

So many conversations at once that hardly a state survives until it is asked for. Each
arm gets the very same requests, on vLLM's own scheduler with no model behind it; a
conversation's next turn comes as soon as the former one has ended. Counted are the
steps until all is answered, and the preemptions.

    python benchmarks/gpu/overload.py
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

CONVERSATIONS, BLOCKS, ANSWERS, SEEDS = 96, 250, 1500, 5
LONGEST_PROMPT, LONGEST_ANSWER = 3000, 150
ARMS = ("stock", "block_aligned", "exact_tail", "copy_64", "everything")


def main() -> None:
    from arms import ARMS as SETTINGS

    print("| arm | steps | preemptions, by seed | in all | against stock | cached |")
    print("|---|---|---|---|---|---|")
    stock: int | None = None
    for arm in ARMS:
        found = [play(SETTINGS[arm], seed) for seed in range(SEEDS)]
        preemptions = [counts["preemptions"] for counts in found]
        stock = stock or sum(preemptions)
        row = [
            arm,
            sum(counts["steps"] for counts in found),
            " ".join(map(str, preemptions)),
            sum(preemptions),
            f"{sum(preemptions) / stock:.3f}",
            sum(counts["cached"] for counts in found),
        ]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def play(settings: dict[str, Any] | None, seed: int) -> Counter[str]:
    """Play until :data:`ANSWERS` requests have ended; no settings: stock vLLM."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vllm_fork.model_free import (
        STOP_TOKEN,
        make_engine,
        make_request,
        with_recorded_checkpoints,
    )

    stock = settings is None
    engine = make_engine(
        AsyncScheduler if stock else with_recorded_checkpoints(AsyncScheduler),
        async_scheduling=True,
        num_mamba_groups=3,
        num_blocks=BLOCKS,
        max_num_seqs=128,
        max_num_batched_tokens=16384,
        settings=settings,
    )
    # What a conversation says depends on nothing but its own source.
    sources = [random.Random(f"{seed}-{i}") for i in range(CONVERSATIONS)]

    def draw(i: int, least: int, most: int) -> list[int]:
        count = sources[i].randrange(least, most)
        return [sources[i].randrange(5, 400) for _ in range(count)]

    said = [draw(i, 16, LONGEST_PROMPT // 2) for i in range(CONVERSATIONS)]
    answers: dict[int, tuple[str, list[int]]] = {}
    counts: Counter[str] = Counter()
    while counts["answers"] < ANSWERS:
        for i in range(CONVERSATIONS):
            if i in answers:
                continue
            if len(said[i]) > LONGEST_PROMPT:  # goes back, then diverges
                said[i] = said[i][: sources[i].randrange(16, 700)]
            said[i] = said[i] + draw(i, 1, 60)
            answer = [*draw(i, 2, LONGEST_ANSWER), STOP_TOKEN]
            name = f"request-{len(engine.requests)}"
            engine.add(make_request(name, said[i]), answer)
            answers[i] = name, answer
        engine.step()
        counts["steps"] += 1
        for i, (name, answer) in list(answers.items()):
            ended = engine.finished[name]
            if ended.finish_reason is not None:
                del answers[i]
                said[i] = said[i] + answer
                counts["answers"] += 1
                counts["cached"] += ended.cached_tokens or 0
    counts["preemptions"] = engine.num_preemptions
    return counts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
