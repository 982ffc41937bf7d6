"""Read an engine's event stream until a line comes on stdin; print the counts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_fork.events import DEFAULT_ENDPOINT, DEFAULT_TOPIC, BatchDecoder


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
            counts.update(
                type(e).__name__ for e in decoder.decode(payload).batch.events
            )
        elif ready:
            break
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
