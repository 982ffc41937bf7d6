"""From a publisher's socket to a collector: the service in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from event_consumer.otlp_receiver import OtlpReceiver
from event_consumer.store import Store
from event_consumer.trace_queries import TraceFilter, find_traces
from vllm_fork.config import EventSettings
from vllm_fork.events import (
    CheckpointEvicted,
    CheckpointPinned,
    CheckpointPromoted,
    CheckpointPublished,
    EngineStarted,
    Event,
    PrefixReused,
    RequestFinished,
)
from vllm_fork.publisher import CheckpointPublisher

ENGINE = "cccccccc-0000-4000-8000-000000000003"
SECOND = 1_000_000_000
CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"


class Turns:
    """The events of a two-turn conversation, one second apart."""

    def __init__(self) -> None:
        self._clock_ns = 1_700_000_000 * SECOND

    def _at(self, turn: int, **given: Any) -> dict[str, Any]:
        self._clock_ns += SECOND
        return {
            "time_unix_ns": self._clock_ns,
            "monotonic_ns": self._clock_ns,
            "request_id": f"chatcmpl-{turn}-0badf00d",
            "external_request_id": f"chatcmpl-{turn}",
            "session_id": "session",
            "traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01" if turn == 1 else None,
            **given,
        }

    def events(self) -> list[Event]:
        checkpoint = {
            "checkpoint_id": 1,
            "boundary": 3168,
            "boundary_kind": "decode_block",
        }
        start = self._at(1)
        return [
            EngineStarted(
                time_unix_ns=start["time_unix_ns"],
                monotonic_ns=start["monotonic_ns"],
                vllm_version="0.32.0",
                fork_version="0.1.0",
                retention="on",
                num_blocks=64,
            ),
            PrefixReused(
                **self._at(1, num_prompt_tokens=61, num_cached_tokens=0),
                arrival_unix_ns=start["time_unix_ns"],
            ),
            CheckpointPinned(**self._at(1), **checkpoint, num_blocks=3),
            CheckpointPromoted(**self._at(1), **checkpoint),
            CheckpointPublished(**self._at(1), **checkpoint, block_hash=b"\xab" * 32),
            self._finished(1, 61, 0, retained_boundary=3168),
            PrefixReused(
                **self._at(2, num_prompt_tokens=3634, num_cached_tokens=3168),
                source_kind="decode_block",
                source_request_id="chatcmpl-1-0badf00d",
                source_external_request_id="chatcmpl-1",
                source_checkpoint_id=1,
                source_boundary=3168,
                hit_limited_by="prompt_end",
            ),
            self._finished(2, 3634, 3168, no_checkpoint_reason="below_block"),
            CheckpointEvicted(
                **self._at(1), **checkpoint, reason="lru", age_s=4.0, num_hits=1
            ),
        ]

    def _finished(self, turn: int, prompt: int, cached: int, **given: Any) -> Event:
        kind = "decode_block" if "retained_boundary" in given else None
        return RequestFinished(
            **self._at(turn),
            num_prompt_tokens=prompt,
            num_output_tokens=3518,
            num_cached_tokens=cached,
            finish_reason="stop",
            retained_kind=kind,
            **given,
        )


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[CheckpointPublisher]:
    settings = EventSettings(
        enabled=True,
        endpoint=f"ipc://{tmp_path}/pub",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        label="arm-on",
    )
    running = CheckpointPublisher(settings, engine_id=ENGINE, model_name="tiny-hybrid")
    yield running
    running.shutdown()


@contextmanager
def serving(
    folder: Path, publisher: CheckpointPublisher, *more: str, **environ: str
) -> Iterator[str]:
    """Run the service; the URL of its status server."""
    command = [sys.executable, "-m", "event_consumer.cli", "run"]
    options = {
        "--endpoint": publisher.endpoint,
        "--replay": publisher.replay_endpoint,
        "--store": f"sqlite:///{folder}/store.db",
        "--http": "127.0.0.1:0",
    }
    for name, value in options.items():
        command += [name, str(value)]
    process = subprocess.Popen(
        [*command, *more], stderr=subprocess.PIPE, text=True, env=os.environ | environ
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "Status on " in line:
                yield line.split("Status on ")[1].split("/healthz")[0]
                break
        else:
            pytest.fail("the service did not start")
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.fixture
def service(
    tmp_path: Path, publisher: CheckpointPublisher, receiver: OtlpReceiver
) -> Iterator[str]:
    """The URL of the running service's status server."""
    with serving(tmp_path, publisher, "--otlp", receiver.grpc_url) as url:
        yield url


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_two_turns_reach_collector_store_and_metrics(
    tmp_path, publisher, receiver, service
):
    publisher.publish(Turns().events())
    receiver.wait_for(lambda: len(receiver.spans()) == 3, timeout_s=20)
    first, second = receiver.spans("kv_cache.request")
    (child,) = receiver.spans("kv_cache.checkpoint")

    # Turn 1 is in its caller's trace, beside vLLM's own span; turn 2 in its own.
    assert first.trace_id == child.trace_id == CALLER_TRACE
    assert first.parent_span_id == CALLER_SPAN
    assert second.trace_id != CALLER_TRACE
    assert second.parent_span_id == ""
    (link,) = second.links
    assert (link.trace_id, link.span_id) == (child.trace_id, child.span_id)
    assert second.attributes["vllm.prefix_cache.reuse_depth"] == 3168
    assert second.attributes["vllm.checkpoint.engine.label"] == "arm-on"

    # What came after the span ended: a log record of it.
    (evicted,) = receiver.wait_for(lambda: receiver.logs("vllm.checkpoint.evicted"))
    assert (evicted.trace_id, evicted.span_id) == (child.trace_id, child.span_id)
    assert evicted.attributes["vllm.checkpoint.hits"] == 1

    # The store says the same.
    with Store(f"sqlite:///{tmp_path}/store.db", read_only=True) as store:
        stored = find_traces(store, TraceFilter(), "oldest")
    assert [(t["trace_id"], t["span_id"]) for t in stored] == [
        (first.trace_id, first.span_id),
        (second.trace_id, second.span_id),
    ]
    assert stored[1]["links"][0]["span_id"] == child.span_id
    assert stored[1]["num_reprefilled_tokens"] == 61 + 3518 - 1 - 3168

    # So do the metrics.
    deadline = time.monotonic() + 10
    labels = (
        'gen_ai_request_model="tiny-hybrid",vllm_checkpoint_engine_label="arm-on",'
        'vllm_checkpoint_engine_rank="0"'
    )
    while (metrics := scrape(service)).get(
        "otel_sdk_exporter_span_exported_total"
    ) != 3:
        assert time.monotonic() < deadline, metrics
    assert metrics[f"vllm_prefix_cache_cached_tokens_total{{{labels}}}"] == 3168
    assert metrics[f"vllm_prefix_cache_prompt_tokens_total{{{labels}}}"] == 3695
    assert metrics[f"vllm_checkpoint_pinned_blocks{{{labels}}}"] == 0
    endpoint = f'vllm_checkpoint_stream_endpoint="{publisher.endpoint}"'
    assert metrics[f"vllm_checkpoint_stream_live{{{endpoint}}}"] == 1
    assert metrics[f"vllm_checkpoint_stream_lost_total{{{endpoint}}}"] == 0


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ("TRACES", {"traces"}),
        ("LOGS", {"logs"}),
        ("METRICS", {"metrics"}),
    ],
)
def test_a_signal_s_own_variable_starts_its_export_alone(
    tmp_path, publisher, receiver, signal, expected
):
    """Metrics are pushed when the service ends, at the latest."""
    variable = f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"
    with serving(tmp_path, publisher, **{variable: receiver.grpc_url}) as url:
        publisher.publish(Turns().events())
        deadline = time.monotonic() + 20
        while not any(
            name.startswith("vllm_checkpoint_evicted_total") for name in scrape(url)
        ):
            assert time.monotonic() < deadline
    assert {s for s in ("traces", "logs", "metrics") if receiver.count(s)} == expected
