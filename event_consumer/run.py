"""Puts the service together: store, export, status server, signals."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from event_consumer.consumer_lock import holder
from event_consumer.http_status import StatusServer
from event_consumer.metrics import CheckpointMetrics, StreamHealth
from event_consumer.otlp import OtlpSettings, OtlpSettingsError, Signal
from event_consumer.service import Service, install_signals
from event_consumer.settings import ConsumerSettings, SettingsError
from event_consumer.store import ChangeSet, Store, StoreError, has_a_consumer
from event_consumer.store_url import StoreUrlError, parse_store_url
from event_consumer.tracing import RequestTracer, TraceSettings

logger = logging.getLogger(__name__)

EXPORT_DRAIN_S: Final = 5.0
"""How long the end waits for a collector."""


async def serve(
    settings: ConsumerSettings,
    *,
    reload: Callable[[], ConsumerSettings] | None = None,
    config: Path | None = None,
) -> None:
    """Run the service until it is told to stop.

    Raises:
        SettingsError: a setting cannot be used.
        StoreError: the store, or the address of the status server, cannot be had.
    """
    traces, logs, metrics_to = _otlp(settings)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        # Before the store: where the address is taken, nothing is made.
        status = await _bind_status(stack, settings)
        store = stack.enter_context(Store(settings.store))
        service: Service | None = None

        def streams() -> list[StreamHealth]:
            found = service.intake.stream_health() if service else []
            return [StreamHealth(*each) for each in found]

        tracer = None
        if traces is not None or logs is not None:
            tracer = RequestTracer(traces, _trace_settings(settings, logs), logs=logs)
            # After the tracer's end: what it left is told by the next consumer.
            stack.callback(_note_untold, store, tracer)
            stack.push_async_callback(_in_thread, tracer.shutdown, EXPORT_DRAIN_S)
        metrics = CheckpointMetrics(
            metrics_to,
            streams=streams,
            exports=tracer.stats if tracer else tuple,
        )
        stack.push_async_callback(_in_thread, metrics.shutdown, EXPORT_DRAIN_S)
        service = Service(
            settings,
            store,
            [tracer] if tracer else [],
            counter=metrics,
            reload=reload,
            config=config,
        )
        if status is not None:
            server, url = status
            with _cannot_listen(settings):
                await server.serve(service.problems, metrics.prometheus)
            stack.push_async_callback(server.stop)  # before the metrics' end
            logger.info("Status on %s/healthz and /metrics.", url)
        install_signals(service, stop)
        logger.info(
            "Reading %d endpoint(s) into %s.", len(settings.endpoints), store.name
        )
        await service.run(stop)
        logger.info("Stopped in order.")


def _note_untold(store: Store, tracer: RequestTracer) -> None:
    try:
        store.commit(ChangeSet.of(), tracer.untold())
    except StoreError as error:
        logger.error("%s; some requests may be exported again", error)


async def _bind_status(
    stack: AsyncExitStack, settings: ConsumerSettings
) -> tuple[StatusServer, str] | None:
    """Take the address of the status server, and tell its URL; None where there is to
    be none."""
    address = settings.http_address()
    if address is None:
        return None
    server = StatusServer()
    host, port = address
    try:
        with _cannot_listen(settings):
            port = await server.bind(host, port)
    except StoreError:
        _refuse_second(settings.store)  # which another port would not help
        raise
    stack.push_async_callback(server.stop)
    return server, f"http://{host}:{port}"


def _refuse_second(store: str) -> None:
    """Where the address is taken by another consumer of the same SQLite file."""
    with suppress(StoreUrlError):
        _, name, path, _ = parse_store_url(store)
        if path is not None and (found := holder(path)) is not None:
            raise StoreError(has_a_consumer(name, found)) from None


@contextmanager
def _cannot_listen(settings: ConsumerSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the status server cannot listen on {settings.http} "
            f"({error.strerror or error}): choose another --http HOST:PORT, or off"
        ) from None


def _otlp(settings: ConsumerSettings) -> list[OtlpSettings | None]:
    """Where traces, logs and metrics go; None: nowhere."""
    wanted: dict[Signal, bool] = {
        "traces": True,
        "logs": settings.otlp_logs,
        "metrics": settings.otlp_metrics,
    }
    try:
        return [
            OtlpSettings.from_environ(
                os.environ, settings.otlp, settings.otlp_protocol, signal=signal
            )
            if is_wanted
            else None
            for signal, is_wanted in wanted.items()
        ]
    except OtlpSettingsError as error:
        raise SettingsError(str(error)) from None


def _trace_settings(
    settings: ConsumerSettings, logs: OtlpSettings | None
) -> TraceSettings:
    return TraceSettings(
        sample_ratio=settings.trace_sample_ratio,
        log_records=logs is not None,
        span_events=settings.trace_span_events,
    )


async def _in_thread(work: Callable[[float], object], timeout_s: float) -> None:
    await asyncio.to_thread(work, timeout_s)
