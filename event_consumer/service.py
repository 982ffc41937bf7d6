"""The service: subscribers in, one writer out, on one asyncio loop.

``subscribers → intake (state machines, ledger) → store → sinks``. What a flush took
from the intake is committed before anybody is told of it; while the store does not
keep up nothing is read, and what the publishers then drop for us is recovered from
their replay buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio

from event_consumer import endpoints
from event_consumer.consumer_lock import PATIENCE_S
from event_consumer.endpoints import Endpoint, ResolverError
from event_consumer.export_marks import ExportMarks
from event_consumer.intake import NS, Intake, Taken
from event_consumer.records import (
    CheckpointRecord,
    ClosedRequest,
    EventCounter,
    RequestSink,
)
from event_consumer.settings import ConsumerSettings, SettingsError
from event_consumer.store import ChangeSet, Store, StoreError
from event_consumer.subscriber import TICK_S, Subscriber, check_addresses, curve_keys

logger = logging.getLogger(__name__)

MAX_CHANGES: Final = 100_000
"""Records that may wait for the store before reading stops."""
RETRY_S: Final = 1.0
"""Pause after the store refused a commit."""
CONFIG_POLL_S: Final = 1.0
DELETE_EVERY_S: Final = 600.0
DAY_NS: Final = 86_400 * NS
MAX_SOCKETS: Final = 65_536


class Service:
    """Consumes every endpoint of the settings into one store."""

    def __init__(
        self,
        settings: ConsumerSettings,
        store: Store,
        sinks: Sequence[RequestSink] = (),
        *,
        counter: EventCounter | None = None,
        reload: Callable[[], ConsumerSettings] | None = None,
        config: Path | None = None,
    ) -> None:
        """
        Args:
            sinks: who is told of requests that ended; never waited for.
            counter: counts the events.
            reload: reads the settings again, for the list of endpoints.
            config: the file to watch, where there is one.
        """
        self.settings = settings
        self.intake = Intake(counter=counter, tells=bool(sinks))
        self.store_error: str | None = None
        """Why the last commit failed; None when it did not."""
        self._store = store
        self._sinks = sinks
        self._reload = reload
        self._config = config
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._subscribers: dict[str, tuple[Endpoint, Subscriber, asyncio.Task[None]]]
        self._subscribers = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._wanted = settings.endpoints
        self._look_again = asyncio.Event()
        self._refused: set[str] = set()
        """Endpoints that another consumer of the store reads."""
        self._uncommitted: Taken | None = None
        self._marks = ExportMarks()
        self._committing = asyncio.Lock()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until ``stop`` is set, then commit what came.

        Raises:
            StoreError: the store could not be read at the start, or has another
                consumer of an endpoint.
            SettingsError: a CURVE key could not be read at the start.
        """
        self._stop = stop
        try:
            await self._follow(await self._expand() or [], at_start=True)
            others = [
                asyncio.create_task(work)
                for work in (
                    self._tick(),
                    self._follow_endpoints(),
                    self._watch_config(),
                    self._delete_old(),
                )
            ]
            for task in others:
                task.add_done_callback(self._ended)
            await self._flush_until(stop)
            await _cancel(others)
            if self._failure is not None:
                raise self._failure
        finally:
            await _cancel([task for _, _, task in self._subscribers.values()])
            for endpoint in self._subscribers:
                self.intake.disconnect(endpoint, time.monotonic())
            await self._drain()
            self._context.destroy(linger=0)
            self._writer.shutdown()

    def problems(self) -> list[str]:
        """What is wrong now, a sentence each; empty when all is well."""
        found = [
            f"batches [{gap.first_seq}, {gap.end_seq}) of {gap.endpoint} are missing"
            for gap in self.intake.open_gaps
        ]
        if self.store_error is not None:
            found.append(self.store_error)
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing here ends by itself. What does is a fault, and half a service is
        worse than one that is started again: what was read is committed first."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stop.set()

    # -- endpoints -----------------------------------------------------------

    def reload(self) -> None:
        """Read the list of endpoints again (SIGHUP, or the file changed)."""
        if self._reload is None:
            return
        try:
            self._wanted = self._reload().endpoints
        except SettingsError as error:
            logger.error("%s The former endpoints stay.", error)
            return
        self._look_again.set()

    async def _expand(self) -> list[Endpoint] | None:
        try:
            return await asyncio.to_thread(endpoints.expand, self._wanted)
        except ResolverError as error:
            logger.warning("%s; the former endpoints stay", error)
            return None

    async def _follow_endpoints(self) -> None:
        """Names come and go; so may the list itself."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._look_again.wait(), self.settings.dns_refresh_s
                )
            self._look_again.clear()
            found = await self._expand()
            if found is None:
                continue
            try:
                await self._follow(found)
            except (StoreError, SettingsError) as error:
                logger.error("%s", error)

    async def _follow(self, found: list[Endpoint], *, at_start: bool = False) -> None:
        """Subscribe to what is new in ``found``, leave what is not in it."""
        wanted = {each.endpoint: each for each in found}
        curve = {each.endpoint: curve_keys(each) for each in found}
        for each in found:
            check_addresses(each)
        left = False
        for name, (endpoint, _, task) in list(self._subscribers.items()):
            if wanted.get(name) == endpoint:
                del wanted[name]
                continue
            logger.info("Leaving %s.", name)
            await _cancel([task])
            del self._subscribers[name]
            self.intake.remove(name)
            left = True
        if left or wanted:
            await self._commit()
            for name in await self._hold(found, at_start):
                wanted.pop(name, None)
        if not wanted:
            return
        snapshot = await self._in_writer(self._store.load, list(wanted))
        await self._tell_again(list(wanted))
        self.intake.restore(snapshot)
        for name, endpoint in wanted.items():
            state = self.intake.add(name, endpoint.replay, self.settings.times)
            subscriber = Subscriber(
                self._context,
                endpoint,
                state,
                self.intake,
                curve=curve[name],
                gate=self._gate,
                max_frame_bytes=self.settings.max_frame_bytes,
            )
            task = asyncio.create_task(subscriber.run(), name=name)
            task.add_done_callback(self._ended)
            self._subscribers[name] = (endpoint, subscriber, task)

    async def _hold(self, found: list[Endpoint], at_start: bool) -> set[str]:
        """Take the streams of ``found``; those that another consumer of the store has
        end the start, and are left to it, and asked for again, later on."""
        patience_s = PATIENCE_S if at_start else 0.0
        names = [each.endpoint for each in found]
        refused = await self._in_writer(self._store.hold, names, patience_s)
        for name, holder in refused.items():
            sentence = (
                f"the stream {name} has a consumer already ({holder}), and the store "
                f"{self._store.name} takes one a stream: stop that one, or name "
                "another store with --store"
            )
            if at_start:
                raise StoreError(sentence)
            if name not in self._refused:
                logger.error("%s", sentence)
        self._refused = set(refused)
        return self._refused

    async def _tell_again(self, wanted: list[str]) -> None:
        """Tell the sinks what a former consumer had told them and they may not have
        exported. Ids are derived: what had been exported is the same once more."""
        found = await self._in_writer(self._store.load_marks, wanted)
        marks = {e: ns for e, ns in found.items() if e not in self._marks}
        if marks and self._sinks:
            closed = await self._in_writer(self._store.closed_since, marks)
            logger.info("Exporting %d requests again.", len(closed))
            self._marks.update(closed, {}, time.monotonic())
            self._tell(closed, [])

    async def _watch_config(self) -> None:
        if self._config is None:
            return
        seen = _fingerprint(self._config)
        while True:
            await asyncio.sleep(CONFIG_POLL_S)
            now = _fingerprint(self._config)
            if now is not None and now != seen:
                seen = now
                logger.info("%s changed.", self._config)
                self.reload()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for _, subscriber, _ in list(self._subscribers.values()):
                subscriber.tick()

    # -- store ---------------------------------------------------------------

    async def _in_writer(self, work: Callable, *args: object):  # type: ignore[no-untyped-def,type-arg]
        """Run on the writer's thread: one thing at a time touches the store."""
        return await asyncio.get_running_loop().run_in_executor(
            self._writer, work, *args
        )

    async def _flush_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            failed = False
            try:
                await self._commit()
            except StoreError:
                failed = True
            pause = RETRY_S if failed else self.settings.flush_interval_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)

    async def _commit(self) -> None:
        """Commit what came, then tell the sinks.

        Raises:
            StoreError: nothing was written; the next call tries the same again.
        """
        async with self._committing:
            if self._uncommitted is not None:
                await self._commit_taken(self._uncommitted)
            taken = self.intake.take(time.time_ns())
            if taken.changes.num_rows:
                await self._commit_taken(taken)

    async def _commit_taken(self, taken: Taken) -> None:
        self._uncommitted = taken
        try:
            await self._write(taken.changes, self._marks_with(taken.closed))
        except StoreError as error:
            if self.store_error is None:
                logger.error("%s", error)
            self.store_error = str(error)
            raise
        finally:
            self._limit()
        if self.store_error is not None:
            logger.warning("The store can be written again.")
            self.store_error = None
        self._uncommitted = None
        self._tell(taken.closed, taken.evicted)

    def _marks_with(self, closed: list[ClosedRequest]) -> dict[str, int]:
        """Since when what is told may be lost with this process."""
        untold: dict[str, int] = {}
        for sink in self._sinks:
            for engine_id, ns in sink.untold().items():
                untold[engine_id] = min(ns, untold.get(engine_id, ns))
        return self._marks.update(closed, untold, time.monotonic())

    async def _write(self, changes: ChangeSet, marks: dict[str, int]) -> None:
        if self._store.is_local:
            # Nothing to wait for but the processor; a thread would fight the loop for
            # the interpreter's lock at every row, which costs a fifth of the rate.
            self._store.commit(changes, marks)
        else:
            work = asyncio.ensure_future(
                self._in_writer(self._store.commit, changes, marks)
            )
            while not work.done():
                self._limit()
                await asyncio.wait({work}, timeout=TICK_S)
            work.result()

    def _tell(
        self, closed: list[ClosedRequest], evicted: list[CheckpointRecord]
    ) -> None:
        for sink in self._sinks:
            for each in closed:
                sink.request_closed(*each)
            for checkpoint in evicted:
                sink.checkpoint_evicted(checkpoint)

    def _limit(self) -> None:
        """Stop reading while too much waits for the store."""
        if self.intake.ledger.num_changes < MAX_CHANGES:
            self._gate.set()
        else:
            self._gate.clear()

    async def _drain(self) -> None:
        """Commit what was read; tried once, for the positions say the rest."""
        try:
            await self._commit()
        except StoreError as error:
            logger.error("%s; the next start asks for the rest again", error)

    async def _delete_old(self) -> None:
        if not self.settings.keep_days:
            return
        while True:
            cutoff = time.time_ns() - int(self.settings.keep_days * DAY_NS)
            try:
                count = await self._in_writer(self._store.delete_older_than, cutoff)
                if count:
                    logger.info("Deleted %d rows of more than keep_days ago.", count)
            except StoreError as error:
                logger.error("%s", error)
            await asyncio.sleep(DELETE_EVERY_S)


def install_signals(service: Service, stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT end the service in order, SIGHUP reads the list again."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, service.reload)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # being replaced
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
