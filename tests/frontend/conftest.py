"""Model folders of which the configuration alone is real: what the front end reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fork.config import ENVIRONMENT_VARIABLES
from vllm_fork.tiny_model import tiny_config

DENSE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _folder(tmp_path_factory.mktemp("hybrid"), tiny_config())


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without recurrent layers."""
    return _folder(tmp_path_factory.mktemp("dense"), DENSE_CONFIG)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What vllm_fork says. (vLLM's logger keeps its records from caplog.)"""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm_fork")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def _folder(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = b"{}"
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header
    )
    return folder


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT_VARIABLES, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("ENDPOINT", "PROTOCOL", "TRACES_ENDPOINT", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The commands would set them, and vLLM would keep them for the tests to come.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.__stderr__")
