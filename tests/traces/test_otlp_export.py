"""The road to a collector: both protocols, and every way in which it can be rough."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty

from event_consumer import export_queue
from event_consumer.export_queue import ExportQueue, ExportStats
from event_consumer.otlp import (
    GRPC,
    HTTP,
    OtlpSettings,
    OtlpSettingsError,
)
from event_consumer.otlp_receiver import OtlpReceiver
from event_consumer.tracing import RequestTracer, TraceSettings


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_queue, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(export_queue, "MAX_BACKOFF_S", 0.2)


@pytest.fixture
def spans_only(otlp: OtlpSettings) -> Iterator[RequestTracer]:
    tracer = RequestTracer(otlp, TraceSettings(log_records=False))
    yield tracer
    tracer.shutdown(timeout_s=0.1)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        threading.Event().wait(0.01)


def spans_of(tracer: RequestTracer) -> ExportStats:
    return tracer.stats()[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_collector_that_fails_for_a_while_gets_everything(
    spans_only, receiver, make_request
):
    receiver.fail("traces", *[grpc.StatusCode.UNAVAILABLE] * 3)
    spans_only.request_closed(make_request(), [], None)
    assert spans_only.flush(10)
    assert len(receiver.spans()) == 1
    stats = spans_of(spans_only)
    assert (stats.exported, stats.dropped, stats.retries) == (1, {}, 3)
    assert stats.last_error is not None


def test_what_a_collector_refuses_is_dropped_counted_and_not_tried_again(
    spans_only, receiver, make_request
):
    receiver.fail("traces", grpc.StatusCode.INVALID_ARGUMENT)
    spans_only.request_closed(make_request("bad"), [], None)
    assert spans_only.flush(10)
    spans_only.request_closed(make_request("good"), [], None)
    assert spans_only.flush(10)
    (span,) = receiver.spans()
    assert span.attributes["gen_ai.request.id"] == "good"
    stats = spans_of(spans_only)
    assert (stats.exported, stats.dropped, stats.retries) == (1, {"rejected": 1}, 0)


def test_a_collector_that_is_throttled_says_when_to_come_again(
    spans_only, receiver, make_request
):
    receiver.throttle("traces", after_s=1)
    before = time.monotonic()
    spans_only.request_closed(make_request(), [], None)
    assert spans_only.flush(10)
    assert 1.0 <= time.monotonic() - before < 5
    stats = spans_of(spans_only)
    assert (stats.exported, stats.dropped, stats.retries) == (1, {}, 1)


def test_an_exhausted_collector_that_names_no_time_is_not_asked_again(
    spans_only, receiver, protocol, make_request
):
    """So says OTLP of gRPC; HTTP's 429 may always be tried again."""
    receiver.fail("traces", grpc.StatusCode.RESOURCE_EXHAUSTED)
    spans_only.request_closed(make_request(), [], None)
    assert spans_only.flush(10)
    stats = spans_of(spans_only)
    if protocol == GRPC:
        assert (stats.exported, stats.dropped) == (0, {"rejected": 1})
    else:
        assert (stats.exported, stats.dropped) == (1, {})


def test_a_collector_without_logs_costs_the_logs_alone(
    otlp, receiver, make_request, make_checkpoint
):
    """Jaeger answers UNIMPLEMENTED, or 404."""
    receiver.refuse("logs", grpc.StatusCode.UNIMPLEMENTED)
    tracer = RequestTracer(otlp)
    request = make_request()
    tracer.request_closed(request, [make_checkpoint(request, 1)], None)
    assert tracer.flush(10)
    spans, logs = tracer.stats()
    assert (spans.exported, spans.num_dropped) == (2, 0)
    assert (logs.exported, logs.dropped) == (0, {"rejected": 4})
    tracer.shutdown()


