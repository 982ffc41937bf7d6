"""Experiments 1 and 2: the reference's dialog by arm, and what a follow-up waits.

The lengths are those of the reference's table (vLLM PR 50551): (prompt, completion)
a turn, one column measured without and one with retention. Every turn's prompt is
everything said so far plus new random tokens; every completion ends with a real
stop token, which the next prompt repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
from arms import empty_cache, switch
from generate import Answer, ask, params, random_tokens, stopping_at
from prefill_steps import UNIT, alike, recorded, steps_of

from vllm_fork.config import Settings

Lengths = list[tuple[int, int]]

LENGTHS: dict[str, Lengths] = {
    "stock": [(61, 3613), (3729, 4374), (8151, 2950), (11145, 1977), (13168, 8126)],
    "retained": [(61, 3518), (3634, 4080), (7763, 3071), (10878, 1290), (12214, 2935)],
    "short": [(61, 12), (380, 20), (410, 6)],
}
EXPECTED_CACHED = {
    ("stock", "stock"): [0, 48, 3728, 8144, 11136],
    ("block_aligned", "retained"): [0, 3168, 7392, 10560, 11616],
}
"""The reference's own columns, block 1056, hash unit 16."""


def play(engine: Any, lengths: Lengths, seed: str) -> list[Answer]:
    """The dialog, one turn after the other."""
    turns: list[Answer] = []
    said: list[int] = []
    for turn, (prompt, completion) in enumerate(lengths):
        said += random_tokens(prompt - len(said), (seed, turn))
        answer = ask(engine, said, stopping_at(completion))
        if (len(answer.tokens), answer.finish_reason) != (completion, "stop"):
            raise AssertionError(
                f"turn {turn} ended by {answer.finish_reason} after "
                f"{len(answer.tokens)} tokens, not by the stop token at {completion}"
            )
        said += answer.tokens
        turns.append(answer)
    return turns


def warm_up_for(engine: Any, column: str) -> None:
    """Compile and autotune what the timed turns will run, hits and misses."""
    lengths = LENGTHS[column]
    for arm in ("stock", "exact_tail"):
        switch(engine, arm)
        for seed in range(2):
            play(engine, [(prompt, 3) for prompt, _ in lengths], f"warm-{seed}")
            small = [(61 + 60 * turn, 3) for turn in range(len(lengths))]
            play(engine, small, f"warm-small-{seed}")
    empty_cache(engine)


def run(engine: Any, arm: str, column: str, repeats: int = 25) -> dict[str, Any]:
    """One arm over one column of lengths."""
    switch(engine, arm)
    turns = play(engine, LENGTHS[column], "dialog")
    cached = [turn.cached for turn in turns]
    prompts = [len(turn.prompt) for turn in turns]
    result = {
        "arm": arm,
        "lengths": column,
        "turns": [
            {
                "prompt": len(turn.prompt),
                "completion": len(turn.tokens),
                "cached": turn.cached,
                "ttft_s": round(turn.first_token_s, 4),
                "decode_ms": round(turn.decode_ms, 3),
            }
            for turn in turns
        ],
        "cached": sum(cached),
        "prompt": sum(prompts),
        "hit_rate": round(sum(cached) / sum(prompts), 4),
        "as_reference": (
            cached == EXPECTED_CACHED[arm, column]
            if (arm, column) in EXPECTED_CACHED
            else None
        ),
    }
    if arm.startswith("exact_tail"):
        # Asked again, any other arm finds what stock vLLM kept of the repeats.
        result["follow_ups"] = [
            _follow_up(
                engine,
                turn.prompt + turn.tokens,
                len(after.prompt) - len(turn.prompt) - len(turn.tokens),
                repeats,
            )
            for turn, after in pairwise(turns)
        ]
    if arm != "stock":
        result["integrity"] = _integrity(engine)
    return result


def follow_ups(
    engine: Any, arm: str, column: str, repeats: int = 15, decoded: int = 16
) -> dict[str, Any]:
    """The follow-up turns of a dialog of which only the last ``decoded`` tokens of an
    answer are decoded and the others prefilled: the same checkpoints, in seconds."""
    switch(engine, arm)
    lengths = LENGTHS[column]
    said: list[int] = []
    rows = []
    for (prompt, completion), (following, _) in pairwise(lengths):
        known = max(completion - decoded, 0)
        said += random_tokens(prompt + known - len(said), ("prefilled", prompt))
        said += ask(engine, said, stopping_at(completion - known)).tokens
        rows.append(_follow_up(engine, said, following - len(said), repeats))
    return {
        "arm": arm,
        "lengths": column,
        "follow_ups": rows,
        "integrity": _integrity(engine),
    }


def _follow_up(
    engine: Any, said: list[int], count: int, repeats: int
) -> dict[str, Any]:
    """Time to first token of ``count`` new tokens behind ``said``, against those alone.

    Three kinds of prompt are asked in turn, with fresh new tokens each time, so that
    no state is found but the one the former answer left: the follow-up, as many new
    tokens alone, and the longest prompt of no more tokens that takes the same steps as
    the follow-up (see ``prefill_steps``).
    """
    seen = _ask_in_turn(engine, {"seen": (said, count)}, 0, seed=len(said))
    one_step = len(seen["seen"]["steps"]) == 1
    alone = {
        "alone": count,
        "alike": min(count, UNIT) if one_step else alike(len(said) + count, count),
    }
    kinds = {kind: ([], tokens) for kind, tokens in alone.items()}
    kinds["follow_up"] = (said, count)
    asked = _ask_in_turn(engine, kinds, repeats, seed=len(said))
    ttft = asked["follow_up"]["ttft_s"]
    limit, like = asked["alone"]["ttft_s"], asked["alike"]["ttft_s"]
    return {
        "new_tokens": count,
        "cached": asked["follow_up"]["cached"],
        "cached_alone": asked["alone"]["cached"],
        "ttft_s": round(median(ttft), 4),
        "ttft_range_s": [min(ttft), max(ttft)],
        "new_alone_s": round(median(limit), 4),
        "new_alone_range_s": [min(limit), max(limit)],
        "ratio": round(median(ttft) / median(limit), 3),
        "alike_tokens": alone["alike"],
        "alike_s": round(median(like), 4),
        "alike_range_s": [min(like), max(like)],
        "alike_ratio": round(median(ttft) / median(like), 3),
        "steps": {kind: found["steps"] for kind, found in asked.items()},
        "like_the_first": [found["like_the_first"] for found in asked.values()],
        "samples_s": [ttft, limit, like],
    }


