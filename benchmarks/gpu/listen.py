"""Read an engine's event stream in another process; count what came.

``python benchmarks/gpu/listen.py`` reads until a line comes on stdin, then prints the
counts; :func:`counted_events` runs it beside an engine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_fork.events import (
    DEFAULT_ENDPOINT,
    DEFAULT_TOPIC,
    BatchDecoder,
    Event,
    PrefixReused,
)


@contextlib.contextmanager
def counted_events() -> Iterator[dict[str, int]]:
    """Another process that reads the events; fills in how many of each it got."""
    process = subprocess.Popen(
        [sys.executable, __file__],
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


def main() -> None:
    decoder = BatchDecoder()
    counts: Counter[str] = Counter()
    socket = zmq.Context().socket(zmq.SUB)
    socket.connect(DEFAULT_ENDPOINT)
    socket.subscribe(DEFAULT_TOPIC)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if socket in ready:
            _, _, payload = socket.recv_multipart()
            counts.update(map(_name, decoder.decode(payload).batch.events))
        elif ready:
            break
    print(json.dumps(counts))


def _name(event: Event) -> str:
    name = type(event).__name__
    if isinstance(event, PrefixReused):
        resumed = " by a resumed request" if event.resumed else ""
        return f"{name}: {event.source_kind}{resumed}"
    return name


if __name__ == "__main__":
    main()
