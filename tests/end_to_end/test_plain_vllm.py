"""The reference's own commands: plain ``vllm serve``, with the package installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllm_fork.demo.dialog import DIALOG, play
from vllm_fork.demo.processes import HOST, Service, answers


@pytest.fixture
def server(model_dir, tmp_path, unused_port):
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(model_dir)),
        *("--enable-prefix-caching", "--mamba-cache-mode", "align"),
        *("--prefix-match-unit", "16", "--enable-prompt-tokens-details"),
        # Not the reference's: a small server on a loopback port, and real stops.
        *("--host", HOST, "--port", str(unused_port)),
        *("--max-model-len", "8192", "--enforce-eager"),
        *("--logits-processors", "vllm_fork.demo.stop_at:StopAt"),
    ]
    environment = {
        **os.environ,
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "0",
        "VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS": "1",
    }
    url = f"http://{HOST}:{unused_port}"
    service = Service("vllm serve", command, tmp_path / "server.log", environment)
    try:
        service.wait_ready(lambda: answers(f"{url}/health"), timeout_s=240)
        yield url
    finally:
        service.stop()


def test_full_messages_resume_from_the_last_answer(server):
    """As the client of the reference does: the whole message goes back."""
    first, second = play(server, "plain", DIALOG[:2])
    assert second.cached == first.prompt + first.completion - 1
