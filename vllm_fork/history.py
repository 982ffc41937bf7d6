"""What the publisher still remembers, and its resending to readers that ask.

The replay protocol is that of vLLM's ``ZmqEventPublisher`` (a DEALER or REQ asks a
ROUTER), with an end marker that also says what the buffer holds: docs/events.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import zmq

from vllm_fork.events import END_OF_REPLAY, SEQ_BYTES, seq_to_bytes

MAX_READERS = 1_024
"""Unfinished replays that are kept; past it the one that was asked for first goes."""
REQUESTS_PER_ROUND = 64


class History:
    """The last batches, bounded in number and in payload bytes.

    Holds the batches ``[first_seq, next_seq)``.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: dict[int, bytes] = {}
        self.num_bytes = 0
        self.first_seq = 0
        self.next_seq = 0

    def append(self, payload: bytes) -> int:
        """Keep a batch and return its sequence number.

        A payload larger than the whole bound leaves the buffer empty.
        """
        seq = self.next_seq
        self._payloads[seq] = payload
        self.num_bytes += len(payload)
        self.next_seq = seq + 1
        while len(self._payloads) > self._max_batches or (
            self.num_bytes > self._max_bytes
        ):
            self.num_bytes -= len(self._payloads.pop(self.first_seq))
            self.first_seq += 1
        return seq

    def __getitem__(self, seq: int) -> bytes:
        return self._payloads[seq]


@dataclass(slots=True)
class _Reader:
    """One replay under way: ``[next_seq, end_seq)`` and then the end marker."""

    next_seq: int
    end_seq: int


class ReplayServer:
    """Answers replay requests without ever waiting for a reader.

    A reader is a position in the :class:`History`, not a copy of it: one that does
    not read costs nothing, resumes where it was, and gets its end marker whenever
    it reads on. What left the history meanwhile is a jump in the sequence it sees.
    """

    def __init__(
        self, socket: zmq.Socket, history: History, *, topic: bytes, engine_id: str
    ) -> None:
        """Serve ``history`` on the bound ROUTER ``socket``."""
        socket.router_mandatory = 1
        # Asked again under one identity after a reconnect: the new peer gets it.
        socket.router_handover = 1
        self._socket = socket
        self._history = history
        self._topic = topic
        self._engine_id = engine_id
        self._readers: dict[bytes, _Reader] = {}
        self.num_requests = 0
        self.num_bad_requests = 0
        self.num_batches_sent = 0

    @property
    def num_readers(self) -> int:
        """Replays that are unfinished."""
        return len(self._readers)

    def receive(self) -> None:
        """Accept the requests that wait.

        A second one of a reader replaces its first; one that is not understood is
        answered with the end marker alone.
        """
        for _ in range(REQUESTS_PER_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_requests += 1
            identity, start = frames[0], frames[-1]
            end_seq = self._history.next_seq
            if len(frames) != 3 or len(start) != SEQ_BYTES:
                self.num_bad_requests += 1
                next_seq = end_seq
            else:
                next_seq = min(int.from_bytes(start, "big"), end_seq)
            self._readers.pop(identity, None)
            self._readers[identity] = _Reader(next_seq, end_seq)
            if len(self._readers) > MAX_READERS:
                del self._readers[next(iter(self._readers))]

    def send(self, max_batches: int) -> bool:
        """Send at most ``max_batches``, in turns over the readers.

        Returns:
            Whether anything was sent; False: nobody asks, or nobody reads.
        """
        sent = False
        for identity in list(self._readers):
            for _ in range(max(1, max_batches // max(1, len(self._readers)))):
                if not self._send_one(identity):
                    break
                sent = True
        return sent

    def _send_one(self, identity: bytes) -> bool:
        reader = self._readers.get(identity)
        if reader is None:
            return False
        reader.next_seq = max(reader.next_seq, self._history.first_seq)
        at_end = reader.next_seq >= reader.end_seq
        body = (
            (b"", END_OF_REPLAY, self._summary())
            if at_end
            else (
                self._topic,
                seq_to_bytes(reader.next_seq),
                self._history[reader.next_seq],
            )
        )
        try:
            self._socket.send_multipart((identity, b"", *body), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # EHOSTUNREACH: the reader has gone
            del self._readers[identity]
            return False
        if at_end:
            del self._readers[identity]
        else:
            reader.next_seq += 1
            self.num_batches_sent += 1
        return True

    def _summary(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "first_buffered_seq": self._history.first_seq,
                "next_seq": self._history.next_seq,
                "engine_id": self._engine_id,
            }
        )
