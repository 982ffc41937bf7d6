"""The command lines of the demo: two engines, the consumer, the dashboard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ui
from vllm_fork.config import ENVIRONMENT_VARIABLES, RETENTION_ENV
from vllm_fork.demo.processes import HOST, Service, answers

MODEL_NAME: Final = "tiny-hybrid"
ENGINE_START_S: Final = 240.0
SERVICE_START_S: Final = 60.0

_BIN: Final = Path(sys.executable).parent
DASHBOARD: Final = Path(ui.__file__).parent / "app.py"


@dataclass(frozen=True)
class Arm:
    """One of the two engines that are compared. ``first_port`` of three: its HTTP
    API, its event stream, the replay of that stream."""

    label: str
    retain: bool
    first_port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.first_port}"

    @property
    def events(self) -> str:
        return f"tcp://{HOST}:{self.first_port + 1}"

    @property
    def replay(self) -> str:
        return f"tcp://{HOST}:{self.first_port + 2}"

    def ports(self) -> dict[str, int]:
        """What each port is for."""
        name = f"the engine with retention {self.label}"
        purposes = (name, f"the event stream of {name}", f"the replay of {name}")
        return {purpose: self.first_port + i for i, purpose in enumerate(purposes)}


def write_model(directory: Path, log: Path) -> None:
    """Write the tiny model, in a process of its own: it needs torch, this one not."""
    command = [_tool("vllm-fork"), "tiny-model", str(directory)]
    writer = Service("writing the tiny model", command, log, _environment({}))
    try:
        writer.wait_success(SERVICE_START_S)
    finally:
        writer.stop()


def start_engine(arm: Arm, model: Path, log: Path) -> Service:
    """Start ``vllm-fork serve`` on the tiny model; not ready yet."""
    settings = {
        "retain": arm.retain,
        "events": {
            "enabled": True,
            "endpoint": arm.events,
            "replay_endpoint": arm.replay,
            "label": arm.label,
        },
    }
    return Service(
        f"the engine with retention {arm.label}",
        [
            *(_tool("vllm-fork"), "serve", str(model)),
            *("--host", HOST, "--port", str(arm.first_port)),
            *("--served-model-name", MODEL_NAME),
            "--enable-prefix-caching",
            *("--mamba-cache-mode", "align"),
            *("--prefix-cache-retention-interval", "0"),
            *("--prefix-match-unit", "16"),
            "--enable-prompt-tokens-details",
            *("--max-model-len", "8192"),
            # Starts faster, and needs no C++ compiler.
            "--enforce-eager",
            # Without it vLLM kills the engine before it has said that it stopped.
            *("--shutdown-timeout", "5"),
            *("--logits-processors", "vllm_fork.demo.stop_at:StopAt"),
        ],
        log,
        _environment(
            {
                RETENTION_ENV: json.dumps(settings),
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
                "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
                # Threads that wait for each other are slower than one on few cores.
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        ),
    )


def engine_ready(arm: Arm) -> bool:
    """Whether its HTTP API answers."""
    return answers(f"{arm.url}/health")


def start_consumer(
    arms: list[Arm], store: str, http_port: int, otlp: str | None, log: Path
) -> Service:
    """Start ``event-consumer run`` on the streams of ``arms``."""
    endpoints = [
        argument
        for arm in arms
        for argument in ("--endpoint", arm.events, "--replay", arm.replay)
    ]
    export = ["--otlp", otlp] if otlp else []
    return Service(
        "the event consumer",
        [
            *(_tool("event-consumer"), "run", "--store", store),
            *("--http", f"{HOST}:{http_port}"),
            *endpoints,
            *export,
        ],
        log,
        _environment({}),
    )


def start_dashboard(store: str, port: int, log: Path) -> Service:
    """Start ``python -m ui``."""
    return Service(
        "the dashboard",
        [sys.executable, "-m", "ui", "--store", store, "--port", str(port), "--wait"],
        log,
        _environment({}),
    )


def _tool(name: str) -> str:
    """A console script of this environment, activated or not."""
    return str(_BIN / name)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings that would change the demo."""
    ours = (*ENVIRONMENT_VARIABLES, "VLLM_PLUGINS")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("OTEL_", "EVENT_CONSUMER_"))
    }
    return {**kept, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **extra}
