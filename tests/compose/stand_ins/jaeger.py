"""The OTLP receiver on Jaeger's ports; ``GET :16686/spans`` tells what arrived."""

import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from event_consumer.otlp_receiver import OtlpReceiver


class Status(BaseHTTPRequestHandler):
    """Jaeger's health check extension."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/status" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


stop = threading.Event()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stop.set())
health = HTTPServer(("0.0.0.0", 13133), Status)
threading.Thread(target=health.serve_forever, daemon=True).start()
with OtlpReceiver(host="0.0.0.0", grpc_port=4317, http_port=16686):
    stop.wait()
