"""From a real engine through the consumer's command to a collector and the store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from event_consumer import names
from event_consumer.otlp_receiver import OtlpReceiver

EVENT_CONSUMER = str(Path(sys.executable).parent / "event-consumer")


@pytest.fixture(scope="module")
def seen(engine, tmp_path_factory):
    """Two turns as the client, a collector and the store saw them."""
    assert engine.reset()
    store = f"sqlite:///{tmp_path_factory.mktemp('store') / 'checkpoints.db'}"
    log = tmp_path_factory.mktemp("log") / "consumer.log"
    prompt = engine.new_prompt(400)
    first = engine.ask(prompt, 400, session_id="trace")
    history = [*prompt, *first.token_ids, *engine.new_prompt(50)]
    second = engine.ask(history, 20, session_id="trace")
    with OtlpReceiver() as receiver, log.open("wb") as output:
        consumer = subprocess.Popen(
            [
                *(EVENT_CONSUMER, "run", "--store", store, "--http", "off"),
                *("--endpoint", engine.events[0], "--replay", engine.events[1]),
                *("--otlp", receiver.grpc_url),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            receiver.wait_for(
                lambda: {first.request_id, second.request_id} <= spans(receiver).keys(),
                timeout_s=60,
            )
        finally:
            consumer.terminate()
            consumer.wait(30)
        yield (first, second), receiver, store


def spans(receiver):
    """Request spans by the id that the client saw."""
    return {
        span.attributes.get(names.REQUEST_ID): span
        for span in receiver.spans(names.REQUEST_SPAN)
    }


def test_second_turn_links_to_the_span_that_published_what_it_hit(seen):
    (first, second), receiver, _ = seen
    found = spans(receiver)
    targets = {link.span_id for link in found[second.request_id].links}
    (published,) = [
        span
        for span in receiver.spans(names.CHECKPOINT_SPAN)
        if span.span_id in targets
    ]
    assert published.parent_span_id == found[first.request_id].span_id
    assert published.attributes[names.STAGE] == "published"
    assert published.attributes[names.BOUNDARY] == second.cached == 799


def test_client_trace_and_store_tell_one_reuse(seen):
    turns, receiver, store = seen
    found = spans(receiver)
    answer = subprocess.run(
        [EVENT_CONSUMER, "requests", "--store", store, "--session", "trace", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    stored = {
        row["external_request_id"]: row
        for row in json.loads(answer.stdout.splitlines()[-1])["requests"]
    }
    assert stored.keys() == {turn.request_id for turn in turns}
    for turn in turns:
        row, span = stored[turn.request_id], found[turn.request_id]
        assert row["num_cached_tokens"] == turn.cached
        assert span.attributes[names.REUSE_DEPTH] == turn.cached
        assert span.attributes[names.CONVERSATION_ID] == "trace"
        assert span.trace_id == row["trace_id"]
