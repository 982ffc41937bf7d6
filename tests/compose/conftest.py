"""The Compose project of the test: built, started, and taken down again."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import docker_engine  # noqa: E402
import stand_in_images  # noqa: E402
from docker_engine import CACHE, Docker, NoDocker, wait_until  # noqa: E402

PROJECT = "vllm-fork-test"
BUILT = ("event-consumer", "ui", "vllm")
LONG_RUNNING = (
    "vllm",
    "vllm-baseline",
    "event-consumer",
    "ui",
    "postgres",
    "jaeger",
)
BUILD_S = 1500
HEALTHY_S = 600
WHEELS_PORT = 8765
"""Always the same: it is a build argument, and another one builds all again."""
# Not the defaults: somebody may be running the project beside the test.
PORTS = {
    "UI_PORT": "18501",
    "JAEGER_PORT": "18686",
    "VLLM_PORT": "18000",
    "VLLM_BASELINE_PORT": "18001",
    "CONSUMER_PORT": "18464",
}


class Stack:
    """The running project, as its operator sees it."""

    def __init__(self, docker: Docker, environment: dict[str, str]) -> None:
        self.docker = docker
        self._environment = environment

    def compose(self, *arguments: str, **extra: Any) -> str:
        """Run ``docker compose …``; what it prints."""
        files = [ROOT / "docker-compose.yml", ROOT / "tests/compose/override.yml"]
        done = self.docker(
            *("compose", "--project-name", PROJECT, "--env-file", os.devnull),
            *(argument for file in files for argument in ("--file", str(file))),
            *arguments,
            environment=self._environment,
            **extra,
        )
        return str(done.stdout)

    def container(self, service: str) -> str:
        """Its id."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def health(self, service: str) -> str:
        """``healthy``, ``starting``, ``unhealthy`` or what the container does else."""
        state = self.docker.inspect(self.container(service))["State"]
        return str(state.get("Health", {}).get("Status") or state["Status"])

    def wait_healthy(self, *services: str, timeout_s: float = HEALTHY_S) -> None:
        """Wait for them, and show the log of what does not get there."""
        for service in services:
            try:
                wait_until(
                    f"{service} is healthy",
                    lambda service=service: self.health(service) == "healthy",
                    timeout_s,
                )
            except AssertionError as error:
                log = self.compose("logs", "--no-color", "--tail", "40", service)
                raise AssertionError(f"{error}\n{log}") from None

    def get(self, port: str, path: str = "") -> bytes:
        """GET from a published port."""
        url = f"http://127.0.0.1:{PORTS[port]}{path}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return bytes(response.read())

    def stored(self) -> dict[str, dict[str, Any]]:
        """The stored requests by the client's id, from the consumer's own command."""
        answer = self.compose(
            *("exec", "-T", "event-consumer", "event-consumer", "requests"),
            *("--limit", "1000", "--json"),
        )
        rows = json.loads(answer.splitlines()[-1])["requests"]
        assert len({row["request_id"] for row in rows}) == len(rows)
        return {row["external_request_id"]: row for row in rows}

    def streams(self) -> list[dict[str, Any]]:
        """How the streams are, from the consumer's own command."""
        command = ("exec", "-T", "event-consumer", "event-consumer", "health", "--json")
        answer = self.compose(*command, check=False)
        streams: list[dict[str, Any]] = json.loads(answer.splitlines()[-1])["streams"]
        return streams


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A Docker engine; without one everything here is skipped, and says so."""
    try:
        with docker_engine.running() as found:
            yield found
    except NoDocker as error:
        print(f"\n*** SKIPPED: docker compose is not tested: {error}", file=sys.stderr)
        pytest.skip(f"NOT TESTED with Docker: {error}")


@pytest.fixture(scope="session")
def stack(docker: Docker) -> Iterator[Stack]:
    """The project with every image built and every service started."""
    wanted = stand_in_images.names(docker)
    # What the host has set for Compose or pip must not decide what the test sees.
    environment = {
        **PORTS,
        "PYTHON_IMAGE": wanted.python,
        "ENGINE_PYTHON_IMAGE": wanted.engine_python,
        "POSTGRES_IMAGE": wanted.postgres,
        "JAEGER_IMAGE": wanted.jaeger,
        "COMPOSE_PROFILES": "",
    }
    stack = Stack(docker, environment)
    with contextlib.ExitStack() as running:
        with timed("base images"):
            stand_in_images.make_pythons(docker, wanted)
        with timed("stand-in for PostgreSQL"):
            stand_in_images.make_postgres(docker, wanted)
        environment.update(_pip_settings(running))
        for service in BUILT:
            with timed(f"image of {service}"):
                stack.compose("build", service, timeout_s=BUILD_S)
        with timed("stand-in for Jaeger"):
            # Compose names those of the services it depends on as well.
            images = stack.compose("config", "--images", "event-consumer").split()
            image = next(name for name in images if "event-consumer" in name)
            stand_in_images.make_jaeger(docker, wanted, image)
        running.callback(stack.compose, "down", "--volumes", timeout_s=300, check=False)
        with timed("compose up"):
            stack.compose("up", "--detach", "--no-build", timeout_s=HEALTHY_S * 2)
            stack.wait_healthy(*LONG_RUNNING)
        yield stack
    if docker.own:
        # Each run leaves the images of the one before without a name.
        docker("image", "prune", "--force", timeout_s=300)
        docker("builder", "prune", "--force", "--keep-storage=6GB", timeout_s=300)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"[compose] {what}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def _pip_settings(running: contextlib.ExitStack) -> dict[str, str]:
    """This machine's way to packages, for the build stages alone: its certificates,
    and the wheel of torch that its pip finds, over HTTP on loopback."""
    wheels = CACHE / "wheels"
    wheels.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    if not list(wheels.glob("torch-*.whl")):
        torch = next(
            line
            for line in (ROOT / "requirements/torch-from-pypi.txt").read_text().split()
            if line.startswith("torch==")
        )
        command = [*pip, "download", "--quiet", "--no-deps", f"{torch}+cpu"]
        subprocess.run(command, cwd=wheels, check=False, timeout=600)
    handler = functools.partial(_QuietHandler, directory=str(wheels))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    running.callback(server.shutdown)
    settings = {"PIP_FIND_LINKS": f"http://127.0.0.1:{WHEELS_PORT}/"}
    for option in ("index-url", "extra-index-url"):
        given = subprocess.run(
            [*pip, "config", "get", f"global.{option}"], capture_output=True, text=True
        )
        addresses = [a for a in given.stdout.split() if not a.startswith("file:")]
        if given.returncode == 0 and addresses:
            settings[f"PIP_{option.upper().replace('-', '_')}"] = " ".join(addresses)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        if name in os.environ:
            settings[name] = os.environ[name]
    settings["PIP_CERT"] = str(stand_in_images.CERTIFICATES)
    return settings


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
