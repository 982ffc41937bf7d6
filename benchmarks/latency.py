"""How long an event takes until a query sees it, at a steady rate.

From the moment the publisher sends a batch until a reader of the store finds its
effects: the position of a stream is committed with them, so a reader that sees the
position sees the rows. The reader asks every ``--poll-s``, which is part of the
figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from frame_feeder import write_stream
from ingest import Process, consumer, feeder, say, stream_of, wait

from event_consumer.queries import Filter, find_requests
from event_consumer.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2_000, help="events a second")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--poll-s", type=float, default=0.01)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        delays = measure(path, args.rate, args.seconds, args.poll_s)
    result = {
        "p50_s": statistics.median(delays),
        "p99_s": statistics.quantiles(delays, n=100)[98],
        "rate": args.rate,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(" ".join(f"{name} {value:.3f}" for name, value in result.items()))


def measure(path: Path, rate: float, seconds: float, poll_s: float) -> list[float]:
    """Seconds from sent to seen, of each batch."""
    events = path.with_name("events")
    write_stream(events, int(rate * seconds))
    command = [*feeder(events), "--rate", str(rate)]
    with Process(1, *command) as feed:
        bound = feed.line()
        with consumer(0, bound, path):
            wait(lambda: stream_of(path).get("state") == "live")
            feed.go()
            feed.line()
            seen = watch(path, bound["frames"], poll_s)
            sent = feed.line()["times"]
    say(f"{len(seen)} batches, the last sent after {sent[-1] - sent[0]:.1f} s")
    return [later - sooner for sooner, later in zip(sent, seen, strict=True)]


def watch(path: Path, num_frames: int, poll_s: float) -> list[float]:
    """When each batch was first seen."""
    seen: list[float] = []
    with Store(f"sqlite:///{path}", read_only=True) as store:
        while len(seen) < num_frames:
            applied = stream_of(path)["applied_seq"]
            find_requests(store, Filter(limit=10))
            seen += [time.time()] * (applied + 1 - len(seen))
            time.sleep(poll_s)
    return seen


if __name__ == "__main__":
    main()
