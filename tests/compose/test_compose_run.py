"""``docker compose up`` on a real engine: one dialog, followed to every place that
tells of it, and what happens when the consumer dies.

Public images are stood in for (``stand_in_images.py``); everything of this project is
the image that its Dockerfile makes. Long: ``make test-compose``.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import urllib.request
from typing import Any

import docker_engine
import pytest
from docker_engine import wait_until

from event_consumer import names
from vllm_fork.demo.dialog import DIALOG

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]

SERVICES = ("vllm", "vllm-baseline", "event-consumer", "ui", "postgres", "jaeger")
MAX_IMAGE_BYTES = 400_000_000
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def dialog(stack: Any) -> dict[str, list[dict[str, Any]]]:
    """What the client saw: the turns of each arm, with their cached tokens."""
    said = stack.compose(
        *("--profile", "dialog", "run", "--rm", "--no-deps", "-T", "dialog"),
        timeout_s=900,
    )
    print(said)
    played: dict[str, list[dict[str, Any]]] = json.loads(said.splitlines()[-1])
    assert {arm: len(turns) for arm, turns in played.items()} == {
        "off": len(DIALOG),
        "on": len(DIALOG),
    }
    return played


def cached_by_id(dialog: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    return {t["request_id"]: t["cached"] for turns in dialog.values() for t in turns}


@pytest.mark.parametrize("service", ["event-consumer", "ui"])
def test_small_images_without_torch_and_vllm(stack, service):
    image = stack.docker.inspect(stack.container(service))["Image"]
    assert stack.docker.inspect(image)["Size"] < MAX_IMAGE_BYTES
    found = (
        "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('vllm'))"
    )
    said = stack.compose("exec", "-T", service, "python", "-c", found)
    assert said.split() == ["None", "None"]


@pytest.mark.parametrize("service", SERVICES)
def test_confined(stack, service):
    """No root, no capabilities, nothing to write to, ports on loopback only."""
    found = stack.docker.inspect(stack.container(service))
    host = found["HostConfig"]
    assert found["Config"]["User"] not in ("", "root", "0")
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    bound = [b["HostIp"] for bs in (host["PortBindings"] or {}).values() for b in bs]
    assert set(bound) <= {"127.0.0.1"}
    assert found["State"]["Health"]["Status"] == "healthy"


def test_dashboard_cannot_write(stack):
    """Its role may read the tables and nothing else."""
    write = (
        "import os, psycopg\n"
        "url = os.environ['VLLM_FORK_STORE_URL']\n"
        "with psycopg.connect(url) as connection:\n"
        "    connection.execute('set transaction read write')\n"
        "    print(connection.execute('select count(*) from meta').fetchone()[0])\n"
        "    connection.execute('delete from meta')\n"
    )
    said = stack.docker(
        *("exec", stack.container("ui"), "python", "-c", write), check=False
    )
    assert said.stdout.strip() == "1"
    assert "permission denied for table meta" in said.stderr


def test_dialog_reuses_more_with_retention(dialog):
    totals = {arm: sum(t["cached"] for t in turns) for arm, turns in dialog.items()}
    assert totals["on"] > totals["off"] > 0


def test_store_tells_what_the_client_saw(stack, dialog):
    client = cached_by_id(dialog)
    stored = wait_until(
        "all turns are stored",
        lambda: _finished(stack, client),
        SETTLE_S,
    )
    assert {i: stored[i]["num_cached_tokens"] for i in client} == client
    labels = {t["request_id"]: arm for arm, turns in dialog.items() for t in turns}
    assert {i: stored[i]["label"] for i in client} == labels
    off = [stored[t["request_id"]] for t in dialog["off"]]
    assert {row["no_checkpoint_reason"] for row in off} == {"disabled"}


def test_dashboard_shows_what_the_client_saw(stack, dialog):
    """The figure of each request's page, in a browser."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = "/usr/bin/chromium"
    if not os.path.exists(chromium):
        pytest.skip("NOT TESTED in a browser: apt-get install chromium")
    client = cached_by_id(dialog)
    wait_until("all turns are stored", lambda: _finished(stack, client), SETTLE_S)
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    shown: dict[str, str] = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page()
        page.set_default_timeout(60_000)
        for request_id in client:
            port = _port(stack, "ui", "8501/tcp")
            page.goto(f"http://127.0.0.1:{port}/request?request={request_id}")
            figure = page.get_by_test_id("stMetric").filter(has_text="Reused").first
            value = figure.get_by_test_id("stMetricValue")
            shown[request_id] = value.inner_text().strip().replace(",", "")
        browser.close()
    assert shown == {i: str(count) for i, count in client.items()}


def test_traces_tell_what_the_client_saw(stack, dialog):
    client = cached_by_id(dialog)

    def arrived() -> dict[str, Any] | None:
        spans = json.loads(stack.get("JAEGER_PORT", "/spans"))
        found = {
            span["attributes"].get(names.REQUEST_ID): span
            for span in spans
            if span["name"] == names.REQUEST_SPAN
        }
        return found if client.keys() <= found.keys() else None

    spans = wait_until("all spans have arrived", arrived, SETTLE_S)
    told = {i: spans[i]["attributes"][names.REUSE_DEPTH] for i in client}
    assert told == client


def test_consumer_killed_and_back(stack):
    """SIGKILL in the middle of requests: the restart policy brings it back, and every
    request is there, once, whole, with the reuse that the client saw."""
    before = stack.docker.inspect(stack.container("event-consumer"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(_ask, stack, index) for index in range(24)]
        asked[4].result(timeout=120)
        os.kill(before["State"]["Pid"], signal.SIGKILL)
        client = dict(future.result(timeout=300) for future in asked)
    wait_until(
        "the consumer was started again",
        lambda: _restarts(stack) > before["RestartCount"],
        60,
    )
    stack.wait_healthy("event-consumer", timeout_s=120)
    stored = wait_until(
        "all requests are stored", lambda: _finished(stack, client), SETTLE_S
    )
    assert {i: stored[i]["num_cached_tokens"] for i in client} == client
    assert not any(stored[i]["incomplete"] for i in client)
    streams = stack.streams()
    assert len(streams) == 2
    assert [s["num_lost"] for s in streams] == [0, 0]
    assert [s["num_dropped"] for s in streams] == [0, 0]


def test_down_leaves_nothing(stack):
    """The last test: it takes the project down."""
    project = "vllm-fork-test"
    assert all(docker_engine.of_project(stack.docker, project).values())
    stack.compose("down", "--volumes", timeout_s=300)
    assert not any(docker_engine.of_project(stack.docker, project).values())


def _finished(stack: Any, client: dict[str, int]) -> dict[str, Any] | None:
    """The stored requests once those of ``client`` are among them and over."""
    stored = stack.stored()
    done = {i for i, row in stored.items() if row["status"] == "finished"}
    return stored if client.keys() <= done else None


def _restarts(stack: Any) -> int:
    return int(stack.docker.inspect(stack.container("event-consumer"))["RestartCount"])


def _port(stack: Any, service: str, port: str) -> str:
    found = stack.docker.inspect(stack.container(service))
    return str(found["NetworkSettings"]["Ports"][port][0]["HostPort"])


def _ask(stack: Any, index: int) -> tuple[str, int]:
    """A short question to the engine with retention on: its id and cached tokens."""
    body = {
        "model": "tiny-hybrid",
        "messages": [{"role": "user", "content": "How many stars? " * (1 + index % 4)}],
        "max_completion_tokens": 24,
        "session_id": f"kill-{index % 4}",
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{_port(stack, 'vllm', '8000/tcp')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["id"], details.get("cached_tokens") or 0
