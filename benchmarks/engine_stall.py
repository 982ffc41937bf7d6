"""What the event stream costs an engine step when the stream is in trouble.

One model-free engine an arm (real scheduler and KV-cache manager, no model) with
``--running`` requests that cross block boundaries and end all the time, about two
events a step; the arms take turns, ``--turn`` steps each, in an order drawn anew each
round. A step's time is that of ``schedule`` and ``update_from_output``: what the
engine's thread does. The simulated worker between them is pure Python too, so the
publisher's thread has to fight for the interpreter lock as it never must beside a
model.

Arms: ``stock`` and ``stock_again`` (their ratio is the noise), ``silent`` (checkpoints
retained, events off), and with events: ``reader`` (a healthy subscriber),
``no_subscriber``, ``slow_subscriber`` (connects and never reads), ``killed_subscriber``
(killed while reading, again each few rounds), ``full_queue`` (8 events fit),
``port_taken`` (nothing ever leaves), ``encode_error`` (one event a step that does not
encode). After the run every arm must have told or counted each of its events::

    python benchmarks/engine_stall.py --json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_fork.config import Settings
from vllm_fork.events import Event
from vllm_fork.model_free import ModelFreeEngine, make_engine, make_request
from vllm_fork.publisher import CheckpointPublisher
from vllm_fork.scheduler import with_checkpoints

BLOCK: Final = 128
PROMPT: Final = 48
LONGEST_ANSWER: Final = 512
WARM_UP_STEPS: Final = 40
SUBSCRIBER: Final = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.rcvhwm = int(sys.argv[2])
socket.subscribe(b"")
socket.connect(sys.argv[1])
print(flush=True)
if sys.argv[3] == "stall":
    sys.stdin.readline()
    count = 0
    while socket.poll(300):
        socket.recv_multipart()
        count += 1
    print(count, flush=True)
while True:
    socket.recv_multipart()
"""


class Unencodable(Event, tag="Unencodable", kw_only=True):
    thing: object


class FaultyPublisher(CheckpointPublisher):
    """Adds an event that does not encode to every step."""

    def publish(self, events: Sequence[Event]) -> None:
        bad = Unencodable(time_unix_ns=0, monotonic_ns=0, thing=object())
        super().publish([*events, bad])


class FaultyScheduler(with_checkpoints(Scheduler)):  # type: ignore[misc]
    def _make_publisher(self, settings: Settings) -> CheckpointPublisher:
        return FaultyPublisher(settings.events, engine_id=self.engine_id)


class Arm:
    """One engine, kept at a number of running requests, and its step times (s).

    ``rounds``: wall time; ``cpu_rounds``: CPU time of the stepping thread, which other
    work on the machine does not stretch, and which a blocked step would not show in.
    """

    def __init__(
        self, name: str, cls: type[Scheduler], settings: dict[str, Any] | None
    ) -> None:
        self.name = name
        self.rounds: list[list[float]] = []
        self.cpu_rounds: list[list[float]] = []
        self._engine: ModelFreeEngine = make_engine(
            cls,
            block_size=BLOCK,
            hash_unit=16,
            num_blocks=8192,
            max_num_seqs=1024,
            settings=settings,
        )
        self._num_requests = 0
        self._random = random.Random(1)
        self._step_s = 0.0
        self._step_cpu_s = 0.0
        scheduler = self._engine.scheduler
        scheduler.schedule = self._timed(scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update_from_output = self._timed(  # type: ignore[method-assign]
            scheduler.update_from_output
        )

    @property
    def publisher(self) -> CheckpointPublisher | None:
        return getattr(self._engine.scheduler, "publisher", None)

    def turn(self, num_steps: int, num_running: int) -> None:
        times, cpu_times = [], []
        for _ in range(num_steps):
            scheduler = self._engine.scheduler
            while len(scheduler.requests) < num_running:
                self._add()
            self._step_s = self._step_cpu_s = 0.0
            self._engine.step()
            times.append(self._step_s)
            cpu_times.append(self._step_cpu_s)
        self.rounds.append(times)
        self.cpu_rounds.append(cpu_times)

    def close(self) -> None:
        self._engine.scheduler.shutdown()

    def _add(self) -> None:
        self._num_requests += 1
        draw = self._random.randrange
        prompt = [draw(8, 500) for _ in range(PROMPT)]
        # All lengths, so that the requests end one by one from the start.
        answer = [draw(8, 500) for _ in range(draw(1, LONGEST_ANSWER))]
        request = make_request(f"r{self._num_requests}", prompt)
        self._engine.add(request, [*answer, 7])

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            result = function(*args)
            self._step_cpu_s += time.thread_time() - begin_cpu
            self._step_s += time.perf_counter() - begin
            return result

        return timed


class Subscriber:
    """A process that subscribes to an arm's stream."""

    def __init__(self, endpoint: str, hwm: int, mode: str) -> None:
        self._command = [sys.executable, "-c", SUBSCRIBER, endpoint, str(hwm), mode]
        self._start()

    def kill_and_replace(self) -> None:
        self.kill()
        self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def count(self) -> int:
        """Let a stalled one read: the batches that still reach it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._read())

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def make_arms(taken: str, path: str) -> dict[str, Arm]:
    free = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    mixed = with_checkpoints(Scheduler)

    def settings(**events: Any) -> dict[str, Any]:
        return {"retain": True, "events": {**free, **events}}

    described: dict[str, tuple[type[Scheduler], dict[str, Any] | None]] = {
        "stock": (Scheduler, None),
        "stock_again": (Scheduler, None),
        "silent": (mixed, {"retain": True}),
        "reader": (mixed, settings()),
        "no_subscriber": (mixed, settings()),
        # A Unix socket's buffer is small: this one really stalls.
        "slow_subscriber": (mixed, settings(send_hwm=10, endpoint=path)),
        "killed_subscriber": (mixed, settings()),
        "full_queue": (mixed, settings(queue_size=8)),
        "port_taken": (mixed, settings(endpoint=taken, queue_size=1000)),
        "encode_error": (FaultyScheduler, settings()),
    }
    return {name: Arm(name, *what) for name, what in described.items()}


def run(seconds: float, turn: int, running: int) -> dict[str, Any]:
    """Measure for about ``seconds``."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stall-"))
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        arms = make_arms(taken, f"ipc://{folder}/events")
        for arm in arms.values():
            stack.callback(arm.close)

        def subscribe(name: str, hwm: int, mode: str) -> Subscriber:
            publisher = arms[name].publisher
            assert publisher is not None
            assert publisher.endpoint is not None
            subscriber = Subscriber(publisher.endpoint, hwm, mode)
            stack.callback(subscriber.kill)
            return subscriber

        subscribe("reader", 1000, "read")
        subscribe("encode_error", 1000, "read")
        subscribe("full_queue", 1000, "read")
        slow = subscribe("slow_subscriber", 1, "stall")
        victim = subscribe("killed_subscriber", 1000, "read")

        order = list(arms.values())
        for arm in order:  # fill up, and warm up
            arm.turn(WARM_UP_STEPS, running)
            arm.rounds.clear()
            arm.cpu_rounds.clear()
        gc.collect()
        gc.freeze()
        deadline = time.monotonic() + seconds
        shuffle = random.Random(2).shuffle
        round_number = 0
        while time.monotonic() < deadline:
            shuffle(order)
            round_number += 1
            for arm in order:
                arm.turn(turn, running)
                if arm.name == "killed_subscriber" and round_number % 3 == 0:
                    victim.kill_and_replace()
        publisher = arms["slow_subscriber"].publisher
        assert publisher is not None
        missed = publisher.stats().num_batches - slow.count()
        if missed <= 0:
            print(
                "engine_stall: the slow subscriber missed nothing, so it was never in "
                "the way: measure longer (--seconds).",
                file=sys.stderr,
            )
        for arm in arms.values():
            arm.close()
        result = report(arms)
        result["events"]["slow_subscriber"]["batches_missed"] = missed
        return result


