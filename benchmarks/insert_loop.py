"""The least that can be done with a stream: receive, decode, insert.

The rows are those that a consumer made of the same stream, ready as tuples; they are
inserted into the same tables in step with what is received. No order, no state, no
positions, nothing recovered.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import time

import zmq
from sqlalchemy import create_engine

from event_consumer import tables
from vllm_fork.events import DEFAULT_TOPIC, BatchDecoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("rows_from", help="SQLite file that holds the rows")
    parser.add_argument("into", help="SQLite file to make")
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--commit-s", type=float, default=0.2)
    args = parser.parse_args()

    source = sqlite3.connect(args.rows_from)
    rows = {
        table.name: source.execute(f"SELECT * FROM {table.name}").fetchall()
        for table in (tables.requests, tables.checkpoints)
    }
    tables.metadata.create_all(create_engine(f"sqlite:///{args.into}"))
    store = sqlite3.connect(args.into)
    store.execute("PRAGMA journal_mode=WAL")
    store.execute("PRAGMA synchronous=NORMAL")
    decoder = BatchDecoder()
    socket = zmq.Context().socket(zmq.SUB)
    socket.rcvhwm = 4_096
    socket.subscribe(DEFAULT_TOPIC)
    socket.connect(args.endpoint)
    print(json.dumps({"ready": True}), flush=True)

    num_frames = num_events = 0
    done = dict.fromkeys(rows, 0)
    committed = time.monotonic()
    while num_frames < args.frames:
        decoded = decoder.decode(socket.recv_multipart()[2])
        if decoded.batch.heartbeat:
            continue
        num_frames += 1
        num_events += len(decoded.events)
        now = time.monotonic()
        if now - committed >= args.commit_s or num_frames == args.frames:
            committed = now
            for name, all_rows in rows.items():
                end = len(all_rows) * num_frames // args.frames
                part = all_rows[done[name] : end]
                if part:
                    marks = ",".join("?" * len(part[0]))
                    store.executemany(f"INSERT INTO {name} VALUES ({marks})", part)
                done[name] = end
            store.commit()
    print(json.dumps({"events": num_events, "at": time.time()}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
