"""A real CPU engine with retention on, in this process, for the tests of a module."""

from __future__ import annotations

import gc
import itertools
import json
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_fork.events import END_OF_REPLAY, BatchDecoder, seq_from_bytes, seq_to_bytes
from vllm_fork.tiny_model import CONTROL_TOKENS, VOCAB_SIZE, write_tiny_model

HASH_UNIT = 16
REPLAY_TIMEOUT_MS = 5_000


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(directory)
    return directory


@pytest.fixture
def unused_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """What came back for one request. ``logprobs``: one a token, of that token."""

    request_id: str
    token_ids: list[int]
    cached: int
    finish_reason: str
    logprobs: list[float]


class Engine:
    """An in-process engine, and the addresses of its two streams.

    ``events``: our stream and its replay; ``kv_events``: vLLM's own, likewise.
    """

    block_size = 384
    """Tokens, of the tiny model on a CPU."""

    def __init__(
        self, llm: Any, events: tuple[str, str], kv_events: tuple[str, str]
    ) -> None:
        self.llm = llm
        self.events = events
        self.kv_events = kv_events
        self._ids = itertools.count()
        self._random = random.Random(20261129)

    def new_prompt(self, length: int) -> list[int]:
        """A prompt that shares no prefix with any other one."""
        plain = range(len(CONTROL_TOKENS), VOCAB_SIZE)
        return [self._random.choice(plain) for _ in range(length)]

    def ask(
        self,
        prompt: Sequence[int],
        length: int,
        *,
        stop: bool = True,
        request_id: str | None = None,
        session_id: str | None = None,
    ) -> Answer:
        """Decode ``length`` tokens greedily; the last is the stop token if ``stop``."""
        from vllm import SamplingParams

        request_id = request_id or f"test-{next(self._ids)}"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=length,
            logprobs=0,
            extra_args={"stop_at": length if stop else length + 1},
        )
        engine = self.llm.llm_engine
        engine.add_request(
            request_id,
            {"prompt_token_ids": list(prompt)},
            params,
            session_id=session_id,
        )
        while True:
            for output in engine.step():
                if output.finished:
                    return _answer(output)

    def reset(self) -> bool:
        """Empty the prefix cache; False while any block is held."""
        return bool(self.llm.llm_engine.reset_prefix_cache())

    def replay_events(self) -> list[Any]:
        """Every event of the checkpoint stream so far."""
        decoder = BatchDecoder()
        batches = [decoder.decode(p) for p in replay(self.events[1])]
        assert not any(batch.errors or batch.num_unknown for batch in batches)
        return [event for batch in batches for event in batch.events]

    def replay_kv_events(self) -> list[bytes]:
        """The payloads of vLLM's own stream so far."""
        return replay(self.kv_events[1])

    def events_of(self, request_id: str) -> list[Any]:
        """The events of one request up to its end, awaited."""
        return wait_for(
            lambda: _until_finished(
                [
                    event
                    for event in self.replay_events()
                    if getattr(event, "external_request_id", None) == request_id
                ]
            )
        )


def _until_finished(events: list[Any]) -> list[Any] | None:
    ended = any(type(event).__name__ == "RequestFinished" for event in events)
    return events if ended else None


def _addresses(streams: Path, name: str) -> tuple[str, str]:
    return f"ipc://{streams / name}", f"ipc://{streams / name}-replay"


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return Answer(
        request_id=output.request_id,
        token_ids=list(completion.token_ids),
        cached=output.num_cached_tokens,
        finish_reason=completion.finish_reason,
        logprobs=[candidates[token].logprob for token, candidates in chosen],
    )


def replay(address: str, first: int = 0) -> list[bytes]:
    """The payloads that a publisher, ours or vLLM's, replays from ``first`` on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send_multipart([b"", seq_to_bytes(first)])
        payloads = []
        while socket.poll(REPLAY_TIMEOUT_MS):
            *_, seq, payload = socket.recv_multipart()
            if seq == END_OF_REPLAY:
                return payloads
            assert seq_from_bytes(seq) >= first
            payloads.append(payload)
        raise TimeoutError(f"no end of the replay of {address}")


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first value of ``condition()`` that is not None."""
    deadline = time.monotonic() + timeout_s
    while (value := condition()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come true")
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def engine(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Retention and both event streams on; greedy, one request at a time."""
    streams = tmp_path_factory.mktemp("streams")
    events = _addresses(streams, "ours")
    kv_events = _addresses(streams, "theirs")
    retention = {
        "retain": True,
        "events": {
            "endpoint": events[0],
            "replay_endpoint": events[1],
            "label": "end-to-end",
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CHECKPOINT_RETENTION", json.dumps(retention))
        from vllm import LLM
        from vllm.config import KVEventsConfig

        llm = LLM(
            str(model_dir),
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            prefix_cache_retention_interval=0,
            prefix_match_unit=HASH_UNIT,
            max_model_len=8192,
            enforce_eager=True,
            logits_processors=["vllm_fork.demo.stop_at:StopAt"],
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=kv_events[0],
                replay_endpoint=kv_events[1],
                topic="kv-events",
            ),
        )
        yield Engine(llm, events, kv_events)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