def report(arms: dict[str, Arm]) -> dict[str, Any]:
    """Medians and p99s (µs) by arm, and ratios of medians, round by round."""

    def quantile(rounds: list[list[float]], percent: int) -> float:
        steps = [step for round_ in rounds for step in round_]
        return round(statistics.quantiles(steps, n=100)[percent - 1] * 1e6, 1)

    def ratio(rounds: list[list[float]], base: list[list[float]]) -> float:
        ratios = [
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(rounds, base, strict=True)
        ]
        return round(statistics.median(ratios), 4)

    def by_arm(measure: Callable[[Arm], float]) -> dict[str, float]:
        return {name: measure(arm) for name, arm in arms.items()}

    stock, silent = arms["stock"], arms["silent"]
    result: dict[str, Any] = {
        "median_us": by_arm(lambda arm: quantile(arm.rounds, 50)),
        "p99_us": by_arm(lambda arm: quantile(arm.rounds, 99)),
        "max_us": by_arm(lambda arm: round(max(map(max, arm.rounds)) * 1e6, 1)),
        "cpu_median_us": by_arm(lambda arm: quantile(arm.cpu_rounds, 50)),
        "cpu_p99_us": by_arm(lambda arm: quantile(arm.cpu_rounds, 99)),
        "ratio_to_stock": by_arm(lambda arm: ratio(arm.rounds, stock.rounds)),
        "ratio_to_silent": by_arm(lambda arm: ratio(arm.rounds, silent.rounds)),
        "cpu_ratio_to_stock": by_arm(
            lambda arm: ratio(arm.cpu_rounds, stock.cpu_rounds)
        ),
        "cpu_ratio_to_silent": by_arm(
            lambda arm: ratio(arm.cpu_rounds, silent.cpu_rounds)
        ),
        "steps": sum(map(len, stock.rounds)),
        "events": {},
    }
    for name, arm in arms.items():
        if arm.publisher is None:
            continue
        stats = arm.publisher.stats()
        told = stats.num_sent + stats.num_dropped + stats.num_encode_errors
        if told != stats.num_published:
            raise RuntimeError(f"{name}: {stats.num_published - told} events are lost")
        result["events"][name] = {
            "published": stats.num_published,
            "sent": stats.num_sent,
            "dropped": stats.num_dropped,
            "encode_errors": stats.num_encode_errors,
        }
    return result


def table(result: dict[str, Any]) -> str:
    """For people."""
    columns = [
        ("median_us", "median us", 1),
        ("p99_us", "p99 us", 1),
        ("max_us", "max us", 0),
        ("cpu_median_us", "cpu median us", 1),
        ("cpu_p99_us", "cpu p99 us", 1),
        ("cpu_ratio_to_stock", "cpu vs stock", 3),
        ("cpu_ratio_to_silent", "cpu vs silent", 3),
    ]
    lines = [" " * 18 + "".join(f"{title:>15}" for _, title, _ in columns)]
    lines += [
        f"{name:18}"
        + "".join(f"{result[key][name]:15.{digits}f}" for key, _, digits in columns)
        for name in result["median_us"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--turn", type=int, default=25, help="steps an arm and round")
    parser.add_argument("--running", type=int, default=64, help="running requests")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = run(options.seconds, options.turn, options.running)
    print(table(result), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
