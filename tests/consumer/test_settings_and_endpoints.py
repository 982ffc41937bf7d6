"""What the settings say, and which streams they stand for."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from event_consumer.endpoints import Endpoint, ResolverError, expand
from event_consumer.settings import (
    ConsumerSettings,
    EndpointSettings,
    SettingsError,
    load_settings,
)
from vllm_fork.config import endpoint_of_rank
from vllm_fork.events import DEFAULT_ENDPOINT, DEFAULT_REPLAY_ENDPOINT


def streams(**given) -> list[tuple[str, str | None]]:
    found = expand([EndpointSettings(**given)])
    return [(each.endpoint, each.replay) for each in found]


def test_without_settings_the_engine_s_defaults_are_read():
    settings = load_settings(None, {})
    (endpoint,) = settings.endpoints
    assert (endpoint.endpoint, endpoint.replay) == (
        DEFAULT_ENDPOINT,
        DEFAULT_REPLAY_ENDPOINT,
    )
    assert settings.store == "sqlite:///vllm-fork.db"


def test_the_command_line_comes_before_the_environment_before_the_file(
    tmp_path, monkeypatch
):
    config = tmp_path / "consumer.toml"
    config.write_text('store = "file"\notlp = "file"\nkeep_days = 1')
    monkeypatch.setenv("EVENT_CONSUMER_STORE", "environment")
    monkeypatch.setenv("EVENT_CONSUMER_OTLP", "environment")
    settings = load_settings(config, {}, store="given")
    assert (settings.store, settings.otlp, settings.keep_days) == (
        "given",
        "environment",
        1,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stroe = 'x'", "did you mean store?"),
        ("[[endpoints]]\nendpiont = 'tcp://a:1'", "did you mean endpoint?"),
        ("[[endpoints]]\nendpoint = 'http://a:1'", "must be tcp://HOST:PORT"),
        ("[[endpoints]]\nendpoint = 'tcp://*:1'", "must name a host"),
        ("[[endpoints]]\nendpoint = 'tcp://a:0'", "port from 1 to 65535"),
        ("[[endpoints]]\nendpoint = 'ipc://'", "without a path"),
        (
            "[[endpoints]]\nendpoint = 'tcp://a:1'\ncurve_secret_key_file = 'k'",
            "needs curve_server_key",
        ),
        ("flush_interval_s = 0", "greater than 0"),
        ("keep_days = 'long'", "valid number"),
        ("http = 'localhost'", "HOST:PORT or off"),
        ("flush_interval_s = inf", "finite number"),
        ("keep_days = inf", "less than or equal to 36500"),
        ("endpoints = 5", "endpoints is a list"),
        ("endpoints = ['tcp://a:1']", "endpoints is a list"),
        ("endpoints = []", "names no stream"),
        (
            "[[endpoints]]\nendpoint = 'tcp://a:1'\n" * 2,
            "names tcp://a:1 twice",
        ),
        (
            "[[endpoints]]\nendpoint = 'tcp://a:1'\nranks = 3\n"
            "[[endpoints]]\nendpoint = 'tcp://a:3'\n",
            "names tcp://a:3 twice",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, words):
    config = tmp_path / "consumer.toml"
    config.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(config, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_variable_is_refused():
    with pytest.raises(SettingsError, match="did you mean EVENT_CONSUMER_STORE"):
        load_settings(None, {"EVENT_CONSUMER_STOER": "x"})


@pytest.mark.parametrize("value", ["tcp://a:1", "[", '["tcp://a:1"]', "[{}", "7"])
def test_a_variable_that_is_no_list_of_endpoints_is_one_sentence(monkeypatch, value):
    monkeypatch.setenv("EVENT_CONSUMER_ENDPOINTS", value)
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {})
    assert "endpoints" in str(caught.value).lower()
    assert '[{"endpoint": "tcp://HOST:5567"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_are_numbered_as_the_engine_numbers_them():
    found = streams(endpoint="tcp://h:5567", replay="tcp://h:5600", ranks=3)
    assert found == [
        (
            endpoint_of_rank("tcp://h:5567", rank),
            endpoint_of_rank("tcp://h:5600", rank),
        )
        for rank in range(3)
    ]
    assert streams(endpoint="ipc:///run/e", ranks=2) == [
        ("ipc:///run/e", None),
        (endpoint_of_rank("ipc:///run/e", 1), None),
    ]


def answers(*addresses: str):
    return lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in addresses]


def fails(errno: int):
    def lookup(*_, **__):
        raise socket.gaierror(errno, "said the resolver")

    return lookup


def test_a_name_is_each_of_its_addresses(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", answers("10.0.0.2", "10.0.0.1", "fd::1"))
    assert streams(endpoint="dns+tcp://pods:5567", replay="dns+tcp://pods:5568") == [
        ("tcp://10.0.0.1:5567", "tcp://10.0.0.1:5568"),
        ("tcp://10.0.0.2:5567", "tcp://10.0.0.2:5568"),
        ("tcp://[fd::1]:5567", "tcp://[fd::1]:5568"),
    ]


def test_a_name_without_addresses_has_no_streams(monkeypatch):
    """No replica is ready."""
    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.EAI_NONAME))
    assert streams(endpoint="dns+tcp://pods:5567") == []


def test_a_resolver_that_does_not_answer_says_nothing(monkeypatch):
    """Nobody leaves because of it."""
    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.EAI_AGAIN))
    with pytest.raises(ResolverError, match="cannot look up pods"):
        streams(endpoint="dns+tcp://pods:5567")


def test_an_endpoint_named_twice_is_one_stream():
    settings = [EndpointSettings(endpoint="tcp://a:1")] * 2
    assert expand(settings) == [Endpoint("tcp://a:1", None, None, settings[0])]


@pytest.mark.parametrize(
    ("http", "address"),
    [("off", None), ("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0))],
)
def test_the_address_of_the_status_server(http, address):
    assert ConsumerSettings(http=http).http_address() == address


@pytest.mark.parametrize("document", ["docs/consumer.md", "docs/operations.md"])
def test_who_is_shown_a_postgresql_is_told_what_brings_its_driver(document):
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert any(
        "psycopg" in need for need in extras["optional-dependencies"]["postgres"]
    )
    text = (root / document).read_text()
    assert "postgresql://" in text
    assert "pip install '.[postgres]'" in text