def steps(
    engine: Any, lengths: str = "48 49 51 62", repeats: int = 15
) -> dict[str, Any]:
    """Time to first token of prompts that take one step, a step and a single token,
    a step and a few: what a step costs, whatever its length."""
    switch(engine, "stock")
    kinds = {length: ([], int(length)) for length in str(lengths).split()}
    asked = _ask_in_turn(engine, kinds, repeats, seed="steps")
    empty_cache(engine)
    return {
        "rows": [
            {
                "tokens": int(length),
                "steps": " + ".join(map(str, found["steps"])),
                "ttft_s": round(median(found["ttft_s"]), 4),
                "least_s": min(found["ttft_s"]),
                "most_s": max(found["ttft_s"]),
            }
            for length, found in asked.items()
        ]
    }


def one_step(
    engine: Any,
    counts: str = "16 32 64 128 256 512 1024",
    repeats: int = 15,
    whole_blocks: int = 3,
) -> dict[str, Any]:
    """Follow-ups of so many new tokens in one step, in two, and those tokens alone.

    The checkpoint lies 8 tokens behind ``whole_blocks`` blocks, so that a count of
    whole units leaves 8 tokens to the second step; and so long as the new tokens end
    in that block, no step ends inside them for another reason.
    """
    switch(engine, "exact_tail")
    scheduler = engine.engine_core.engine_core.scheduler
    length, decoded = whole_blocks * scheduler.block_size + UNIT // 2, 16
    prompt = random_tokens(length - decoded, "one step")
    said = prompt + ask(engine, prompt, stopping_at(decoded)).tokens
    split = {
        kind: scheduler._short_follow_ups(
            msgspec.convert({"retain": True, "one_step_tokens": most}, type=Settings)
        )
        for kind, most in (("one_step", 2**30), ("two_steps", 0))
    }

    def choose(kind: str) -> None:
        scheduler._follow_ups = split.get(kind)

    rows = []
    for count in map(int, str(counts).split()):
        kinds = dict.fromkeys(split, (said, count)) | {"alone": ([], count)}
        asked = _ask_in_turn(engine, kinds, repeats, (count, "one step"), choose)
        times = {kind: median(found["ttft_s"]) for kind, found in asked.items()}
        one, two, alone = (times[kind] for kind in kinds)
        rows.append(
            {
                "new_tokens": count,
                "cached": " ".join(map(str, asked["one_step"]["cached"])),
                "one_step_s": round(one, 4),
                "two_steps_s": round(two, 4),
                "one_of_two": round(one / two, 3),
                "alone_s": round(alone, 4),
                "one_of_alone": round(one / alone, 3),
                "two_of_alone": round(two / alone, 3),
                "steps": "; ".join(
                    " + ".join(map(str, asked[kind]["steps"])) for kind in kinds
                ),
                "like_the_first": " ".join(
                    str(asked[kind]["like_the_first"]) for kind in kinds
                ),
                "ranges_s": "; ".join(
                    "{:.4f}-{:.4f}".format(
                        min(asked[kind]["ttft_s"]), max(asked[kind]["ttft_s"])
                    )
                    for kind in kinds
                ),
            }
        )
    return {"checkpoint": length, "rows": rows, "integrity": _integrity(engine)}


def _ask_in_turn(
    engine: Any,
    kinds: dict[str, tuple[list[int], int]],
    repeats: int,
    seed: object,
    before: Callable[[str], None] = lambda kind: None,
) -> dict[str, dict[str, Any]]:
    """Ask each kind's prefix with that many fresh tokens, ``repeats`` times, in turn;
    once more before that, which counts for nothing but the steps that it takes.
    ``before`` each, its kind is told."""
    one = params(max_tokens=1)
    found: dict[str, dict[str, Any]] = {
        kind: {"ttft_s": [], "cached": set(), "like_the_first": 0} for kind in kinds
    }
    for repeat in range(-1, repeats):
        for kind, (said, count) in kinds.items():
            new = random_tokens(count, (seed, kind, repeat))
            before(kind)
            with recorded(engine.engine_core.engine_core.scheduler) as scheduled:
                answer = ask(engine, said + new, one)
            steps = steps_of(scheduled, len(answer.prompt) - answer.cached)
            if repeat < 0:
                found[kind]["steps"] = steps
                continue
            found[kind]["like_the_first"] += steps == found[kind]["steps"]
            found[kind]["ttft_s"].append(round(answer.first_token_s, 4))
            found[kind]["cached"].add(answer.cached)
    for asked in found.values():
        asked["cached"] = sorted(asked["cached"])
    return found


def _integrity(engine: Any) -> dict[str, int]:
    return engine.engine_core.engine_core.scheduler.check_integrity()._asdict()
