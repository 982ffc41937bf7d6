"""Sends OTLP messages to a collector over gRPC or HTTP: one call, one outcome.

Follows the OTLP specification 1.5: which codes may be tried again, partial
success, ``Retry-After`` and ``RetryInfo``. Retrying itself, queueing and counting
are :mod:`event_consumer.export_queue`'s.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote, urlsplit

import grpc
import requests
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_service
from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2 as metrics_service,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceStub,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceStub,
)

Signal = Literal["traces", "logs", "metrics"]


GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
PROTOCOLS: Final = (GRPC, HTTP)
HTTP_PORT: Final = 4318
"""The port that OTLP gives to HTTP (gRPC has 4317)."""

_RETRYABLE_CODES: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""RESOURCE_EXHAUSTED belongs to them only with a RetryInfo (OTLP 1.5)."""
_RETRYABLE_STATUS: Final = frozenset({429, 502, 503, 504})


class OtlpSettingsError(ValueError):
    """An OTLP setting cannot be used; the message is one sentence."""


class ExportError(Exception):
    """A call failed; the message says why, in a few words."""


class RetryableError(ExportError):
    """The same call may succeed later. ``after_s``: not before that many seconds,
    where the collector named a time."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


class RejectedError(ExportError):
    """The collector will never take this call."""


@dataclass(frozen=True, kw_only=True)
class OtlpSettings:
    """Where and how to export.

    ``endpoint``: ``http://HOST:PORT`` (plain) or ``https://HOST:PORT`` (TLS).
    ``protocol``: ``grpc`` or ``http/protobuf``; None lets the endpoint say: port
    4318 or a path mean HTTP, everything else gRPC. ``headers`` go with every call.
    ``timeout_s``: seconds one call may take. ``certificate_file``: PEM of the CA
    to trust under ``https`` instead of the system's. ``compression``: ``gzip`` or
    ``none``. ``of_one_signal``: under HTTP the endpoint is the whole URL, to which no
    path is added.

    Raises:
        OtlpSettingsError: a value cannot be used.
    """

    endpoint: str
    protocol: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0
    certificate_file: str | None = None
    compression: str = "none"
    of_one_signal: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.endpoint)
            valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.scheme not in ("http", "https"):
            raise OtlpSettingsError(
                f"The OTLP endpoint {self.endpoint!r} is not a URL that can be used: "
                f"write http://HOST:PORT, or https://HOST:PORT for TLS."
            )
        if self.protocol is not None and self.protocol not in PROTOCOLS:
            raise OtlpSettingsError(
                f"The OTLP protocol {self.protocol!r} is unknown: "
                f"it is one of {', '.join(PROTOCOLS)}."
            )
        if self.compression not in ("none", "gzip"):
            raise OtlpSettingsError(
                f"The OTLP compression {self.compression!r} is unknown: "
                f"it is none or gzip."
            )
        if not self.timeout_s > 0:
            raise OtlpSettingsError(
                f"The OTLP timeout must be above 0 seconds, not {self.timeout_s:g}."
            )
        if self.certificate_file and not os.access(self.certificate_file, os.R_OK):
            raise OtlpSettingsError(
                f"The OTLP certificate file {self.certificate_file!r} cannot be read."
            )

    @classmethod
    def from_environ(
        cls,
        environ: Mapping[str, str],
        endpoint: str | None = None,
        protocol: str | None = None,
        *,
        signal: Signal = "traces",
    ) -> OtlpSettings | None:
        """The settings of ``signal`` by OpenTelemetry's own variables, with
        ``endpoint`` and ``protocol`` before them; None without an endpoint.

        ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` and its like come before
        ``OTEL_EXPORTER_OTLP_ENDPOINT`` (OTLP exporter specification), so that a signal
        can have a collector of its own, or be the only one that is exported.

        Raises:
            OtlpSettingsError: a value cannot be used.
        """

        def variable(name: str) -> tuple[str, str]:
            """The name and the value of the one that counts; empty: not set."""
            general = f"OTEL_EXPORTER_OTLP_{name}"
            own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
            return (
                (own, environ[own])
                if environ.get(own)
                else (
                    general,
                    environ.get(general, ""),
                )
            )

        source, named = variable("ENDPOINT")
        of_one_signal = not endpoint and source != "OTEL_EXPORTER_OTLP_ENDPOINT"
        endpoint = endpoint or named
        if not endpoint:
            return None
        source, timeout = variable("TIMEOUT")
        try:
            timeout_s = float(timeout or "10")
        except ValueError:
            raise OtlpSettingsError(
                f"{source} is a number of seconds, not {timeout!r}."
            ) from None
        return cls(
            endpoint=endpoint,
            protocol=protocol or variable("PROTOCOL")[1] or None,
            headers=_parse_headers(*variable("HEADERS")),
            timeout_s=timeout_s,
            certificate_file=variable("CERTIFICATE")[1] or None,
            compression=variable("COMPRESSION")[1] or "none",
            of_one_signal=of_one_signal,
        )

    @property
    def resolved_protocol(self) -> str:
        """``protocol``, or what the endpoint says."""
        if self.protocol is not None:
            return self.protocol
        parts = urlsplit(self.endpoint)
        return HTTP if parts.port == HTTP_PORT or parts.path.strip("/") else GRPC

    def http_url(self, signal: Signal) -> str:
        """The URL of one signal under HTTP; the endpoint may name one already."""
        if self.of_one_signal:
            has_path = urlsplit(self.endpoint).path
            return self.endpoint if has_path else f"{self.endpoint}/"
        base = self.endpoint.rstrip("/")
        for known in ("traces", "logs", "metrics"):
            base = base.removesuffix(f"/v1/{known}")
        return f"{base}/v1/{signal}"


def _parse_headers(source: str, text: str) -> dict[str, str]:
    """``key=value,key=value``, percent-encoded (OTLP exporter specification)."""
    headers = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise OtlpSettingsError(
                f"{source} has {pair!r} where key=value is expected."
            )
        headers[key.strip().lower()] = unquote(value.strip())
    return headers


class Transport(Protocol):
    """One connection to a collector, used by one thread at a time a signal."""

    def send(self, signal: Signal, message: Message, timeout_s: float) -> int:
        """Deliver one export request. Returns how many of its items the collector
        took note of and threw away (partial success).

        Raises:
            RetryableError: it may succeed later.
            RejectedError: it never will (also: a signal that this collector does
                not take at all, as Jaeger takes no logs and no metrics).
        """
        ...

    def close(self) -> None: ...


def open_transport(settings: OtlpSettings) -> Transport:
    """Connects on the first call: a collector that is not there yet is no error."""
    if settings.resolved_protocol == GRPC:
        return GrpcTransport(settings)
    return HttpTransport(settings)


class GrpcTransport:
    """OTLP over gRPC."""

    def __init__(self, settings: OtlpSettings) -> None:
        parts = urlsplit(settings.endpoint)
        compression = (
            grpc.Compression.Gzip
            if settings.compression == "gzip"
            else grpc.Compression.NoCompression
        )
        options = [
            # The queue retries, with its own back-off; a reconnect must not wait
            # longer than that.
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 5_000),
        ]
        if parts.scheme == "https":
            self._channel = grpc.secure_channel(
                parts.netloc, channel_credentials(settings), options, compression
            )
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options, compression)
        self._metadata = tuple(settings.headers.items())
        self._calls = {
            "traces": TraceServiceStub(self._channel).Export,
            "logs": LogsServiceStub(self._channel).Export,
            "metrics": MetricsServiceStub(self._channel).Export,
        }

    def send(self, signal: Signal, message: Message, timeout_s: float) -> int:
        try:
            response = self._calls[signal](
                message, timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _grpc_failure(error) from error
        return _num_rejected(signal, response)

    def close(self) -> None:
        self._channel.close()


def channel_credentials(settings: OtlpSettings) -> grpc.ChannelCredentials:
    """TLS that trusts the configured CA, or the system's."""
    if settings.certificate_file is None:
        return grpc.ssl_channel_credentials()
    with open(settings.certificate_file, "rb") as file:
        return grpc.ssl_channel_credentials(file.read())


def _grpc_failure(error: Any) -> ExportError:
    code = error.code()
    why = f"{code.name}: {error.details()}"
    after_s = None
    for key, value in error.trailing_metadata() or ():
        if key == "google.rpc.retryinfo-bin":
            delay = RetryInfo.FromString(value).retry_delay
            after_s = delay.seconds + delay.nanos / 1e9
    exhausted = code == grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None
    if code in _RETRYABLE_CODES or exhausted:
        return RetryableError(why, after_s)
    return RejectedError(why)


class HttpTransport:
    """OTLP over HTTP, protobuf bodies, one kept-alive connection a signal."""

    _RESPONSES: Final[dict[str, Any]] = {
        "traces": trace_service.ExportTraceServiceResponse,
        "logs": logs_service.ExportLogsServiceResponse,
        "metrics": metrics_service.ExportMetricsServiceResponse,
    }

    def __init__(self, settings: OtlpSettings) -> None:
        self._settings = settings
        self._gzip = settings.compression == "gzip"
        self._sessions: dict[str, requests.Session] = {}
        for signal in self._RESPONSES:
            session = self._sessions[signal] = requests.Session()
            session.headers.update(settings.headers)
            session.headers["Content-Type"] = "application/x-protobuf"
            if self._gzip:
                session.headers["Content-Encoding"] = "gzip"

    def send(self, signal: Signal, message: Message, timeout_s: float) -> int:
        body = message.SerializeToString()
        if self._gzip:
            body = gzip.compress(body)
        try:
            response = self._sessions[signal].post(
                self._settings.http_url(signal),
                data=body,
                timeout=timeout_s,
                # Not the session's: REQUESTS_CA_BUNDLE would come before that.
                verify=self._settings.certificate_file,
            )
        except requests.RequestException as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from error
        if response.status_code >= 300:
            raise _http_failure(response)
        try:
            answer = self._RESPONSES[signal].FromString(response.content)
        except DecodeError:
            raise RejectedError(
                f"{response.url} answers, but not as an OTLP collector"
            ) from None
        return _num_rejected(signal, answer)

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


def _http_failure(response: requests.Response) -> ExportError:
    why = f"HTTP {response.status_code} {response.reason}"
    if response.status_code in _RETRYABLE_STATUS:
        after = response.headers.get("Retry-After", "")
        return RetryableError(why, float(after) if after.isdigit() else None)
    return RejectedError(why)


def _num_rejected(signal: Signal, response: Any) -> int:
    partial = response.partial_success
    if signal == "traces":
        return partial.rejected_spans
    if signal == "logs":
        return partial.rejected_log_records
    return partial.rejected_data_points
