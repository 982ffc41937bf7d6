"""One place a setting, and one sentence for every mistake."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq.auth
from hypothesis import given
from hypothesis import strategies as st

from vllm_fork.config import (
    ENVIRONMENT_VARIABLES,
    RETAIN_ENV,
    RETENTION_ENV,
    RETENTION_INTERVAL_ENV,
    SERVE_ENV,
    EventSettings,
    Settings,
    SettingsError,
    check_data_parallel,
    endpoint_of_rank,
    exposure_warning,
    load_settings,
    misspelt_variables,
)


def load(given: object = None, **environ: str) -> Settings:
    if given is not None:
        environ[RETENTION_ENV] = json.dumps(given)
    return load_settings(environ)


def test_nothing_is_on_by_itself():
    settings = load()
    assert not settings.active
    assert (settings.retain, settings.events.enabled) == (False, False)


def test_both_are_on_under_vllm_fork_serve():
    settings = load(**{SERVE_ENV: "1"})
    assert (settings.retain, settings.events.enabled) == (True, True)


def test_what_is_said_beats_what_vllm_fork_serve_assumes():
    settings = load({"retain": False, "events": False}, **{SERVE_ENV: "1"})
    assert not settings.active


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("0", False), ("true", True), ("False", False), ("", False)],
)
def test_the_reference_s_switch(text, expected):
    assert load(**{RETAIN_ENV: text}).retain is expected


def test_naming_an_event_setting_asks_for_events():
    assert load({"events": {"label": "a"}}).events.enabled
    assert load({"events": True}).events.enabled
    assert not load({"events": {"label": "a", "enabled": False}}).events.enabled


def test_additional_config_is_the_same_object():
    given = {"copy_interval": 64, "publish_on": ["stop", "length"], "exact_tail": False}
    settings = load_settings({}, {"checkpoint_retention": given, "other": 1})
    assert settings == load(given)
    assert settings.publish_on == {"stop", "length"}


@pytest.mark.parametrize("foreign", [None, {}, {"other": {}}, object(), "text"])
def test_an_additional_config_without_ours(foreign):
    assert load_settings({}, foreign) == Settings()


def test_sources_are_merged():
    settings = load_settings(
        {RETAIN_ENV: "1", RETENTION_ENV: '{"events": {"label": "a"}}'},
        {"checkpoint_retention": {"events": {"queue_size": 5}, "retain": True}},
    )
    assert settings.retain
    assert (settings.events.label, settings.events.queue_size) == ("a", 5)


@pytest.mark.parametrize("key", ["checkpoint_retentoin", "checkpoint-retention"])
def test_an_additional_config_with_ours_misspelt(key):
    with pytest.raises(SettingsError, match=f"{key}.*write 'checkpoint_retention'"):
        load_settings({}, {key: {"exact_tail": False}})


@pytest.mark.parametrize("key", ["checkpoint_config", "retention", "checkpoint"])
def test_an_additional_config_with_another_s(key):
    assert load_settings({}, {key: {"exact_tail": False}}) == load_settings({})


@pytest.mark.parametrize(
    ("environ", "additional", "sentence"),
    [
        (
            {RETAIN_ENV: "1", RETENTION_ENV: '{"retain": false}'},
            None,
            f"{RETENTION_ENV} sets retain to false but {RETAIN_ENV} sets it to true",
        ),
        (
            {RETENTION_ENV: '{"events": {"label": "a"}}'},
            {"checkpoint_retention": {"events": {"label": "b"}}},
            "--additional-config checkpoint_retention sets events.label to",
        ),
    ],
)
def test_contradictions_are_refused(environ, additional, sentence):
    with pytest.raises(SettingsError) as error:
        load_settings(environ, additional)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"exact_tial": 1}, "'exact_tial' (did you mean 'exact_tail'?)"),
        ({"events": {"topik": "a"}}, "'events.topik' (did you mean 'topic'?)"),
        ({"zzz": 1}, "unknown setting 'zzz'; known are retain, exact_tail"),
        ({"copy_interval": -1}, "copy_interval to -1: expected int >= 0."),
        ({"copy_interval": 1.5}, "copy_interval to 1.5: expected int, got float."),
        ({"retain": "yes"}, 'retain to "yes": expected bool, got str.'),
        ({"events": {"queue_size": 0}}, "events.queue_size to 0: expected int >= 1."),
        ({"events": {"heartbeat_s": 0}}, "events.heartbeat_s to 0: expected"),
        ({"events": {"overflow": "drop_old"}}, "(did you mean 'drop_oldest'?)"),
        ({"publish_on": ["lenght"]}, "(did you mean 'length'?): expected any of stop"),
        ({"publish_on": "stop"}, 'publish_on to "stop": expected array, got str.'),
        ({"events": {"topic": ""}}, "events.topic to nothing"),
        ({"events": {"endpoint": "localhost"}}, "expected tcp://ADDRESS:PORT or ipc"),
        ({"events": {"endpoint": "tcp://127.0.0.1:x"}}, "expected tcp://ADDRESS:PORT"),
        ({"events": {"endpoint": "tcp://h:99999"}}, "expected tcp://ADDRESS:PORT"),
        ({"events": {"endpoint": "inproc://x"}}, "expected tcp://ADDRESS:PORT"),
        ({"events": {"endpoint": "ipc://" + "x" * 200}}, "a path of 200 bytes"),
        (
            {"events": {"replay_endpoint": "tcp://127.0.0.1:5567"}},
            "each needs an address of its own",
        ),
        ({"events": {"curve_client_keys_dir": "/"}}, "set both, or neither"),
        ({"events": {"curve_secret_key_file": "/nowhere"}}, "cannot be read"),
        ({"events": 3}, "has 3 at events: expected an object with any of enabled"),
        ([1], "has [1]: expected an object with any of retain"),
        (None, "is not JSON"),
    ],
)
def test_bad_input_gets_one_sentence(given, sentence):
    text = "{nonsense" if given is None else json.dumps(given)
    with pytest.raises(SettingsError) as error:
        load_settings({RETENTION_ENV: text})
    message = str(error.value)
    assert sentence in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("name", [RETAIN_ENV, SERVE_ENV])
def test_a_bad_switch(name):
    with pytest.raises(SettingsError, match=f"{name} is 'on': expected 0 or 1."):
        load_settings({name: "on"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [*Settings.__struct_fields__, *EventSettings.__struct_fields__]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_nothing_gets_past_the_checks(given):
    with contextlib.suppress(SettingsError):
        settings = load_settings({}, {"checkpoint_retention": given})
        assert isinstance(settings, Settings)


def test_curve_keys(tmp_path):
    public, secret = zmq.auth.create_certificates(tmp_path, "engine")
    events = {"curve_secret_key_file": secret, "curve_client_keys_dir": str(tmp_path)}
    assert load({"events": events}).events.curve_secret_key_file == secret
    with pytest.raises(SettingsError, match="holds no secret key"):
        load({"events": events | {"curve_secret_key_file": public}})
    with pytest.raises(SettingsError, match="is not a folder"):
        load({"events": events | {"curve_client_keys_dir": public}})


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5567", 0, "tcp://127.0.0.1:5567"),
        ("tcp://127.0.0.1:5567", 3, "tcp://127.0.0.1:5570"),
        ("tcp://[::1]:5567", 1, "tcp://[::1]:5568"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("ipc:///run/a", 2, "ipc:///run/a_dp2"),
    ],
)
def test_endpoint_of_rank(endpoint, rank, expected):
    assert endpoint_of_rank(endpoint, rank) == expected


@given(st.integers(1, 65_535), st.integers(1, 65_535), st.integers(1, 64))
def test_port_ranges_that_collide_are_refused(publish, replay, ranks):
    """Against the definition: no two ranks may want one port."""
    events = EventSettings(
        endpoint=f"tcp://127.0.0.1:{publish}",
        replay_endpoint=f"tcp://127.0.0.1:{replay}",
    )
    wanted = [*range(publish, publish + ranks), *range(replay, replay + ranks)]
    fits = len(set(wanted)) == len(wanted) and max(wanted) <= 65_535
    try:
        check_data_parallel(events, ranks)
    except SettingsError:
        assert not fits
    else:
        assert fits


def test_the_port_that_a_collision_suggests_is_free_of_it():
    with pytest.raises(SettingsError, match="to port 5571 or above"):
        check_data_parallel(EventSettings(), 4)
    moved = EventSettings(replay_endpoint="tcp://127.0.0.1:5571")
    check_data_parallel(moved, 4)


@pytest.mark.parametrize(
    ("endpoint", "is_exposed"),
    [
        ("tcp://127.0.0.1:1", False),
        ("tcp://127.1.2.3:1", False),
        ("tcp://[::1]:1", False),
        ("tcp://localhost:1", False),
        ("ipc:///run/a", False),
        ("tcp://*:1", True),
        ("tcp://0.0.0.0:1", True),
        ("tcp://[::]:1", True),
        ("tcp://10.0.0.1:1", True),
        ("tcp://eth0:1", True),
    ],
)
def test_exposure_warning(endpoint, is_exposed):
    events = EventSettings(enabled=True, endpoint=endpoint)
    assert (exposure_warning(events) is not None) is is_exposed
    assert exposure_warning(EventSettings(enabled=False, endpoint=endpoint)) is None


def test_keys_or_silence_about_exposure():
    events = EventSettings(
        enabled=True, endpoint="tcp://*:1", curve_secret_key_file="engine.key_secret"
    )
    assert exposure_warning(events) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLLM_CHECKPOINT_RETENTON", RETENTION_ENV),
        ("VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINT", RETAIN_ENV),
        ("VLLM_PREFIX_CACHE_RETENTION_INTERVALS", RETENTION_INTERVAL_ENV),
    ],
)
def test_misspelt_variable_is_told_with_the_nearest(name, meant):
    (sentence,) = misspelt_variables({name: "1", meant: "1", "VLLM_USE_V2": "1"})
    assert sentence == (
        f"The environment variable {name} is not read (did you mean {meant!r}?): unset "
        "or correct it."
    )


def test_variables_of_others_are_not_ours():
    ours = dict.fromkeys(ENVIRONMENT_VARIABLES, "1")
    assert misspelt_variables({"VLLM_PREFIX_CACHE_X": "1", **ours}) == []


def test_the_curve_example_of_the_documentation(tmp_path, monkeypatch):
    """Run as it stands, up to the server: what it names is there and is loaded."""
    documentation = Path(__file__).parents[2] / "docs" / "events.md"
    (example,) = [
        block
        for block in re.findall(r"```sh\n(.*?)```", documentation.read_text(), re.S)
        if "create_certificates" in block
    ]
    script = example.replace("vllm-fork serve MODEL", f"printenv {RETENTION_ENV}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    events = load(**{RETENTION_ENV: done.stdout}).events
    assert events.curve_secret_key_file == "keys/engine.key_secret"
    assert [key.name for key in (tmp_path / "keys/clients").iterdir()] == [
        "consumer.key"
    ]
