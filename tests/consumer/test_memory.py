"""The consumer's memory does not grow with what it has seen."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
from lifecycles import Lifecycles, batches

from event_consumer.intake import Intake
from event_consumer.metrics import CheckpointMetrics
from event_consumer.stream_state import Apply
from vllm_fork.events import DecodedBatch, EventBatch

MB = 1 << 20


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_a_million_requests():
    """From the first 100,000 on: the caches of live things are full by then."""
    intake = Intake(counter=CheckpointMetrics())
    intake.add("here", None)
    lives = Lifecycles(seed=1, cache=2_000)
    num_requests = 0
    sizes: list[int] = []
    for seq, batch in enumerate(batches(lives, 1 << 40, 64)):
        sent = EventBatch(time.time(), batch, 0, engine_id="e")
        decoded = DecodedBatch(sent, batch, 0, [])
        intake.handle("here", [Apply("e", seq, decoded, False)])
        if seq % 100 == 0:
            num_requests += len(intake.take(time.time_ns()).closed)
            if num_requests >= 100_000 * (len(sizes) + 1):
                sizes.append(resident())
        if num_requests >= 1_000_000:
            break
    grown = [(size - sizes[0]) / MB for size in sizes]
    assert max(grown) < 16, f"MB since the first 100,000 requests: {grown}"
