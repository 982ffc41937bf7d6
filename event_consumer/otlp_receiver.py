"""An OTLP receiver in this process: gRPC and HTTP, all three signals.

The receiver that demo, tests and benchmarks use in place of a collector. It is
made of the generated servicers of opentelemetry-proto, so what it accepts is what
a collector accepts; it keeps what came, readable as plain values::

    with OtlpReceiver() as receiver:
        tracer = RequestTracer(OtlpSettings(receiver.grpc_url))
        ...
        receiver.wait_for(lambda: receiver.spans("kv_cache.request"))

It can also be told to fail, to be slow, or only to count (``keep=False``: a
benchmark's receiver, whose memory stays flat).

``python -m event_consumer.otlp_receiver [--grpc-port P] [--http-port P]`` runs one
in a process of its own: it prints one JSON line with its URLs, and answers
``GET /received`` on its HTTP port with the counts, ``GET /spans`` and ``GET /logs``
with what came.
"""

from __future__ import annotations

import argparse
import gzip
import json
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_service
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2 as metrics_service,
)
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2_grpc as metrics_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

_SERVICES: Final[dict[str, tuple[Any, Any]]] = {
    "traces": (
        trace_service.ExportTraceServiceRequest,
        trace_service.ExportTraceServiceResponse,
    ),
    "logs": (
        logs_service.ExportLogsServiceRequest,
        logs_service.ExportLogsServiceResponse,
    ),
    "metrics": (
        metrics_service.ExportMetricsServiceRequest,
        metrics_service.ExportMetricsServiceResponse,
    ),
}
_REJECTED_FIELD: Final = {
    "traces": "rejected_spans",
    "logs": "rejected_log_records",
    "metrics": "rejected_data_points",
}
_HTTP_STATUS: Final = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
}


@dataclass(frozen=True)
class ReceivedLink:
    """A span link: the ids (hex) of the span that it names."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedEvent:
    """A span event."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came. Ids are hex, ``parent_span_id`` empty for a root; times in
    nanoseconds since the epoch; ``status`` is 0 unset, 1 ok, 2 error."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    trace_state: str
    flags: int
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[ReceivedEvent]
    links: list[ReceivedLink]
    status: int
    status_message: str
    resource: dict[str, Any]
    scope: str


@dataclass(frozen=True)
class ReceivedLog:
    """A log record as it came."""

    event_name: str
    trace_id: str
    span_id: str
    time_ns: int
    observed_ns: int
    severity: int
    body: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str


@dataclass(frozen=True)
class ReceivedPoint:
    """One data point: ``value`` of a sum or gauge, or the buckets of a histogram."""

    attributes: dict[str, Any]
    value: float | None
    count: int
    sum: float
    bounds: list[float]
    bucket_counts: list[int]
    exemplars: int


@dataclass(frozen=True)
class ReceivedMetric:
    """One metric of one export. ``kind``: sum, gauge or histogram; ``temporality``
    2 is cumulative, 1 delta, 0 none."""

    name: str
    unit: str
    description: str
    kind: str
    temporality: int
    monotonic: bool
    points: list[ReceivedPoint]
    resource: dict[str, Any]