def test_a_server_that_is_no_collector_is_said_to_be_none(make_request, caplog):
    class Page(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "13")
            self.end_headers()
            self.wfile.write(b"<html></html>")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        port = server.server_address[1]
        tracer = RequestTracer(
            OtlpSettings(endpoint=f"http://127.0.0.1:{port}/v1/traces"),
            TraceSettings(log_records=False),
        )
        for number in range(2):  # the thread lives on after the first
            tracer.request_closed(make_request(str(number)), [], None)
            assert tracer.flush(5)
        tracer.shutdown(1)
        server.shutdown()
    assert spans_of(tracer).dropped == {"rejected": 2}
    assert "not as an OTLP collector" in caplog.text


@pytest.mark.parametrize("spoken", [GRPC, HTTP])
def test_the_wrong_protocol_costs_spans_and_nothing_else(
    receiver, make_request, spoken
):
    port = receiver.http_port if spoken == GRPC else receiver.grpc_port
    tracer = RequestTracer(
        OtlpSettings(endpoint=f"http://127.0.0.1:{port}", protocol=spoken, timeout_s=1),
        TraceSettings(log_records=False),
    )
    tracer.request_closed(make_request(), [], None)
    wait_until(lambda: spans_of(tracer).last_error is not None)
    before = time.monotonic()
    tracer.shutdown(0.2)
    assert time.monotonic() - before < 4
    assert spans_of(tracer).num_dropped == 1
    assert receiver.count("traces") == 0


def test_an_item_larger_than_the_queue_is_dropped_and_the_next_is_sent(
    otlp, receiver, make_request, make_checkpoint
):
    tracer = RequestTracer(otlp, TraceSettings(log_records=False, max_queued=3))
    request = make_request("large")
    checkpoints = [make_checkpoint(request, number) for number in range(5)]
    tracer.request_closed(request, checkpoints, None)
    assert tracer.flush(5)
    tracer.request_closed(make_request("small"), [], None)
    assert tracer.flush(5)
    (span,) = receiver.spans()
    assert span.attributes["gen_ai.request.id"] == "small"
    assert spans_of(tracer).dropped == {"queue_full": 6}
    tracer.shutdown()


def test_a_partial_success_counts_what_was_thrown_away(
    spans_only, receiver, make_request
):
    receiver.reject("traces", 2)
    for number in range(5):
        spans_only.request_closed(make_request(str(number)), [], None)
    assert spans_only.flush(10)
    stats = spans_of(spans_only)
    assert (stats.exported, stats.dropped) == (3, {"rejected": 2})


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_collector_that_comes_late_gets_what_waited(make_request, protocol):
    """It is down from the start; nothing blocks, nothing is lost, it comes up."""
    ports = {GRPC: free_port(), HTTP: free_port()}
    tracer = RequestTracer(
        OtlpSettings(
            endpoint=f"http://127.0.0.1:{ports[protocol]}",
            protocol=protocol,
            timeout_s=2,
        ),
        TraceSettings(log_records=False),
    )
    for number in range(100):
        tracer.request_closed(make_request(str(number)), [], None)
    wait_until(lambda: spans_of(tracer).retries > 0)
    assert spans_of(tracer).queued == 100
    with OtlpReceiver(grpc_port=ports[GRPC], http_port=ports[HTTP]) as receiver:
        assert tracer.flush(15)
        assert len(receiver.spans()) == 100
    assert spans_of(tracer).num_dropped == 0
    tracer.shutdown()


def test_a_full_queue_drops_the_oldest_whole_traces_and_counts_them(
    otlp, receiver, make_request, make_checkpoint
):
    receiver.pause()
    tracer = RequestTracer(otlp, TraceSettings(log_records=False, max_queued=100))
    tracer.request_closed(make_request("under-way"), [], None)
    wait_until(lambda: not tracer._spans._items)  # the exporter holds it
    for number in range(200):
        request = make_request(str(number))
        tracer.request_closed(request, [make_checkpoint(request, number)], None)
    stats = spans_of(tracer)
    assert stats.dropped == {"queue_full": 302}
    assert stats.queued == 99
    receiver.resume()
    assert tracer.flush(10)
    requests = receiver.spans("kv_cache.request")
    children = receiver.spans("kv_cache.checkpoint")
    assert [span.attributes["gen_ai.request.id"] for span in requests] == [
        "under-way",
        *map(str, range(151, 200)),
    ]
    assert {child.parent_span_id for child in children} == {
        span.span_id for span in requests[1:]
    }
    stats = spans_of(tracer)
    assert stats.exported + stats.num_dropped == 401
    tracer.shutdown()


