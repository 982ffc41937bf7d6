"""Experiment 3: what retention and its events cost a decode step.

``N`` requests decode together; every ``window`` steps the engine is switched: off, each
arm, each arm in reverse, off, so that growing contexts weigh on all alike. Off is stock
vLLM: its own scheduler class, nothing wrapped. A subscriber in another process reads
the events. One off window of a group against the other is the noise.

With ``whole=1`` the same load then runs whole, once stock and once in each arm, with
retention from its start, so that blocks are crossed and pinned as in service: what the
pins hold is sampled on the way.
"""

from __future__ import annotations

import itertools
import time
from statistics import mean, median
from typing import Any

from arms import empty_cache, switch
from generate import Session, params, random_tokens, stopping_at
from listen import counted_events

SETTLE = 5
"""Steps after a switch that count for no side."""
SAMPLE_EVERY = 20
"""Steps between two looks at the pins."""
STARTING = 64
"""Steps in which all requests are started, at most."""


def run(
    engine: Any,
    running: int,
    arm: str = "exact_tail",
    groups: int = 5,
    window: int = 50,
    whole: int = 1200,
) -> dict[str, Any]:
    """Several arms are joined by ``+``. ``whole``: tokens a request of the runs with
    retention from their start; 0 leaves them out."""
    arms = arm.split("+")
    with counted_events() as received:
        rows = _windows(engine, running, arms, groups, window)
        if whole:
            runs = {name: _whole(engine, running, name, whole) for name in rows}
            stock = _whole(engine, running, "stock", whole)["tokens_per_s"]
            for name, row in rows.items():
                tokens_per_s = {"stock": stock, name: runs[name]["tokens_per_s"]}
                row |= {"whole_tokens_per_s": tokens_per_s, "pins": runs[name]["pins"]}
    return {
        "running": running,
        "groups": groups,
        "window": window,
        "rows": list(rows.values()),
        "events_received": received,
    }


def _prompts(running: int, block: int) -> list[list[int]]:
    """Ragged, so that blocks are crossed at all times."""
    return [
        random_tokens(16 + (block - 16) * i // running, ("load", running, i))
        for i in range(running)
    ]


def _block_size(engine: Any) -> int:
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    return manager.coordinator.scheduler_block_size


def _windows(
    engine: Any, running: int, arms: list[str], groups: int, window: int
) -> dict[str, dict[str, Any]]:
    """A row an arm."""
    switch(engine, "stock")
    session = Session(engine)
    order = ["stock", *arms, *reversed(arms), "stock"]
    tokens = STARTING + groups * len(order) * (window + SETTLE)
    prompts = _prompts(running, _block_size(engine))
    answers = [session.add(p, params(max_tokens=tokens)) for p in prompts]
    while any(not answer.tokens for answer in answers):
        session.step()
    # step_s[arm][group]: its two windows
    step_s: dict[str, list[list[float]]] = {name: [] for name in ("stock", *arms)}
    for _ in range(groups):
        for windows in step_s.values():
            windows.append([])
        for name in order:
            switch(engine, name, empty=False)
            for _ in range(SETTLE):
                session.step()
            start = time.perf_counter()
            for _ in range(window):
                session.step()
            step_s[name][-1].append((time.perf_counter() - start) / window)
    assert len(session) == running, "some requests ended before the last window"
    session.run()
    switch(engine, "stock", empty=False)
    empty_cache(engine)
    return {name: _row(running, name, step_s["stock"], step_s[name]) for name in arms}


def _row(
    running: int, arm: str, offs: list[list[float]], ons: list[list[float]]
) -> dict[str, Any]:
    ratios = [mean(off) / mean(on) for off, on in zip(offs, ons, strict=True)]
    off, on = (median(itertools.chain(*windows)) for windows in (offs, ons))
    return {
        "running": running,
        "arm": arm,
        "step_ms": {"off": round(1e3 * off, 4), "on": round(1e3 * on, 4)},
        "tokens_per_s": {"off": round(running / off, 1), "on": round(running / on, 1)},
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "off_against_off": [round(first / last, 4) for first, last in offs],
    }


def _whole(engine: Any, running: int, arm: str, tokens: int) -> dict[str, Any]:
    switch(engine, arm)
    scheduler = engine.engine_core.engine_core.scheduler
    session = Session(engine)
    answers = [
        session.add(prompt, stopping_at(tokens))
        for prompt in _prompts(running, _block_size(engine))
    ]
    while any(not answer.tokens for answer in answers):
        session.step()
    pinned, extra = [0], [0]
    steps = itertools.count()

    def sample() -> None:
        retention = getattr(scheduler, "retention", None)
        if retention is not None and next(steps) % SAMPLE_EVERY == 0:
            held = [b for c in retention._held() for b in c.blocks]
            pinned.append(len(held))
            extra.append(sum(block.ref_cnt == 1 for block in held))

    done = sum(len(answer.tokens) for answer in answers)
    start = time.perf_counter()
    session.run(sample if arm != "stock" else None)
    elapsed = time.perf_counter() - start
    assert all(answer.finish_reason == "stop" for answer in answers)
    result = {
        "tokens_per_s": round((running * tokens - done) / elapsed, 1),
        "pins": {
            "most_blocks": max(pinned),
            "most_blocks_held_by_pins_alone": max(extra),
        },
    }
    switch(engine, "stock")
    return result