class OtlpReceiver:
    """Listens from construction on; ``close()`` (or ``with``) ends it.

    Ports of 0 are drawn. ``keep=False`` counts without keeping. ``tls``: the key and
    the certificate, PEM files; None: plain. Thread-safe.

    Raises:
        OSError: a port is taken.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        grpc_port: int = 0,
        http_port: int = 0,
        keep: bool = True,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self._host = host
        self._scheme = "http" if tls is None else "https"
        self._keep = keep
        self._changed = threading.Condition()
        self._messages: dict[str, list[Message]] = {s: [] for s in _SERVICES}
        self._counts = dict.fromkeys(_SERVICES, 0)
        self._headers: list[dict[str, str]] = []
        self._failures: dict[str, list[grpc.StatusCode]] = {s: [] for s in _SERVICES}
        self._refused: dict[str, grpc.StatusCode] = {}
        self._num_to_reject = dict.fromkeys(_SERVICES, 0)
        self._throttle_s: dict[str, int] = {}
        self._may_answer = threading.Event()
        self._may_answer.set()
        self.num_calls = 0
        """Export calls that came, those that were made to fail among them."""

        self._grpc = grpc.server(
            ThreadPoolExecutor(max_workers=4, thread_name_prefix="otlp-grpc"),
            options=[("grpc.so_reuseport", 0)],
        )
        trace_grpc.add_TraceServiceServicer_to_server(
            _servicer(self, "traces", trace_grpc.TraceServiceServicer), self._grpc
        )
        logs_grpc.add_LogsServiceServicer_to_server(
            _servicer(self, "logs", logs_grpc.LogsServiceServicer), self._grpc
        )
        metrics_grpc.add_MetricsServiceServicer_to_server(
            _servicer(self, "metrics", metrics_grpc.MetricsServiceServicer), self._grpc
        )
        try:
            address = f"{host}:{grpc_port}"
            self.grpc_port = (
                self._grpc.add_insecure_port(address)
                if tls is None
                else self._grpc.add_secure_port(
                    address,
                    grpc.ssl_server_credentials(
                        [(tls[0].read_bytes(), tls[1].read_bytes())]
                    ),
                )
            )
        except RuntimeError as error:
            raise OSError(f"port {grpc_port} is taken: {error}") from error
        self._http = _HttpServer((host, http_port), _HttpHandler)
        self._http.receiver = self
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls[1], tls[0])
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.http_port: int = self._http.server_address[1]
        self._grpc.start()
        self._http_thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._http_thread.start()

    @property
    def grpc_url(self) -> str:
        return f"{self._scheme}://{self._host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """With the path of the traces signal: it says "HTTP" whatever the port."""
        return f"{self._scheme}://{self._host}:{self.http_port}/v1/traces"

    # What came.

    def spans(self, name: str | None = None) -> list[ReceivedSpan]:
        """In the order they came; those called ``name`` where one is given."""
        return [s for s in self._spans() if name is None or s.name == name]

    def logs(self, event_name: str | None = None) -> list[ReceivedLog]:
        return [
            r for r in self._logs() if event_name is None or r.event_name == event_name
        ]

    def metrics(self, name: str | None = None) -> list[ReceivedMetric]:
        """Every export adds its own; the last of a name is the newest."""
        return [m for m in self._metrics() if name is None or m.name == name]

    def count(self, signal_name: str) -> int:
        """Spans, log records or metrics so far (``traces``, ``logs``, ``metrics``)."""
        with self._changed:
            return self._counts[signal_name]

    def headers(self) -> list[dict[str, str]]:
        """gRPC metadata or HTTP headers of each accepted call, keys in lower case."""
        with self._changed:
            return list(self._headers)

    def clear(self) -> None:
        """Forget what came."""
        with self._changed:
            for signal_name in _SERVICES:
                self._messages[signal_name].clear()
                self._counts[signal_name] = 0
            self._headers.clear()

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """Wait until ``condition()`` is true after some arrival; returns its value.

        Raises:
            TimeoutError: it did not become true in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if value := condition():
                return value
            with self._changed:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"not received within {timeout_s:g} s; so far {self._counts}"
                    )
                self._changed.wait(min(left, 0.05))

    # How it behaves.

    def fail(self, signal_name: str, *codes: grpc.StatusCode) -> None:
        """Answer the next calls with these codes (over HTTP with their likes)."""
        with self._changed:
            self._failures[signal_name].extend(codes)

    def refuse(self, signal_name: str, code: grpc.StatusCode | None) -> None:
        """Answer every call with this code from now on; None: accept again."""
        with self._changed:
            if code is None:
                self._refused.pop(signal_name, None)
            else:
                self._refused[signal_name] = code

    def reject(self, signal_name: str, count: int) -> None:
        """Say of the next call that ``count`` of its items were thrown away
        (partial success)."""
        with self._changed:
            self._num_to_reject[signal_name] = count

    def throttle(self, signal_name: str, after_s: int) -> None:
        """Answer the next call with "too much, come again in ``after_s`` seconds"
        (gRPC: RetryInfo, HTTP: Retry-After)."""
        with self._changed:
            self._throttle_s[signal_name] = after_s
            self._failures[signal_name].insert(0, grpc.StatusCode.RESOURCE_EXHAUSTED)

    def pause(self) -> None:
        """Let calls hang, as a stuck collector does, until :meth:`resume`."""
        self._may_answer.clear()

    def resume(self) -> None:
        self._may_answer.set()

    def close(self) -> None:
        self._may_answer.set()
        self._grpc.stop(grace=0.2).wait()
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # From the servers.

    def _accept(
        self, signal_name: str, message: Message, headers: Iterable[tuple[str, str]]
    ) -> grpc.StatusCode | None:
        """Keep one export; the code to fail it with instead, or None."""
        self._may_answer.wait()
        with self._changed:
            self.num_calls += 1
            if self._failures[signal_name]:
                return self._failures[signal_name].pop(0)
            if signal_name in self._refused:
                return self._refused[signal_name]
            self._counts[signal_name] += _num_items(signal_name, message)
            if self._keep:
                self._messages[signal_name].append(message)
                self._headers.append({k.lower(): v for k, v in headers})
            self._changed.notify_all()
        return None

    def _take_throttle(self, signal_name: str) -> int | None:
        with self._changed:
            return self._throttle_s.pop(signal_name, None)

    def _response(self, signal_name: str) -> Any:
        """The answer to a call that was accepted."""
        _, response_type = _SERVICES[signal_name]
        response = response_type()
        with self._changed:
            count = self._num_to_reject[signal_name]
            self._num_to_reject[signal_name] = 0
        if count:
            setattr(response.partial_success, _REJECTED_FIELD[signal_name], count)
        return response

    def _kept(self, signal_name: str) -> list[Any]:
        with self._changed:
            return list(self._messages[signal_name])

    def _spans(self) -> Iterator[ReceivedSpan]:
        for message in self._kept("traces"):
            for group in message.resource_spans:
                resource = _attributes(group.resource.attributes)
                for scoped in group.scope_spans:
                    for span in scoped.spans:
                        yield _received_span(span, resource, scoped.scope.name)

    def _logs(self) -> Iterator[ReceivedLog]:
        for message in self._kept("logs"):
            for group in message.resource_logs:
                resource = _attributes(group.resource.attributes)
                for scoped in group.scope_logs:
                    for record in scoped.log_records:
                        yield _received_log(record, resource, scoped.scope.name)

    def _metrics(self) -> Iterator[ReceivedMetric]:
        for message in self._kept("metrics"):
            for group in message.resource_metrics:
                resource = _attributes(group.resource.attributes)
                for scoped in group.scope_metrics:
                    for metric in scoped.metrics:
                        yield _received_metric(metric, resource)


