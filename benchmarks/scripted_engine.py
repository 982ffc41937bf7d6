"""A process that publishes scripted lives (:mod:`lifecycles`) as an engine would:
through the real ``CheckpointPublisher``.

Prints one line of JSON once it is bound, ``{"endpoint", "replay", "engine_id"}``,
and one at the end, ``{"events": N}``; stays up until a line comes on stdin (or it
closes), so that its replay buffer can still be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from lifecycles import Lifecycles, batches

from vllm_fork.config import EventSettings
from vllm_fork.publisher import CheckpointPublisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:*")
    parser.add_argument("--replay", default="tcp://127.0.0.1:*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0, help="events/s; 0: no pause")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--label", default="scripted")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--buffer-batches", type=int, default=1_000_000)
    parser.add_argument("--hold-at", type=int, help="batch after which to wait, too")
    parser.add_argument("--wait-start", action="store_true", help="for a line on stdin")
    args = parser.parse_args()

    lives = Lifecycles(seed=args.seed, concurrency=args.concurrency)
    publisher = CheckpointPublisher(
        EventSettings(
            enabled=True,
            endpoint=args.endpoint,
            replay_endpoint=args.replay,
            label=args.label,
            heartbeat_s=0.2,
            buffer_batches=args.buffer_batches,
            buffer_bytes=1 << 30,
            queue_size=10_000_000,
        ),
        engine_id=lives.engine_id(),
        data_parallel_rank=args.rank,
        model_name="scripted",
    )
    if publisher.endpoint is None or publisher.replay_endpoint is None:
        sys.exit(publisher.stats().error)
    say(
        endpoint=publisher.endpoint,
        replay=publisher.replay_endpoint,
        engine_id=lives.engine_id(),
    )
    if args.wait_start:
        sys.stdin.readline()
    begin = time.monotonic()
    count = 0
    for number, batch in enumerate(batches(lives, args.events, args.batch)):
        if number == args.hold_at:
            say(events=count)
            sys.stdin.readline()
        publisher.publish(batch)
        count += len(batch)
        if args.rate:
            time.sleep(max(0.0, begin + count / args.rate - time.monotonic()))
    say(events=count)
    sys.stdin.readline()
    publisher.shutdown()


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
