"""How fast a stream gets into the store, and from there into traces.

Three figures, each of the real service on one core (the publisher has another):

- ``events_per_s``: lifecycle events, 16 a frame, from the first frame sent until
  the last one's effects are committed to SQLite;
- ``insert_loop_per_s``: the same stream through a loop that receives, decodes and
  inserts the same rows, with nothing else (insert_loop.py), in turns with it;
- ``spans_per_s``: in a run of its own, spans that reached a local OTLP receiver.

``lost`` and ``duplicated`` are events; the rows are compared with those of a ledger
that read the stream in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from lifecycles import Lifecycles, batches
from sqlalchemy import select

from event_consumer import tables
from event_consumer.ledger import Ledger
from event_consumer.store import Store, StoreError
from vllm_fork.events import EventBatch

HERE = Path(__file__).parent
PATIENCE_S = 60
RECEIVER = ("-m", "event_consumer.otlp_receiver", "--count-only")


class Process:
    """A child on one core that speaks lines of JSON."""

    def __init__(self, core: int, *command: str, **environ: str) -> None:
        cores = os.sched_getaffinity(0)
        chosen = {sorted(cores)[core % len(cores)]}
        self.popen = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
            preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.terminate()
        self.popen.wait(PATIENCE_S)

    def line(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--span-events", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.events, args.span_events, args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value:,.0f}")


def measure(
    folder: Path, num_events: int, num_span_events: int, num_rounds: int
) -> dict[str, float]:
    ingest: list[float] = []
    insert: list[float] = []
    lost = duplicated = 0
    for number in range(num_rounds):
        path = folder / f"store-{number}.db"
        with Process(1, *feeder(num_events)) as feed:
            rate, stream = run_consumer(feed, path, num_events)
            ingest.append(rate)
        lost += max(0, num_events - stream["num_events"]) + stream["num_lost"]
        duplicated += max(0, stream["num_events"] - num_events)
        with Process(1, *feeder(num_events)) as feed:
            insert.append(
                run_loop(feed, path, folder / f"loop-{number}.db", num_events)
            )
        say(f"round {number}: {ingest[-1]:,.0f} events/s, loop {insert[-1]:,.0f}")
    compare(path, num_events)
    with (
        Process(1, *RECEIVER) as receiver,
        Process(1, *feeder(num_span_events)) as feed,
    ):
        spans = run_spans(feed, folder / "spans.db", num_span_events, receiver)
    return {
        "events_per_s": statistics.median(ingest),
        "insert_loop_per_s": statistics.median(insert),
        "spans_per_s": spans,
        "lost": lost,
        "duplicated": duplicated,
    }


def feeder(num_events: int) -> list[str]:
    return [str(HERE / "frame_feeder.py"), "--events", str(num_events)]


def consumer(core: int, feed: dict[str, Any], path: Path, *more: str) -> Process:
    return Process(
        core,
        *("-m", "event_consumer.cli", "run", "--store", f"sqlite:///{path}"),
        *("--endpoint", feed["endpoint"], "--replay", feed["replay"]),
        *("--http", "off", "--log-level", "warning", *more),
    )


def run_consumer(
    feed: Process, path: Path, num_events: int
) -> tuple[float, dict[str, Any]]:
    bound = feed.line()
    with consumer(0, bound, path) as process:
        wait(lambda: stream_of(path).get("state") == "live")
        cpu = process.cpu_s()
        feed.go()
        started = feed.line()["started"]
        last = bound["frames"] - 1
        wait(lambda: stream_of(path)["applied_seq"] >= last)
        seconds = time.time() - started
        cpu = process.cpu_s() - cpu
    say(f"  {num_events / cpu:,.0f} events a second of CPU")
    return num_events / seconds, stream_of(path)


def run_loop(feed: Process, rows_from: Path, into: Path, num_events: int) -> float:
    bound = feed.line()
    script = [
        str(HERE / "insert_loop.py"),
        bound["endpoint"],
        str(rows_from),
        str(into),
    ]
    with Process(0, *script, "--frames", str(bound["frames"])) as loop:
        loop.line()
        time.sleep(0.5)  # a subscription has no acknowledgement
        cpu = loop.cpu_s()
        feed.go()
        started = feed.line()["started"]
        ended = loop.line()["at"]
        cpu = loop.cpu_s() - cpu
    say(f"  loop: {num_events / cpu:,.0f} events a second of CPU")
    return num_events / (ended - started)


def run_spans(feed: Process, path: Path, num_events: int, receiver: Process) -> float:
    bound, urls = feed.line(), receiver.line()
    expected = num_spans(num_events)

    def num_received() -> int:
        with urlopen(urls["received_url"]) as answer:
            return json.load(answer)["traces"]

    with consumer(0, bound, path, "--otlp", urls["grpc_url"]):
        wait(lambda: stream_of(path).get("state") == "live")
        feed.go()
        started = feed.line()["started"]
        wait(lambda: num_received() >= expected)
        seconds = time.time() - started
    say(f"{expected:,} spans of {num_events:,} events in {seconds:.1f} s")
    return expected / seconds


def read_here(num_events: int) -> Ledger:
    """A ledger that read the same stream in this process."""
    lives = Lifecycles(seed=0, cache=20_000)
    ledger = Ledger()
    for seq, batch in enumerate(batches(lives, num_events, 16)):
        sent = EventBatch(0.0, batch, 0, engine_id=lives.engine_id())
        ledger.apply("", seq, sent, batch)
    return ledger


def num_spans(num_events: int) -> int:
    """One a request that ended, one a checkpoint of it."""
    closed = read_here(num_events).take_closed()
    return sum(1 + len(each.checkpoints) for each in closed)


def compare(path: Path, num_events: int) -> None:
    """Refuse to report figures of a store that is not right."""
    _, requests, checkpoints, _ = read_here(num_events).take_changes()
    expected = {
        **{request.request_id: request.status for request in requests},
        **{str(each.checkpoint_id): each.stage for each in checkpoints},
    }
    with Store(f"sqlite:///{path}", read_only=True) as store, store.reading() as db:
        r, c = tables.requests.c, tables.checkpoints.c
        found: dict[str, str] = {
            str(name): state
            for columns in ((r.request_id, r.status), (c.checkpoint_id, c.stage))
            for name, state in db.execute(select(*columns))
        }
    if found != expected:
        sys.exit("The store does not hold what the stream said.")
    say(f"{len(found):,} rows are right")


def stream_of(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        with Store(f"sqlite:///{path}", read_only=True) as store, store.reading() as db:
            rows = db.execute(select(tables.streams)).mappings().all()
    except StoreError:  # not made yet
        return {}
    return dict(rows[0]) if rows else {}


def wait(until: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        if time.monotonic() > deadline:
            sys.exit("The consumer did not come to an end.")
        time.sleep(0.02)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