def _servicer(receiver: OtlpReceiver, signal_name: str, base: type) -> Any:
    class Servicer(base):  # type: ignore[misc]
        def Export(self, request: Message, context: grpc.ServicerContext) -> Message:
            code = receiver._accept(
                signal_name,
                request,
                ((k, str(v)) for k, v in context.invocation_metadata()),
            )
            if code is not None:
                after_s = receiver._take_throttle(signal_name)
                if after_s is not None:
                    info = RetryInfo()
                    info.retry_delay.seconds = after_s
                    context.set_trailing_metadata(
                        (("google.rpc.retryinfo-bin", info.SerializeToString()),)
                    )
                context.abort(code, "told to fail")
            return receiver._response(signal_name)

    return Servicer()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    receiver: OtlpReceiver


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HttpServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        signal_name = self.path.rsplit("/", 1)[-1]
        if self.path != f"/v1/{signal_name}" or signal_name not in _SERVICES:
            return self._answer(404, b"no such path: /v1/traces, /v1/logs, /v1/metrics")
        request, _ = _SERVICES[signal_name]
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        try:
            message = request.FromString(body)
        except DecodeError as error:
            return self._answer(400, str(error).encode())
        code = self.server.receiver._accept(signal_name, message, self.headers.items())
        if code is not None:
            after_s = self.server.receiver._take_throttle(signal_name)
            return self._answer(
                _HTTP_STATUS.get(code, 500), b"told to fail", retry_after_s=after_s
            )
        response = self.server.receiver._response(signal_name)
        return self._answer(200, response.SerializeToString())

    def do_GET(self) -> None:
        receiver = self.server.receiver
        if self.path == "/received":
            answer: Any = {name: receiver.count(name) for name in _SERVICES}
        elif self.path == "/spans":
            answer = [asdict(span) for span in receiver.spans()]
        elif self.path == "/logs":
            answer = [asdict(record) for record in receiver.logs()]
        else:
            return self._answer(404, b"no such path: /received, /spans, /logs")
        return self._answer(200, json.dumps(answer).encode(), "application/json")

    def _answer(
        self,
        status: int,
        body: bytes,
        kind: str = "application/x-protobuf",
        retry_after_s: int | None = None,
    ) -> None:
        self.send_response(status)
        if retry_after_s is not None:
            self.send_header("Retry-After", str(retry_after_s))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _num_items(signal_name: str, message: Any) -> int:
    if signal_name == "traces":
        return sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans)
    if signal_name == "logs":
        return sum(
            len(s.log_records) for r in message.resource_logs for s in r.scope_logs
        )
    return sum(
        len(s.metrics) for r in message.resource_metrics for s in r.scope_metrics
    )