def test_a_stuck_collector_never_blocks_who_submits(
    otlp, receiver, make_request, make_checkpoint
):
    receiver.pause()
    tracer = RequestTracer(otlp, TraceSettings(max_queued=1000))
    request = make_request()
    checkpoints = [make_checkpoint(request, number) for number in range(3)]
    longest = 0.0
    for _ in range(5000):
        before = time.perf_counter()
        tracer.request_closed(request, checkpoints, None)
        longest = max(longest, time.perf_counter() - before)
    # A call that waited for the collector would take its time-out, 5 s.
    assert longest < 1.0
    before = time.perf_counter()
    tracer.shutdown(timeout_s=0.3)
    assert time.perf_counter() - before < 3.0
    for stats, submitted in zip(tracer.stats(), (5000 * 4, 5000 * 10), strict=True):
        assert stats.exported + stats.num_dropped == submitted
        assert stats.dropped["shutdown"] > 0
        assert stats.queued == 0


def test_after_shutdown_everything_is_counted_as_dropped(spans_only, make_request):
    spans_only.shutdown()
    spans_only.request_closed(make_request(), [], None)
    assert spans_of(spans_only).dropped == {"shutdown": 1}


def test_shutdown_flushes(otlp, receiver, make_request):
    tracer = RequestTracer(otlp)
    for number in range(2000):
        tracer.request_closed(make_request(str(number)), [], None)
    tracer.shutdown(timeout_s=10)
    assert receiver.count("traces") == receiver.count("logs") == 2000


def test_an_answer_after_the_end_is_not_counted_twice():
    class Slow:
        def __init__(self) -> None:
            self.called = threading.Event()
            self.may_answer = threading.Event()

        def send(self, signal, message, timeout_s):
            self.called.set()
            self.may_answer.wait(10)
            return 0

        def close(self):
            pass

    transport = Slow()
    queue: ExportQueue[int] = ExportQueue(
        "traces", transport, lambda items: (Empty(), 3 * len(items)), max_queued=9
    )
    queue.submit(1, 3)
    assert transport.called.wait(5)
    queue.shutdown(timeout_s=0.05)
    assert queue.stats().dropped == {"shutdown": 3}
    transport.may_answer.set()
    queue._thread.join(5)
    stats = queue.stats()
    assert (stats.exported, stats.dropped, stats.queued) == (0, {"shutdown": 3}, 0)


def test_what_cannot_be_encoded_costs_itself_alone(spans_only, receiver, make_request):
    """The first cannot be told in OTLP: its count does not fit 64 bits."""
    spans_only.request_closed(make_request("bad", num_prompt_tokens=2**70), [], None)
    for number in range(5):
        spans_only.request_closed(make_request(str(number)), [], None)
    assert spans_only.flush(10)
    assert len(receiver.spans()) == 5
    stats = spans_of(spans_only)
    assert (stats.exported, stats.dropped) == (5, {"encoding": 1})


def test_trouble_is_logged_once_and_so_is_its_end(
    spans_only, receiver, make_request, caplog
):
    caplog.set_level("INFO", logger="event_consumer.export_queue")
    receiver.fail("traces", *[grpc.StatusCode.UNAVAILABLE] * 4)
    spans_only.request_closed(make_request(), [], None)
    assert spans_only.flush(10)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "kept and tried again" in messages[0]
    assert messages[1] == "The collector takes our traces again."


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_headers_and_compression_reach_the_collector(
    receiver, protocol, compression, make_request
):
    url = receiver.grpc_url if protocol == GRPC else receiver.http_url
    settings = OtlpSettings.from_environ(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20abc, x-tenant=a",
            "OTEL_EXPORTER_OTLP_COMPRESSION": compression,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
        }
    )
    assert settings is not None
    assert settings.timeout_s == 3
    tracer = RequestTracer(settings, TraceSettings(log_records=False))
    tracer.request_closed(make_request(), [], None)
    assert tracer.flush(10)
    tracer.shutdown()
    (headers,) = receiver.headers()
    assert headers["authorization"] == "Bearer abc"
    assert headers["x-tenant"] == "a"
    if protocol == HTTP:
        assert headers.get("content-encoding", "none") == compression
    assert len(receiver.spans()) == 1


