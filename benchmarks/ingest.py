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

from frame_feeder import Stream, write_stream
from sqlalchemy import select

from event_consumer import tables
from event_consumer.ledger import Ledger
from event_consumer.store import Store, StoreError
from vllm_fork.events import BatchDecoder

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
    parser.add_argument("--events", type=int, default=300_000)
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
    events = folder / "events"
    stream = write_stream(events, num_events)
    say(f"{num_events:,} events in {len(stream.payloads):,} frames")
    ingest: list[float] = []
    insert: list[float] = []
    lost = duplicated = 0
    for number in range(num_rounds):
        path = folder / f"store-{number}.db"
        with Process(1, *feeder(events)) as feed:
            rate, found = run_consumer(feed, path, num_events)
            ingest.append(rate)
        lost += max(0, num_events - found["num_events"]) + found["num_lost"]
        duplicated += max(0, found["num_events"] - num_events)
        with Process(1, *feeder(events)) as feed:
            insert.append(
                run_loop(feed, path, folder / f"loop-{number}.db", num_events)
            )
        say(f"round {number}: {ingest[-1]:,.0f} events/s, loop {insert[-1]:,.0f}")
    compare(path, stream)
    with (
        Process(1, *RECEIVER) as receiver,
        Process(1, *feeder(events, num_span_events)) as feed,
    ):
        spans = run_spans(feed, folder / "spans.db", stream, receiver)
    return {
        "events_per_s": statistics.median(ingest),
        "insert_loop_per_s": statistics.median(insert),
        "spans_per_s": spans,
        "lost": lost,
        "duplicated": duplicated,
    }


def feeder(events: Path, at_most: int | None = None) -> list[str]:
    command = [str(HERE / "frame_feeder.py"), str(events)]
    return command if at_most is None else [*command, "--events", str(at_most)]


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


def run_spans(feed: Process, path: Path, stream: Stream, receiver: Process) -> float:
    bound, urls = feed.line(), receiver.line()
    expected = num_spans(stream, bound["frames"])

    def num_received() -> int:
        with urlopen(urls["received_url"]) as answer:
            return json.load(answer)["traces"]

    with consumer(0, bound, path, "--otlp", urls["grpc_url"]):
        wait(lambda: stream_of(path).get("state") == "live")
        feed.go()
        started = feed.line()["started"]
        wait(lambda: num_received() >= expected)
        seconds = time.time() - started
    say(f"{expected:,} spans in {seconds:.1f} s")
    return expected / seconds


def read_here(stream: Stream, num_frames: int | None = None) -> Ledger:
    """A ledger that read the same stream in this process."""
    ledger, decoder = Ledger(), BatchDecoder()
    for seq, payload in enumerate(stream.payloads[:num_frames]):
        decoded = decoder.decode(payload)
        ledger.apply("", seq, decoded.batch, decoded.events)
    return ledger


def num_spans(stream: Stream, num_frames: int) -> int:
    """One a request that ended, one a checkpoint of it."""
    closed = read_here(stream, num_frames).take_closed()
    return sum(1 + len(each.checkpoints) for each in closed)


def compare(path: Path, stream: Stream) -> None:
    """Refuse to report figures of a store that is not right."""
    _, requests, checkpoints, _ = read_here(stream).take_changes()
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