def _received_span(span: Any, resource: dict[str, Any], scope: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        flags=span.flags,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[
            ReceivedEvent(e.name, e.time_unix_nano, _attributes(e.attributes))
            for e in span.events
        ],
        links=[
            ReceivedLink(
                link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)
            )
            for link in span.links
        ],
        status=span.status.code,
        status_message=span.status.message,
        resource=resource,
        scope=scope,
    )


def _received_log(record: Any, resource: dict[str, Any], scope: str) -> ReceivedLog:
    return ReceivedLog(
        event_name=record.event_name,
        trace_id=record.trace_id.hex(),
        span_id=record.span_id.hex(),
        time_ns=record.time_unix_nano,
        observed_ns=record.observed_time_unix_nano,
        severity=record.severity_number,
        body=_value(record.body),
        attributes=_attributes(record.attributes),
        resource=resource,
        scope=scope,
    )


def _received_metric(metric: Metric, resource: dict[str, Any]) -> ReceivedMetric:
    kind = metric.WhichOneof("data") or ""
    data = getattr(metric, kind)
    return ReceivedMetric(
        name=metric.name,
        unit=metric.unit,
        description=metric.description,
        kind=kind,
        temporality=getattr(data, "aggregation_temporality", 0),
        monotonic=getattr(data, "is_monotonic", False),
        points=[_received_point(point) for point in data.data_points],
        resource=resource,
    )


def _received_point(point: Any) -> ReceivedPoint:
    is_number = hasattr(point, "as_int")
    return ReceivedPoint(
        attributes=_attributes(point.attributes),
        value=getattr(point, point.WhichOneof("value")) if is_number else None,
        count=0 if is_number else point.count,
        sum=0.0 if is_number else point.sum,
        bounds=[] if is_number else list(point.explicit_bounds),
        bucket_counts=[] if is_number else list(point.bucket_counts),
        exemplars=len(point.exemplars),
    )


def _attributes(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)


def main(arguments: list[str] | None = None) -> int:
    """Run one receiver until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m event_consumer.otlp_receiver")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--http-port", type=int, default=0)
    parser.add_argument("--count-only", action="store_true", help="keep nothing")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        receiver = OtlpReceiver(
            host=options.host,
            grpc_port=options.grpc_port,
            http_port=options.http_port,
            keep=not options.count_only,
        )
    except OSError as error:
        print(f"The receiver cannot listen: {error}.", file=sys.stderr)
        return 1
    with receiver:
        urls = {
            "grpc_url": receiver.grpc_url,
            "http_url": receiver.http_url,
            "received_url": f"http://{options.host}:{receiver.http_port}/received",
        }
        print(json.dumps(urls), flush=True)
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