def test_tls_is_used_for_https(make_request, caplog):
    """Against a server that speaks no TLS the call fails, and says so, as one that
    may be tried again."""
    with OtlpReceiver() as receiver:
        url = receiver.grpc_url.replace("http:", "https:")
        tracer = RequestTracer(OtlpSettings(endpoint=url, timeout_s=0.5))
        tracer.request_closed(make_request(), [], None)
        wait_until(lambda: spans_of(tracer).retries > 0)
        tracer.shutdown(timeout_s=0.1)
        assert receiver.count("traces") == 0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """``certificates(name)``: a key, and a certificate of 127.0.0.1 that it signed."""
    if shutil.which("openssl") is None:
        pytest.skip("NOT TESTED: TLS, for there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str) -> tuple[Path, Path]:
        key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", "2"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
        return key, certificate

    return make


def test_tls_reaches_a_collector_whose_certificate_is_trusted(
    certificates, protocol, make_request, monkeypatch
):
    """And no other: what cannot be verified is not sent. The setting comes before
    another program's variable."""
    key, certificate = certificates("collector")
    _, another = certificates("another")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(another))
    with OtlpReceiver(tls=(key, certificate)) as receiver:
        url = receiver.grpc_url if protocol == GRPC else receiver.http_url
        assert url.startswith("https://")
        trusted, distrusted = (
            RequestTracer(
                OtlpSettings(endpoint=url, certificate_file=str(ca), timeout_s=5)
            )
            for ca in (certificate, another)
        )
        trusted.request_closed(make_request("trusted"), [], None)
        distrusted.request_closed(make_request("distrusted"), [], None)
        assert trusted.flush(10)
        wait_until(lambda: spans_of(distrusted).retries > 0)
        distrusted.shutdown(timeout_s=0.1)
        trusted.shutdown()
        (span,) = receiver.spans()
        assert span.attributes["gen_ai.request.id"] == "trusted"
        assert receiver.logs()


