"""Experiment 3: what retention and its events cost a decode step.

``N`` requests decode together; every ``window`` steps the engine is switched, in the
order off, on, on, off, so that growing contexts weigh on both alike. Off is stock
vLLM: its own scheduler class, nothing wrapped. A subscriber in another process
reads the events. One off window of a group against the other is the noise.

Then the same load runs whole, once with retention from its start, so that blocks
are crossed and pinned as in service: what the pins hold is sampled on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from arms import empty_cache, switch
from generate import Session, params, random_tokens, stopping_at

SETTLE = 5
"""Steps after a switch that count for neither side."""
SAMPLE_EVERY = 20
"""Steps between two looks at the pins."""


def run(
    engine: Any,
    running: int,
    arm: str = "exact_tail",
    tokens: int = 1200,
    window: int = 50,
) -> dict[str, Any]:
    with _subscriber() as received:
        windows = _windows(engine, running, arm, tokens, window)
        whole = {name: _whole(engine, running, name, tokens) for name in ("stock", arm)}
    return {
        "running": running,
        "arm": arm,
        **windows,
        "events_received": received,
        "whole_tokens_per_s": {k: v["tokens_per_s"] for k, v in whole.items()},
        "pins": whole[arm]["pins"],
    }


@contextlib.contextmanager
def _subscriber() -> Iterator[dict[str, int]]:
    """Another process that reads the events; fills in how many of each it got."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("listen.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    received: dict[str, int] = {}
    try:
        yield received
        output, _ = process.communicate("stop\n", timeout=30)
        received.update(json.loads(output))
    finally:
        process.kill()
        process.wait()


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
    engine: Any, running: int, arm: str, tokens: int, window: int
) -> dict[str, Any]:
    switch(engine, "stock")
    session = Session(engine)
    prompts = _prompts(running, _block_size(engine))
    answers = [session.add(p, params(max_tokens=tokens)) for p in prompts]
    while any(not answer.tokens for answer in answers):
        session.step()
    step_s: dict[str, list[float]] = {"off": [], "on": []}
    longest = lambda: max(len(answer.tokens) for answer in answers)  # noqa: E731
    order = ("off", "on", "on", "off")
    num_windows = 0
    while longest() + 4 * (window + SETTLE) + 8 < tokens:
        for side in order:
            switch(engine, arm if side == "on" else "stock", empty=False)
            for _ in range(SETTLE):
                session.step()
            start = time.perf_counter()
            for _ in range(window):
                session.step()
            step_s[side].append((time.perf_counter() - start) / window)
            num_windows += 1
    session.run()
    switch(engine, "stock", empty=False)
    empty_cache(engine)
    # off on on off: both offs of a group against both ons.
    pairs = range(0, len(step_s["off"]), 2)
    ratios = [
        mean(step_s["off"][i : i + 2]) / mean(step_s["on"][i : i + 2]) for i in pairs
    ]
    off, on = median(step_s["off"]), median(step_s["on"])
    return {
        "step_ms": {"off": round(1e3 * off, 4), "on": round(1e3 * on, 4)},
        "tokens_per_s": {"off": round(running / off, 1), "on": round(running / on, 1)},
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "off_against_off": [
            round(step_s["off"][i] / step_s["off"][i + 1], 4) for i in pairs
        ],
        "num_windows": num_windows,
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
            held = [b for c in retention._pinned() for b in c.blocks]
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
