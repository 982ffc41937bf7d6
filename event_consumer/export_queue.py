"""A bounded queue before a collector: never blocks who submits, counts what it drops.

OpenTelemetry's own ``BatchProcessor`` gives a batch up after ten seconds of an
absent collector and does not say how many items that cost (unless its internal
metrics are switched on by an environment variable). Here a batch is tried until
the collector takes it or refuses it for good; what bounds the memory is the queue,
which gives up its *oldest* items first; and every item ends in exactly one count of
:class:`ExportStats`.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from event_consumer.otlp import RetryableError, Signal, Transport

Item = TypeVar("Item")

logger = logging.getLogger(__name__)

# Why items were dropped: OpenTelemetry's ``error.type`` of a processor or exporter.
QUEUE_FULL: Final = "queue_full"
REJECTED: Final = "rejected"
SHUTDOWN: Final = "shutdown"
ENCODING: Final = "encoding"

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 15.0
MAX_DELAY_S: Final = 0.5
"""An item waits at most that long for company."""
MAX_BATCH: Final = 512
JOIN_S: Final = 0.5
"""How long a shutdown waits for a call under way, past its own time-out."""


@dataclass
class ExportStats:
    """Counts of one signal, in spans or log records. ``exported`` and ``dropped``
    (by reason) only rise; ``queued`` is what waits now, the batch under way
    included; ``retries`` counts calls that failed and were tried again."""

    signal: Signal
    exported: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    queued: int = 0
    retries: int = 0
    last_error: str | None = None

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


class ExportQueue(Generic[Item]):
    """One signal's queue and the thread that empties it.

    ``encode`` turns items into one export request and says how many spans or log
    records are in it; it runs on the queue's thread. ``max_queued`` bounds the sum
    of the items' weights; an item is dropped whole, so a trace is never torn here.
    """

    def __init__(
        self,
        signal: Signal,
        transport: Transport,
        encode: Callable[[Sequence[Item]], tuple[Message, int]],
        *,
        max_queued: int,
        timeout_s: float = 10.0,
    ) -> None:
        self._signal: Signal = signal
        self._transport = transport
        self._encode = encode
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._items: deque[tuple[Item, int]] = deque()
        self._under_way: list[tuple[Item, int]] = []
        self._stats = ExportStats(signal)
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        """Guards all of the above; notified when the thread has something to do."""
        self._done = threading.Condition(lock)
        """Notified when less is queued."""
        self._flushing = False
        self._stopping = False
        self._closed = False
        self._abandoned = threading.Event()
        self._reachable = True
        self._thread = threading.Thread(
            target=self._run, name=f"otlp-{signal}", daemon=True
        )
        self._thread.start()

    def submit(self, item: Item, weight: int) -> None:
        """Queue an item of ``weight`` spans or log records. Never blocks or raises:
        when the queue is full the oldest items make room, and are counted."""
        with self._work:
            if self._stopping:
                self._drop(SHUTDOWN, weight)
                return
            self._items.append((item, weight))
            self._stats.queued += weight
            while self._stats.queued > self._max_queued and self._items:
                _, oldest = self._items.popleft()
                self._stats.queued -= oldest
                self._drop(QUEUE_FULL, oldest)
            if len(self._items) == 1 or self._stats.queued >= MAX_BATCH:
                self._work.notify()

    def stats(self) -> ExportStats:
        """A copy of the counts as they are now."""
        with self._work:
            return replace(self._stats, dropped=dict(self._stats.dropped))

    def unsettled(self) -> list[Item]:
        """The items that were neither exported nor dropped; after a shutdown those
        that it left."""
        with self._work:
            return [item for item, _ in (*self._under_way, *self._items)]

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued without waiting for company; whether all of it was
        sent or dropped within ``timeout_s`` seconds."""
        with self._work:
            self._flushing = True
            self._work.notify()
            empty = self._done.wait_for(lambda: not self._stats.queued, timeout_s)
            self._flushing = False
            return empty

    def shutdown(self, timeout_s: float) -> None:
        """Flush within ``timeout_s`` seconds; what is left then is dropped and
        counted. Later submissions are dropped. The transport is the caller's to
        close, afterwards: that ends a call which still hangs."""
        with self._work:
            self._stopping = True
        self.flush(timeout_s)
        self._abandoned.set()
        with self._work:
            self._work.notify()
        self._thread.join(JOIN_S)
        with self._work:
            self._closed = True
            self._drop(SHUTDOWN, self._stats.queued)
            self._stats.queued = 0

    def _drop(self, reason: str, count: int) -> None:
        if count:
            dropped = self._stats.dropped
            dropped[reason] = dropped.get(reason, 0) + count

    # On the queue's own thread.

    def _run(self) -> None:
        while not self._abandoned.is_set():
            if batch := self._next_batch():
                self._export(batch)
                with self._work:
                    if not self._abandoned.is_set():
                        self._under_way = []

    def _next_batch(self) -> list[tuple[Item, int]]:
        """Wait for a full batch, or for :data:`MAX_DELAY_S` after the first item.
        Empty at the end, or where a full queue has dropped what there was."""
        with self._work:
            self._work.wait_for(lambda: self._items or self._abandoned.is_set())
            self._work.wait_for(self._is_due, MAX_DELAY_S)
            batch: list[tuple[Item, int]] = []
            weight = 0
            while self._items and weight < MAX_BATCH and not self._abandoned.is_set():
                batch.append(self._items.popleft())
                weight += batch[-1][1]
            self._under_way = batch
            return batch

    def _is_due(self) -> bool:
        full = self._stats.queued >= MAX_BATCH
        return full or self._flushing or self._abandoned.is_set()

    def _export(self, batch: list[tuple[Item, int]]) -> None:
        weight = sum(w for _, w in batch)
        try:
            message, count = self._encode([item for item, _ in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them must not cost the others
                for each in batch:
                    self._export([each])
                return
            logger.exception("One item of our %s cannot be encoded", self._signal)
            self._finish(weight, exported=0, lost={ENCODING: weight}, error=str(error))
            return
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                rejected = self._transport.send(self._signal, message, self._timeout_s)
            except RetryableError as error:
                self._note_failure(error)
                pause_s = error.after_s or backoff_s * random.uniform(0.8, 1.2)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                if not self._rest(pause_s):
                    return  # shutdown() counts what is still queued
            except Exception as error:
                # Not only RejectedError: whatever a transport raises, the thread
                # must live to send what comes next.
                self._note_failure(error)
                self._finish(weight, 0, {REJECTED: count}, str(error))
                return
            else:
                self._note_success()
                self._finish(weight, count - rejected, {REJECTED: rejected})
                return

    def _rest(self, pause_s: float) -> bool:
        """Wait before the next try; False when the queue is given up meanwhile."""
        with self._work:
            self._stats.retries += 1
        return not self._abandoned.wait(pause_s)

    def _finish(
        self,
        weight: int,
        exported: int,
        lost: dict[str, int],
        error: str | None = None,
    ) -> None:
        with self._work:
            if self._closed:
                return  # shutdown() has counted this batch as dropped
            self._stats.queued -= weight
            self._stats.exported += exported
            for reason, count in lost.items():
                self._drop(reason, count)
            self._stats.last_error = error or self._stats.last_error
            self._done.notify_all()

    def _note_failure(self, error: Exception) -> None:
        """Warn when the collector becomes unreachable or starts to refuse; once."""
        with self._work:
            self._stats.last_error = str(error)
        if self._reachable:
            self._reachable = False
            outcome = (
                "kept and tried again"
                if isinstance(error, RetryableError)
                else "dropped"
            )
            logger.warning(
                "The collector does not take our %s (%s); they are %s.",
                self._signal,
                error,
                outcome,
            )

    def _note_success(self) -> None:
        if not self._reachable:
            self._reachable = True
            logger.info("The collector takes our %s again.", self._signal)