@pytest.mark.parametrize(
    ("endpoint", "given", "expected"),
    [
        ("http://collector:4317", None, GRPC),
        ("http://collector:4318", None, HTTP),
        ("https://collector", None, GRPC),
        ("http://collector:9999/v1/traces", None, HTTP),
        ("http://collector:9999/otlp", None, HTTP),
        ("http://collector:9999/", None, GRPC),
        ("http://collector:4318", "grpc", GRPC),
        ("http://collector:4317", "http/protobuf", HTTP),
    ],
)
def test_the_endpoint_says_the_protocol_unless_a_setting_does(
    endpoint, given, expected
):
    settings = OtlpSettings(endpoint=endpoint, protocol=given)
    assert settings.resolved_protocol == expected


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/logs"),
        ("http://c:4318/", "http://c:4318/v1/logs"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/logs"),
        ("https://c/otlp", "https://c/otlp/v1/logs"),
    ],
)
def test_each_signal_has_its_own_path_under_http(endpoint, url):
    assert OtlpSettings(endpoint=endpoint).http_url("logs") == url


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"endpoint": "collector:4317"}, "http://HOST:PORT"),
        ({"endpoint": "ftp://collector:4317"}, "http://HOST:PORT"),
        ({"endpoint": "http://:4317"}, "http://HOST:PORT"),
        ({"endpoint": "http://c:99999"}, "http://HOST:PORT"),
        ({"endpoint": "http://c:1", "protocol": "http/json"}, "grpc, http/protobuf"),
        ({"endpoint": "http://c:1", "compression": "zstd"}, "none or gzip"),
        ({"endpoint": "http://c:1", "timeout_s": 0}, "above 0"),
        (
            {"endpoint": "https://c:1", "certificate_file": "/nowhere/ca.pem"},
            "cannot be read",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(OtlpSettingsError) as caught:
        OtlpSettings(**given)
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "number of seconds"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "token"}, "key=value"),
        ({"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "token"}, "_TRACES_HEADERS has"),
        ({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "soon"}, "_TRACES_TIMEOUT is a"),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused_in_a_sentence(environ, sentence):
    with pytest.raises(OtlpSettingsError, match=sentence):
        OtlpSettings.from_environ(environ, "http://c:4317")


OTLP = "OTEL_EXPORTER_OTLP"


@pytest.mark.parametrize("signal", ["traces", "logs", "metrics"])
def test_a_signal_may_be_the_only_one_that_is_exported(signal):
    environ = {f"{OTLP}_{signal.upper()}_ENDPOINT": "http://own:4317"}
    for each in ("traces", "logs", "metrics"):
        found = OtlpSettings.from_environ(environ, signal=each)
        assert (found is not None) == (each == signal)


def test_a_signal_s_own_variables_come_before_the_general_ones(tmp_path):
    for name in ("ca.pem", "own.pem"):
        (tmp_path / name).touch()
    general = {
        f"{OTLP}_ENDPOINT": "http://all:4317",
        f"{OTLP}_PROTOCOL": "grpc",
        f"{OTLP}_HEADERS": "a=1",
        f"{OTLP}_TIMEOUT": "1",
        f"{OTLP}_CERTIFICATE": str(tmp_path / "ca.pem"),
        f"{OTLP}_COMPRESSION": "none",
    }
    own = {
        f"{OTLP}_LOGS_ENDPOINT": "https://own/logs",
        f"{OTLP}_LOGS_PROTOCOL": "http/protobuf",
        f"{OTLP}_LOGS_HEADERS": "b=2",
        f"{OTLP}_LOGS_TIMEOUT": "2",
        f"{OTLP}_LOGS_CERTIFICATE": str(tmp_path / "own.pem"),
        f"{OTLP}_LOGS_COMPRESSION": "gzip",
    }
    traces = OtlpSettings.from_environ(general | own, signal="traces")
    logs = OtlpSettings.from_environ(general | own, signal="logs")
    assert traces == OtlpSettings.from_environ(general)
    assert logs == OtlpSettings(
        endpoint="https://own/logs",
        protocol="http/protobuf",
        headers={"b": "2"},
        timeout_s=2,
        certificate_file=str(tmp_path / "own.pem"),
        compression="gzip",
        of_one_signal=True,
    )
    given = OtlpSettings.from_environ(general | own, "http://given:1", signal="logs")
    assert given is not None
    assert given.endpoint == "http://given:1"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318/my/traces", "http://c:4318/my/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("http://c:4318", "http://c:4318/"),
    ],
)
def test_a_signal_s_own_endpoint_is_taken_as_it_is(endpoint, url):
    """OTLP exporter specification, "Endpoint URLs for OTLP/HTTP"."""
    settings = OtlpSettings.from_environ({f"{OTLP}_TRACES_ENDPOINT": endpoint})
    assert settings is not None
    assert settings.http_url("traces") == url


def test_spans_and_log_records_may_go_to_two_collectors(receiver, make_request):
    with OtlpReceiver() as other:
        tracer = RequestTracer(
            OtlpSettings(endpoint=receiver.grpc_url),
            logs=OtlpSettings(endpoint=other.grpc_url),
        )
        tracer.request_closed(make_request(), [], None)
        assert tracer.flush(10)
        tracer.shutdown()
        assert (receiver.count("traces"), receiver.count("logs")) == (1, 0)
        assert (other.count("traces"), other.count("logs") > 0) == (0, True)


def test_without_an_endpoint_nothing_is_exported():
    assert OtlpSettings.from_environ({}) is None
    assert OtlpSettings.from_environ({}, "") is None


def test_the_command_line_comes_before_the_environment():
    settings = OtlpSettings.from_environ(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://env:4317",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        },
        endpoint="http://given:1",
        protocol="http/protobuf",
    )
    assert settings is not None
    assert settings.endpoint == "http://given:1"
    assert settings.resolved_protocol == HTTP
