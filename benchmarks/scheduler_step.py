"""What checkpoint retention adds to a scheduler step while requests decode.

One engine an arm and count of requests, made for that many: vLLM's own scheduler and
KV-cache manager with a worker that does nothing; a step is ``schedule`` and
``update_from_output``, one step in flight under ``--scheduler async`` as in vLLM's
engine core. Arms: ``retention`` (block boundaries alone), ``exact_tail`` and
``copy64``, each without events and, as ``<arm>_events``, with the real publisher; and
``stock``. Requests start at lengths spread over a block, so that block boundaries and
copies spread over the steps.

Engines that are all the same differ by up to 3% from one start to the next, by where
their objects lie in memory, and one engine by as much within half a second. So each
engine is compared with itself, step by step: of four steps one is taken by our
``schedule``, two by vLLM's own, which ours calls, and one by ours again, or the other
way round; what drifts falls on both alike. What ours would have done in a step by
vLLM's own is done before and behind it, outside the time, so that a step by ours finds
as much to do as if all were. (Nothing else of ours runs in a step in which requests
decode. The class stays: after each change of it Python would look everything up anew
for some fifty steps.) What the publisher's thread does to a step beside it falls on
both alike, too: that is measured by ``engine_stall.py``.

Each round visits the engines in a new order, for some fifty steps at least: when one is
gone to, the processor's caches are full of the others, and a process has but one. (In
visits of a dozen steps what ours adds is found colder than it is, and costs up to half
a percent more.) A ratio is that of the two by ours to the two by vLLM's; the median of
all is told. On stderr there is beside it the ratio of all together but the longest
tenth, which counts in what is rarer than one step in four.
Time is the CPU time of the stepping thread, which other work on the machine stretches
less; ``--clock wall`` shows waits as well::

    python benchmarks/scheduler_step.py --json

prints ``{"ratio": {"<arm>@<running>": …}, "aa_spread": …, "extra_us_per_request_step":
{…}}``. ``stock`` takes all steps by vLLM's own; ``aa_spread`` is the largest distance
of its ratios from 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from vllm_fork.model_free import make_request, make_scheduler
from vllm_fork.model_free.scheduler_factory import MAX_MODEL_LEN
from vllm_fork.scheduler import CheckpointSchedulerMixin, with_checkpoints

BLOCK: Final = 1056
HASH_UNIT: Final = 16
SAMPLED_TOKEN: Final = 11
VISIT_S: Final = 0.1
"""Seconds that the steps of a visit to an engine take at least."""
MIN_FOURS: Final = 12
"""Fours of such steps at least."""
SKIPPED_S: Final = 0.008
"""Seconds of the steps before them that do not count, at least."""
MIN_SKIPPED: Final = 3
"""Such steps at least."""
MODES: Final[dict[str, dict[str, Any]]] = {
    "retention": {"exact_tail": False},
    "exact_tail": {"exact_tail": True},
    "copy64": {"exact_tail": True, "copy_interval": 64},
}


Pairs = list[tuple[float, float]]


class Arm:
    """One scheduler that decodes ``num_running`` requests until they are dropped."""

    def __init__(
        self,
        settings: dict[str, Any] | None,
        num_running: int,
        is_async: bool,
        clock: Callable[[], float],
    ) -> None:
        stock: type[Scheduler] = AsyncScheduler if is_async else Scheduler
        cls = stock if settings is None else with_checkpoints(stock)
        self.scheduler = make_scheduler(
            cls,
            block_size=BLOCK,
            hash_unit=HASH_UNIT,
            num_blocks=16 * num_running + 100,
            max_num_seqs=num_running,
            async_scheduling=is_async,
            settings=settings,
        )
        own, ours = stock.schedule, type(self.scheduler).schedule
        self._own = functools.partial(own, self.scheduler)
        self._ours = functools.partial(ours, self.scheduler)
        self._schedule = self._ours
        self.num_running = num_running
        self._in_flight: SchedulerOutput | None = None
        self._is_async = is_async
        self._clock = clock
        self._known: dict[str, int] = {}
        self._lengths = [20 + i * BLOCK // num_running for i in range(num_running)]
        self._num_started = 0
        self._start()

    def _start(self) -> None:
        numbers = random.Random(0)
        for length in self._lengths:
            prompt = numbers.choices(range(20, 500), k=length)
            name = f"request-{self._num_started}"
            self._num_started += 1
            request = make_request(name, prompt, hash_unit=HASH_UNIT)
            self.scheduler.add_request(request)
        self._prefill()

    def keep_within(self, num_steps: int) -> None:
        """Start the requests again if one would come to its end in ``num_steps``."""
        longest = max(request.num_tokens for request in self.scheduler.running)
        if longest + num_steps < MAX_MODEL_LEN:
            return
        request_ids = list(self.scheduler.requests)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for _ in range(3):  # with what is in flight
            self.step()
        self._start()

    def _prefill(self) -> None:
        """Get all prompts out of the way in a few huge steps."""
        scheduler, config = self.scheduler, self.scheduler.scheduler_config
        usual = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = config.max_num_batched_tokens = 1 << 24
        while scheduler.waiting or any(
            request.is_prefill_chunk for request in scheduler.running
        ):
            self.step()
        scheduler.max_num_scheduled_tokens = config.max_num_batched_tokens = usual

    def step(self) -> float:
        """Seconds that one step takes the engine's thread."""
        clock = self._clock
        if self._schedule is not self._ours:
            self._prepare()
        begin = clock()
        scheduled = output = self._schedule()
        taken = clock() - begin
        if self._is_async:
            output, self._in_flight = self._in_flight, output
        if output is not None:
            result = self._run(output)
            begin = clock()
            self.scheduler.update_from_output(output, result)
            taken += clock() - begin
        if self._schedule is not self._ours:
            self._make_up(scheduled)
        return taken

    # What our ``schedule`` would have done in a step that goes past it, and when.

    def _prepare(self) -> None:
        scheduler = self.scheduler
        if isinstance(scheduler, CheckpointSchedulerMixin) and scheduler._watch.is_due:
            scheduler._prepare_step()

    def _make_up(self, output: SchedulerOutput) -> None:
        if isinstance(scheduler := self.scheduler, CheckpointSchedulerMixin):
            watch = scheduler._watch
            watch.num_steps += 1
            if watch.num_steps in watch.alarms:
                scheduler._reach(output)
            if watch.num_steps in watch.turns:
                scheduler._copy(output)
            scheduler.observer.flush()

    def switch(self, on: bool) -> None:
        """Go on by our ``schedule``, or by vLLM's own."""
        self._schedule = self._ours if on else self._own

    def visit(self, num_skipped: int, num_fours: int, draw: random.Random) -> Pairs:
        """The mean step times (s) by our ``schedule`` and by vLLM's own, of each four
        steps."""
        self.keep_within(num_skipped + 4 * num_fours)
        for _ in range(num_skipped):
            self.step()
        pairs = []
        for _ in range(num_fours):
            first = draw.random() < 0.5
            times = {True: 0.0, False: 0.0}
            for on in (first, not first, not first, first):
                self.switch(on)
                times[on] += self.step() / 2
            pairs.append((times[True], times[False]))
        self.switch(True)
        assert len(self.scheduler.running) == self.num_running, "some have ended"
        return pairs

    def close(self) -> None:
        self.scheduler.shutdown()

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One token for every request that has all its tokens behind it."""
        for new in output.scheduled_new_reqs:
            self._known[new.req_id] = len(new.prompt_token_ids or ())
            self._known[new.req_id] -= new.num_computed_tokens
        request_ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            left = self._known[request_id] - num_tokens
            sampled.append([SAMPLED_TOKEN] if left <= 0 else [])
            self._known[request_id] = max(left, 1)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={r: i for i, r in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )


def arm_settings() -> dict[str, dict[str, Any] | None]:
    """The settings of each arm; None: vLLM alone."""
    settings: dict[str, dict[str, Any] | None] = {"stock": None}
    on = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    for name, mode in MODES.items():
        settings[name] = {"retain": True, **mode, "events": {"enabled": False}}
        settings[f"{name}_events"] = {
            "retain": True,
            **mode,
            "events": {"enabled": True, **on},
        }
    return settings


def measure(
    arms: dict[str, Arm], num_rounds: int, deadline: float, seed: int
) -> dict[str, Pairs]:
    """Step times (s) of each arm, as it is and as stock; fewer rounds if time is
    short."""
    for arm in arms.values():
        warm_up = [arm.step() for _ in range(5)]
    step_s = statistics.median(warm_up)
    num_fours = max(MIN_FOURS, math.ceil(VISIT_S / step_s / 4))
    num_skipped = max(MIN_SKIPPED, math.ceil(SKIPPED_S / step_s))
    # As vLLM's engine core does once it has started.
    gc.collect()
    gc.freeze()
    pairs: dict[str, Pairs] = {name: [] for name in arms}
    draw = random.Random(seed)
    for _ in range(num_rounds):
        for name in draw.sample(list(arms), len(arms)):
            pairs[name] += arms[name].visit(num_skipped, num_fours, draw)
        if time.monotonic() > deadline:
            break
    gc.unfreeze()
    return pairs


def ratio_together(pairs: Pairs) -> float:
    """Of the summed times; without the tenth of pairs that took longest."""
    kept = sorted(pairs, key=sum)[: math.ceil(0.9 * len(pairs))]
    return sum(on for on, _ in kept) / sum(off for _, off in kept)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--seconds", type=float, default=95, help="for all, but the imports"
    )
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--scheduler", choices=["sync", "async"], default="async")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    deadline = time.monotonic() + args.seconds
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    described = list(arm_settings().items())
    random.Random(args.seed).shuffle(described)
    ratio: dict[str, float] = {}
    extra: dict[str, float] = {}
    todo = sorted(args.running, reverse=True)
    for i, num_running in enumerate(todo):
        now = time.monotonic()
        # A step of more requests takes longer.
        weights = [4 + math.sqrt(n) for n in todo[i:]]
        share = (deadline - now) * weights[0] / sum(weights)
        arms = {
            name: Arm(settings, num_running, args.scheduler == "async", clock)
            for name, settings in described
        }
        times = measure(arms, args.rounds, now + share, args.seed)
        for arm in arms.values():
            arm.close()
        stock_us = 1e6 * statistics.median(
            off for pairs in times.values() for _, off in pairs
        )
        print(
            f"{num_running} running: the median stock step takes {stock_us:.0f} µs; "
            f"{4 * len(times['stock'])} steps an arm",
            file=sys.stderr,
        )
        for name in arm_settings():
            label = f"{name}@{num_running}"
            median = statistics.median(on / off for on, off in times[name])
            ratio[label] = round(median, 4)
            extra[label] = round((median - 1) * stock_us / num_running, 4)
            print(
                f"  {name:20} x {ratio[label]:.4f}  "
                f"{extra[label]:+.3f} µs a request and step; "
                f"together x {ratio_together(times[name]):.4f}",
                file=sys.stderr,
            )
    aa_spread = max(
        abs(value - 1) for name, value in ratio.items() if name.startswith("stock@")
    )
    report = {
        "ratio": ratio,
        "aa_spread": round(aa_spread, 4),
        "extra_us_per_request_step": extra,
    }
    print(json.dumps(report) if args.json else f"A/A spread {aa_spread:.4f}")


if __name__ == "__main__":
    main()
