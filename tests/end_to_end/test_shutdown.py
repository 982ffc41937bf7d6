"""A server that is told to stop while a long request runs: what a subscriber hears."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest
import zmq

from vllm_fork.demo.processes import HOST, Service, answers
from vllm_fork.events import BatchDecoder, EngineStopped, RequestFinished

pytestmark = pytest.mark.nightly
HEARD_WITHIN_MS = 30_000
ENDS_WITHIN_S = 30.0


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def server(model_dir, tmp_path, unused_port, endpoint):
    """Its service and the URL of its API."""
    events = {"endpoint": endpoint, "replay_endpoint": f"{endpoint}-replay"}
    service = Service(
        "vllm-fork serve",
        [
            *(str(Path(sys.executable).parent / "vllm-fork"), "serve", str(model_dir)),
            *("--host", HOST, "--port", str(unused_port), "--enforce-eager"),
            *("--served-model-name", "tiny", "--max-model-len", "32768"),
        ],
        tmp_path / "server.log",
        os.environ | {"VLLM_CHECKPOINT_RETENTION": json.dumps({"events": events})},
    )
    url = f"http://{HOST}:{unused_port}"
    try:
        service.wait_ready(lambda: answers(f"{url}/health"), timeout_s=240)
        yield service, url
    finally:
        service.stop()


def ask_for_much(url: str, has_begun: threading.Event) -> None:
    """Read an answer that would take minutes, until it ends."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 30_000, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for _ in response:
            has_begun.set()


def terminate_the_engine(server: psutil.Process) -> None:
    (engine,) = [p for p in server.children(True) if "EngineCore" in p.name()]
    engine.terminate()


STOPS = {
    "SIGTERM": (lambda server: server.terminate(), "abort"),
    "SIGTERM to the engine": (terminate_the_engine, "abort"),
    # Reaches the worker as well, and the engine fails over its end.
    "Ctrl-C": (lambda server: os.killpg(server.pid, signal.SIGINT), "error"),
}


@pytest.mark.parametrize("how", STOPS)
def test_the_last_events_reach_a_subscriber(server, endpoint, how):
    service, url = server
    stop, finish_reason = STOPS[how]
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.rcvtimeo = HEARD_WITHIN_MS
        subscriber.subscribe("")
        subscriber.connect(endpoint)
        has_begun = threading.Event()
        client = threading.Thread(target=ask_for_much, args=(url, has_begun))
        client.start()
        assert has_begun.wait(60)
        stop(psutil.Process(service._process.pid))
        decoder, heard = BatchDecoder(), []
        while not heard or not isinstance(heard[-1], EngineStopped):
            *_, payload = subscriber.recv_multipart()
            heard += decoder.decode(payload).events
    (finished,) = [event for event in heard if isinstance(event, RequestFinished)]
    assert finished.finish_reason == finish_reason
    client.join(ENDS_WITHIN_S)
    assert not client.is_alive()
    service._process.wait(ENDS_WITHIN_S)
