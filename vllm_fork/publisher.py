"""Sends lifecycle events out of the engine without the engine ever waiting.

The scheduler's thread appends to a queue; one thread of our own encodes, sends,
remembers and resends. Whatever goes wrong on the way (queue full, event that does
not encode, port taken, nobody listening, somebody listening slowly) costs events,
which are counted and announced in the stream by ``EventsDropped``, and never a step.
vLLM's own ``ZmqEventPublisher.publish`` blocks on a full queue (vLLM issue 53859).

The wire is described in docs/events.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from vllm_fork import endpoints
from vllm_fork.config import EventSettings, endpoint_of_rank, load_curve_keys
from vllm_fork.event_queue import EventQueue, QueuedEvent, made
from vllm_fork.events import Event, EventBatch, EventsDropped, seq_to_bytes
from vllm_fork.history import History, ReplayServer

logger = logging.getLogger(__name__)

MAX_EVENTS_PER_BATCH: Final = 256
FLUSH_INTERVAL_S: Final = 0.05
"""Least time between two rounds of sending: under load, events of several steps
leave in one batch, and the thread takes the interpreter lock from the scheduler 20
times a second at most. The first event after a silence leaves at once."""
BIND_RETRY_S: Final = 2.0
REPLAY_RETRY_S: Final = 0.02
"""How often a replay reader that does not read is tried again."""
REPLAY_BATCHES_PER_ROUND: Final = 64
REPLAY_SEND_HWM: Final = 64
"""Batches that wait in the socket for one replay reader; the rest wait in the
history, where they cost nothing."""


@dataclass(frozen=True)
class PublisherStats:
    """Counts since the start; events unless said otherwise.

    ``num_published == num_sent + num_dropped + num_encode_errors + num_queued``
    whenever the thread is at rest.
    """

    num_published: int
    num_sent: int
    num_dropped: int
    num_encode_errors: int
    num_queued: int
    num_batches: int
    """Batches sent; also the next sequence number."""
    first_buffered_seq: int
    num_buffered_bytes: int
    num_replay_requests: int
    num_replayed_batches: int
    num_replay_readers: int
    """Replays under way."""
    error: str | None
    """Why nothing (or no replay) is going out now, in one sentence."""


class CheckpointPublisher:
    """The stream of one engine (one data-parallel rank).

    The first call of :meth:`publish` makes batch 0 and is never dropped: pass
    ``EngineStarted`` there.
    """

    def __init__(
        self,
        settings: EventSettings,
        *,
        engine_id: str,
        data_parallel_rank: int = 0,
        model_name: str = "",
    ) -> None:
        """Bind and start the thread. An endpoint that cannot be bound is reported in
        :meth:`stats` and the log and tried again, not raised."""
        self._settings = settings
        self._rank = data_parallel_rank
        self._engine_id = engine_id
        self._model_name = _utf8(model_name)
        self._label = _utf8(settings.label)
        self._topic = _utf8(settings.topic).encode()

        self._queue = EventQueue(
            settings.queue_size, drop_oldest=settings.overflow == "drop_oldest"
        )
        self._num_too_late = 0
        # Written by the sending thread alone.
        self._num_sent = 0
        self._num_encode_errors = 0
        self._num_unsent_at_close = 0
        self._num_announced = 0
        self._num_errors_announced = 0
        self._last_send = time.monotonic()
        self._next_bind = 0.0
        self._errors: dict[str, str] = {}

        self._encoder = msgspec.msgpack.Encoder()
        self._history = History(settings.buffer_batches, settings.buffer_bytes)
        self._closed = False
        self._deadline: float | None = None
        self._asleep = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._publisher: zmq.Socket | None = None
        self._replay: ReplayServer | None = None
        self._replay_socket: zmq.Socket | None = None
        self._replay_progress = False
        self.endpoint: str | None = None
        """The bound PUB endpoint, or None while it cannot be bound."""
        self.replay_endpoint: str | None = None
        self._open()
        self._thread = threading.Thread(
            target=self._run, name="checkpoint-publisher", daemon=True
        )
        self._thread.start()

    # -- the engine's side ---------------------------------------------------

    def publish(self, events: Sequence[QueuedEvent]) -> None:
        """Queue events, or what makes them, in order. Never blocks, never raises.

        To be called from one thread. The events must not change afterwards.
        """
        try:
            if self._closed:
                self._num_too_late += len(events)
                return
            self._queue.put(events)
            if self._asleep:
                self._wake()
        except Exception:
            logger.exception("Could not queue events for the checkpoint stream.")

    def shutdown(self, timeout_s: float = 1.0) -> None:
        """Send what is queued, for at most ``timeout_s`` seconds, and close.

        What cannot be sent in that time is counted as dropped. Later events are too.
        """
        if self._closed:
            return
        self._closed = True
        self._deadline = time.monotonic() + timeout_s
        self._wake()
        # The sockets get a last moment to hand over what they hold.
        self._thread.join(timeout_s + 1.0)
        if self._thread.is_alive():
            logger.warning("The checkpoint stream did not close within its time.")
            return
        os.close(self._wake_read)
        os.close(self._wake_write)

    def stats(self) -> PublisherStats:
        """The counts so far. May be called from any thread."""
        replay = self._replay
        return PublisherStats(
            num_published=self._queue.num_put + self._num_too_late,
            num_sent=self._num_sent,
            num_dropped=(
                self._queue.num_dropped + self._num_too_late + self._num_unsent_at_close
            ),
            num_encode_errors=self._num_encode_errors,
            num_queued=len(self._queue),
            num_batches=self._history.next_seq,
            first_buffered_seq=self._history.first_seq,
            num_buffered_bytes=self._history.num_bytes,
            num_replay_requests=replay.num_requests if replay else 0,
            num_replayed_batches=replay.num_batches_sent if replay else 0,
            num_replay_readers=replay.num_readers if replay else 0,
            error=" ".join(self._errors.values()) or None,
        )

    def _wake(self) -> None:
        self._asleep = False
        with contextlib.suppress(BlockingIOError):  # full: it is being woken already
            os.write(self._wake_write, b"\0")

    # -- the sending thread --------------------------------------------------

    def _run(self) -> None:
        while self._deadline is None:
            try:
                self._round()
            except Exception:
                logger.exception("The checkpoint stream stumbled; it goes on.")
                time.sleep(FLUSH_INTERVAL_S)
        try:
            self._drain(self._deadline)
        except Exception:
            logger.exception("The checkpoint stream could not be drained.")
        finally:
            self._close(self._deadline)

    def _round(self) -> None:
        is_asked = self._wait()
        if self._errors and time.monotonic() >= self._next_bind:
            self._open()
        if self._replay is not None and is_asked:
            self._replay.receive()
        self._replay_progress = self._send_replays()
        while self._deadline is None and self._send_batch():
            self._replay_progress |= self._send_replays()
        if time.monotonic() - self._last_send >= self._settings.heartbeat_s:
            self._send_heartbeat()

    def _wait(self) -> bool:
        """Sleep until there is something to do, but not less than the interval.

        Each call that lets the interpreter lock go asks the scheduler's thread to
        give it back: nothing is read that is not there.

        Returns:
            Whether somebody asks for a replay.
        """
        until_flush = self._last_send + FLUSH_INTERVAL_S - time.monotonic()
        if self._replay_progress:
            timeout = 0.0
        elif until_flush > 0:
            timeout = until_flush
        else:
            # While there is no socket to send to, nobody needs to wake us.
            self._asleep = self._publisher is not None
            # Asked after that: events may have come before they could see the flag.
            timeout = 0.0 if self._has_work() else self._idle_time()
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        if self._replay_socket is not None:
            poller.register(self._replay_socket, zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(timeout * 1000)))
        self._asleep = False
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        return self._replay_socket in ready

    def _has_work(self) -> bool:
        return self._publisher is not None and bool(self._queue or self._unannounced())

    def _unannounced(self) -> int:
        """Events lost that the stream does not tell yet; batch 0 never does."""
        if not self._history.next_seq:
            return 0
        lost = self._queue.num_dropped + self._num_encode_errors
        return lost - self._num_announced

    def _idle_time(self) -> float:
        now = time.monotonic()
        due = self._last_send + self._settings.heartbeat_s
        if self._errors:
            due = min(due, self._next_bind)
        if self._replay is not None and self._replay.num_readers:
            due = min(due, now + REPLAY_RETRY_S)
        return max(0.0, due - now)

    def _send_replays(self) -> bool:
        if self._replay is None or not self._replay.num_readers:
            return False
        return self._replay.send(REPLAY_BATCHES_PER_ROUND)

    def _send_batch(self) -> bool:
        """Send one batch of what is queued; False when nothing was."""
        if not self._has_work():
            return False
        queued = self._queue.take(MAX_EVENTS_PER_BATCH)
        news = self._announcement()
        if not queued and not news:
            return False
        try:
            events = [made(event) for event in queued]
            payload = self._encode([*news, *events])
        except Exception:
            events = [
                event for q in queued if (event := self._encodable(q)) is not None
            ]
            if not events:
                return True
            payload = self._encode([*news, *events])
        for announced in news:
            self._num_announced += announced.count
            self._num_errors_announced += announced.num_encode_errors
        # Remembered first: what fails to leave now can still be asked for.
        seq = self._history.append(payload)
        self._num_sent += len(events)
        self._send(seq, payload)
        return True

    def _announcement(self) -> list[EventsDropped]:
        count = self._unannounced()
        if not count:
            return []
        return [
            EventsDropped(
                time_unix_ns=time.time_ns(),
                monotonic_ns=time.monotonic_ns(),
                count=count,
                num_encode_errors=self._num_encode_errors - self._num_errors_announced,
            )
        ]

    def _encodable(self, queued: QueuedEvent) -> Event | None:
        """The event, if it can be made and sent; else None, and it is counted."""
        name = "event"
        try:
            event = made(queued)
            name = type(event).__name__
            self._encoder.encode(event)
            return event
        except Exception as error:
            if not self._num_encode_errors:
                logger.warning(
                    "A %s did not encode and was left out of the checkpoint stream "
                    "(further ones are only counted): %s",
                    name,
                    error,
                )
            self._num_encode_errors += 1
            return None

    def _encode(self, events: Sequence[Event], *, heartbeat: bool = False) -> bytes:
        return self._encoder.encode(
            EventBatch(
                ts=time.time(),
                events=list(events),
                data_parallel_rank=self._rank,
                engine_id=self._engine_id,
                label=self._label,
                model_name=self._model_name,
                heartbeat=heartbeat,
            )
        )

    def _send_heartbeat(self) -> None:
        """Repeat the last sequence number, so that its loss can be seen."""
        self._last_send = time.monotonic()
        last_seq = self._history.next_seq - 1
        if self._publisher is not None and last_seq >= 0:
            self._send(last_seq, self._encode((), heartbeat=True))

    def _send(self, seq: int, payload: bytes) -> None:
        assert self._publisher is not None
        self._last_send = time.monotonic()
        # A PUB socket never blocks: a subscriber that is too slow misses the batch.
        self._publisher.send_multipart((self._topic, seq_to_bytes(seq), payload))

    # -- sockets -------------------------------------------------------------

    def _open(self) -> None:
        """Bind what is not bound yet."""
        self._next_bind = time.monotonic() + BIND_RETRY_S
        before, self._errors = self._errors, {}
        if self._publisher is None:
            self._publisher, self.endpoint = self._bind(
                zmq.PUB, self._settings.endpoint, self._settings.send_hwm
            )
        if self._replay is None and self._settings.replay_endpoint is not None:
            self._replay_socket, self.replay_endpoint = self._bind(
                zmq.ROUTER, self._settings.replay_endpoint, REPLAY_SEND_HWM
            )
            if self._replay_socket is not None:
                self._replay = ReplayServer(
                    self._replay_socket,
                    self._history,
                    topic=self._topic,
                    engine_id=self._engine_id,
                )
        for endpoint, error in self._errors.items():
            if endpoint not in before:
                logger.warning("The checkpoint stream waits for an endpoint: %s", error)
        if before and not self._errors:
            logger.info("The checkpoint stream has its endpoints now.")

    def _bind(
        self, kind: int, endpoint: str, hwm: int
    ) -> tuple[zmq.Socket | None, str | None]:
        endpoint = endpoint_of_rank(endpoint, self._rank)
        socket = self._context.socket(kind)
        try:
            socket.sndhwm = hwm
            socket.linger = 0
            # A peer that vanished without a word must not stay a reader for ever.
            socket.heartbeat_ivl = 10_000
            socket.heartbeat_timeout = 30_000
            self._secure(socket)
            return socket, endpoints.bind(socket, endpoint)
        except Exception as error:
            socket.close()
            self._errors[endpoint] = str(error)
            return None, None

    def _secure(self, socket: zmq.Socket) -> None:
        """Encrypt, and admit the clients whose keys are known, if asked for."""
        key_file = self._settings.curve_secret_key_file
        if key_file is None:
            return
        public, secret = load_curve_keys(key_file)
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve(
                domain="*",
                location=self._settings.curve_client_keys_dir
                or zmq.auth.CURVE_ALLOW_ANY,
            )
        socket.curve_server = True
        socket.curve_publickey = public
        socket.curve_secretkey = secret

    def _drain(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            sent = self._send_batch()
            if self._replay is not None:
                self._replay.receive()
            if not self._send_replays() and not sent:
                return

    def _close(self, deadline: float) -> None:
        while events := self._queue.take(MAX_EVENTS_PER_BATCH):
            self._num_unsent_at_close += len(events)
        if self._num_unsent_at_close:
            logger.warning(
                "The checkpoint stream closed with %d events unsent.",
                self._num_unsent_at_close,
            )
        if self._authenticator is not None:
            self._authenticator.stop()
        # Slow readers get the rest of the time to take what is in their sockets.
        linger_s = max(0.0, deadline - time.monotonic())
        self._context.destroy(linger=int(linger_s * 1000))


def _utf8(text: str) -> str:
    """``text`` with what UTF-8 cannot say replaced: a header must always encode."""
    return text.encode(errors="replace").decode()
