"""What docker-compose.yml promises, as far as reading it tells: settings in one place,
nothing that an older Compose rejects, nothing unpinned, nothing unconfined."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_images
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]
VARIABLES = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", TEXT))
# Rejected by Compose 1.29, or read otherwise by it.
UNKNOWN_TO_V1 = {"name", "include", "develop", "gpus", "start_interval", "required"}


def settings() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def keys(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from node
        for value in node.values():
            yield from keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys(value)


def test_one_file_has_every_setting_with_its_default():
    assert settings() == {"COMPOSE_PROFILES": "dialog", **VARIABLES}


def test_no_variable_is_required():
    """Without a .env it works: each variable has a default, the same everywhere."""
    used = re.findall(r"\$\{([A-Z_]+)([^}]*)\}", TEXT)
    assert {(name, f":-{VARIABLES[name]}") for name, _ in used} == set(used)
    assert not re.search(r"\$[A-Za-z]", TEXT)


def test_older_compose_knows_every_key():
    assert not UNKNOWN_TO_V1 & set(keys(COMPOSE))
    assert "version" not in COMPOSE


@pytest.mark.parametrize("file", sorted((ROOT / "docker").glob("*.Dockerfile")))
def test_builder_before_buildkit_reads_it(file):
    text = file.read_text()
    assert not re.search(r"(?m)^# *syntax=|<<|--mount|--link", text)
    assert "latest" not in text


@pytest.mark.parametrize("service", SERVICES)
def test_service_is_pinned_and_confined(service):
    found = SERVICES[service]
    image = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", found["image"])
    assert re.search(r":v?\d+\.\d+", image)
    assert found["read_only"]
    assert found["cap_drop"] == ["ALL"]
    for port in found.get("ports", ()):
        assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:")
    if service == "dialog":
        assert found["restart"] == "no"
    else:
        assert found["restart"] == "unless-stopped"
        assert found["healthcheck"]["test"]


def test_store_is_reachable_from_inside_only():
    assert COMPOSE["networks"]["inside"]["internal"]
    assert SERVICES["postgres"]["networks"] == ["inside"]
    assert "ports" not in SERVICES["postgres"]


def test_stand_ins_bear_the_names_that_are_asked_for():
    assert {
        stand_in_images.PYTHON,
        stand_in_images.POSTGRES,
        stand_in_images.JAEGER,
    } == {VARIABLES[f"{name}_IMAGE"] for name in ("PYTHON", "POSTGRES", "JAEGER")}


def test_compose_1_29_reads_it(tmp_path):
    """All profiles, without a .env. GPU counts other than numbers and `all`, which it
    reads and then rejects, are not in the file."""
    compose = shutil.which("docker-compose")
    if not compose or " 1." not in _output(compose, "version", "--short", prefix=" "):
        pytest.skip("NOT TESTED: no Compose 1.29 (apt-get install docker-compose)")
    (tmp_path / "empty").touch()
    read = yaml.safe_load(
        _output(
            *(compose, "--env-file", str(tmp_path / "empty")),
            *("--profile", "dialog", "--profile", "gpu"),
            *("--file", str(ROOT / "docker-compose.yml"), "config"),
        )
    )
    assert read["services"].keys() == SERVICES.keys()
    gpu = read["services"]["vllm-gpu"]["deploy"]["resources"]["reservations"]
    assert gpu["devices"][0]["count"] == "all"


def _output(*command: str, prefix: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return prefix + done.stdout
