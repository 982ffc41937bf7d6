"""What the front end lets through, maps, refuses, and carries to the engine."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys

import pytest
from vllm.config import SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_fork import plugin
from vllm_fork.config import (
    ENVIRONMENT_VARIABLES,
    RETAIN_ENV,
    RETENTION_ENV,
    RETENTION_INTERVAL_ENV,
    SERVE_ENV,
)
from vllm_fork.plugin import StartRefused, retention_interval, tracing_endpoint
from vllm_fork.support import decide

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def configure(hybrid_model, monkeypatch):
    """``vllm serve`` up to the engine: environment and arguments in, config out."""

    def configure(environ: dict[str, str] | None = None, **arguments) -> VllmConfig:
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        arguments.setdefault("model", hybrid_model)
        arguments["model"] = str(arguments["model"])
        return EngineArgs(max_model_len=2048, **arguments).create_engine_config()

    return configure


@pytest.fixture
def fork_serve(monkeypatch):
    """This process is that of ``vllm-fork serve``."""
    monkeypatch.setenv(SERVE_ENV, "1")
    monkeypatch.setattr(plugin, "serving_pid", os.getpid())


def free_ports(**more: object) -> dict[str, str]:
    """Settings with events on ports of the system's choice."""
    events = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    return {RETENTION_ENV: json.dumps({"events": events | more})}


# -- which scheduler the engine gets ---------------------------------------------


def test_stock_vllm_is_left_alone(configure):
    config = configure()
    assert config.scheduler_config.get_scheduler_cls() is Scheduler
    assert config.shutdown_timeout == 0
    assert config.observability_config.otlp_traces_endpoint is None


@pytest.mark.parametrize(
    "environ",
    [
        {RETAIN_ENV: "1"},
        {RETENTION_ENV: '{"retain": true}'},
        {RETENTION_ENV: '{"events": true}'},
        {SERVE_ENV: "1"},
    ],
)
def test_checkpoints_are_mixed_in(configure, environ):
    config = configure(environ)
    mixed = config.scheduler_config.get_scheduler_cls()
    assert issubclass(mixed, Scheduler)
    assert mixed is not Scheduler
    assert config.scheduler_config.scheduler_cls is None


def test_additional_config_reaches_the_engine_process(configure):
    """``get_scheduler_cls`` sees neither it nor the front end's environment."""
    config = configure(additional_config={"checkpoint_retention": {"retain": True}})
    received = pickle.loads(pickle.dumps(config))
    assert received.scheduler_config.get_scheduler_cls() is not Scheduler


def test_additional_config_beats_nothing_but_the_default(configure):
    off = {"checkpoint_retention": {"retain": False, "events": False}}
    config = configure({SERVE_ENV: "1"}, additional_config=off)
    assert config.scheduler_config.get_scheduler_cls() is Scheduler


def test_a_config_that_no_front_end_saw(monkeypatch):
    config = SchedulerConfig(max_model_len=2048, is_encoder_decoder=False)
    assert config.get_scheduler_cls() is Scheduler
    monkeypatch.setenv(RETAIN_ENV, "1")
    assert config.get_scheduler_cls() is not Scheduler


def test_async_scheduling_is_kept(monkeypatch):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setenv(RETAIN_ENV, "1")
    config = SchedulerConfig(
        max_model_len=2048, is_encoder_decoder=False, async_scheduling=True
    )
    assert issubclass(config.get_scheduler_cls(), AsyncScheduler)


def test_register_twice_wraps_once():
    before = EngineArgs.create_engine_config, SchedulerConfig.get_scheduler_cls
    plugin.register()
    after = EngineArgs.create_engine_config, SchedulerConfig.get_scheduler_cls
    assert after == before


# -- what can and what cannot be retained ----------------------------------------


def test_decide_on_a_hybrid_model(configure):
    assert decide(configure()) == ("on", None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"enable_prefix_caching": False}, "prefix cache, which is off: remove --no-"),
        ({"prefix_cache_retention_interval": None}, "sparse retention"),
    ],
)
def test_a_setting_that_prevents_retention_is_refused(configure, arguments, sentence):
    with pytest.raises(StartRefused) as error:
        configure({RETAIN_ENV: "1"}, **arguments)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("mamba_cache_mode", "none", "need --mamba-cache-mode align, not none."),
        ("use_replayssm", True, "--use-replayssm"),
    ],
)
def test_what_vllm_itself_would_not_build_here(configure, name, value, sentence):
    """vLLM repairs the mode, and refuses replayssm for this model, before we see it."""
    config = configure()
    setattr(config.cache_config, name, value)
    decision = decide(config)
    assert decision.retention == "refused"
    assert sentence in decision.reason


def test_a_refused_setting_is_fine_without_retention(configure):
    configure({SERVE_ENV: "0"}, enable_prefix_caching=False)
    observer = configure(
        {RETENTION_ENV: '{"events": true}'}, enable_prefix_caching=False
    )
    assert observer.scheduler_config.get_scheduler_cls() is not Scheduler


def test_a_model_that_is_not_hybrid_is_served_and_told(configure, dense_model, log):
    config = configure({RETAIN_ENV: "1"}, model=dense_model)
    assert decide(config).retention == "off"
    assert config.scheduler_config.get_scheduler_cls() is Scheduler
    assert "LlamaForCausalLM is not a hybrid model" in " ".join(log)


def test_a_model_that_is_not_hybrid_is_observed(configure, dense_model):
    config = configure({RETAIN_ENV: "1"} | free_ports(), model=dense_model)
    assert config.scheduler_config.get_scheduler_cls() is not Scheduler


def test_copy_interval_off_the_grid_is_refused(configure):
    environ = {RETENTION_ENV: '{"retain": true, "copy_interval": 24}'}
    with pytest.raises(StartRefused, match="no multiple of --prefix-match-unit 16"):
        configure(environ, prefix_match_unit=16)


def test_unreadable_settings_are_refused(configure):
    with pytest.raises(StartRefused, match="did you mean 'retain'"):
        configure({RETENTION_ENV: '{"retian": true}'})


# -- the reference's variables ----------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "flag", "expected"),
    [
        (None, 0, 0),
        (None, None, None),
        (None, 4224, 4224),
        ("", 4224, 4224),
        ("0", 0, 0),
        ("4224", 0, 4224),
        ("4224", 4224, 4224),
    ],
)
def test_retention_interval(variable, flag, expected):
    assert retention_interval(variable, flag) == expected


@pytest.mark.parametrize(
    ("variable", "flag", "sentence"),
    [
        ("0", None, "is 0 but --prefix-cache-retention-interval is None"),
        ("4224", 8448, "is 4224 but --prefix-cache-retention-interval is 8448"),
        ("dense", 0, "is 'dense': expected a number of tokens"),
        ("-1", 0, "is '-1': expected a number of tokens"),
    ],
)
def test_retention_interval_contradicted(variable, flag, sentence):
    with pytest.raises(StartRefused, match=sentence):
        retention_interval(variable, flag)


def test_retention_interval_reaches_the_engine(configure):
    config = configure({RETENTION_INTERVAL_ENV: "4224"})
    assert config.cache_config.prefix_cache_retention_interval == 4224


def test_our_variables_are_not_unknown(monkeypatch):
    # vLLM's CPU worker leaves it in the environment of an engine in this process.
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    for name in ENVIRONMENT_VARIABLES:
        monkeypatch.setenv(name, "1")
    current_platform.validate_environ(hard_fail=True)
    assert all(os.environ[name] == "1" for name in ENVIRONMENT_VARIABLES)
    monkeypatch.setenv("VLLM_NO_SUCH_VARIABLE", "1")
    with pytest.raises(ValueError, match="VLLM_NO_SUCH_VARIABLE"):
        current_platform.validate_environ(hard_fail=True)


def test_our_variables_are_not_in_the_compile_key():
    from vllm import envs

    assert not set(ENVIRONMENT_VARIABLES) & set(envs.environment_variables)


# -- the event stream -------------------------------------------------------------


@pytest.mark.usefixtures("fork_serve")
def test_taken_port_refuses_vllm_fork_serve(configure):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StartRefused) as error:
            configure(free_ports(endpoint=endpoint))
    assert f"{endpoint} is in use by another process. Stop that" in str(error.value)


def test_taken_port_does_not_stop_plain_vllm(configure):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        config = configure(free_ports(endpoint=endpoint))
    assert config.scheduler_config.get_scheduler_cls() is not Scheduler


def test_colliding_ranks_are_refused(configure):
    with pytest.raises(StartRefused, match="which overlap: move"):
        configure({RETENTION_ENV: '{"events": true}'}, data_parallel_size=2)


def test_public_address_is_warned_about(configure, log):
    configure(free_ports(endpoint="tcp://*:0"))
    assert " ".join(log).count("can be read by everybody who reaches") == 1


@pytest.mark.usefixtures("fork_serve")
def test_vllm_fork_serve_leaves_time_for_the_last_events(configure):
    assert configure(free_ports()).shutdown_timeout == 5
    assert configure(shutdown_timeout=2).shutdown_timeout == 2


# -- tracing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, None, "http://a:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, "http://b", "http://b"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            None,
            "http://a:4318/v1/traces",
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/x",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            None,
            "http://c/x",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"},
            None,
            None,
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_TRACES_EXPORTER": "none"},
            None,
            None,
        ),
    ],
)
def test_tracing_endpoint(environ, given, expected):
    assert tracing_endpoint(dict(environ), given) == expected


def test_tracing_protocol_is_that_of_the_environment():
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    tracing_endpoint(environ, None)
    assert environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"


@pytest.mark.usefixtures("fork_serve")
def test_vllm_fork_serve_sets_the_tracing_flag(configure):
    endpoint = "http://127.0.0.1:4317"
    config = configure({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | free_ports())
    assert config.observability_config.otlp_traces_endpoint == endpoint


def test_plain_vllm_serve_keeps_its_own(configure):
    config = configure({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", RETAIN_ENV: "1"})
    assert config.observability_config.otlp_traces_endpoint is None


# -- never silently stock ---------------------------------------------------------


@pytest.fixture
def misfitting_vllm(monkeypatch):
    monkeypatch.delattr(SchedulerConfig, "get_scheduler_cls")


@pytest.mark.usefixtures("misfitting_vllm")
def test_a_vllm_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setenv(RETAIN_ENV, "1")
    with pytest.raises(StartRefused, match="get_scheduler_cls is missing"):
        plugin.register()


@pytest.mark.usefixtures("misfitting_vllm")
def test_a_vllm_that_does_not_fit_runs_stock_when_nothing_is_asked(log):
    plugin.register()
    assert "vLLM runs without it" in " ".join(log)


def test_a_scheduler_that_does_not_import_is_refused(configure, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_fork.scheduler", None)
    with pytest.raises(StartRefused, match="does not fit this version of vLLM"):
        configure({RETAIN_ENV: "1"})


@pytest.mark.usefixtures("fork_serve")
def test_vllm_s_own_refusals_are_one_sentence_too(configure, tmp_path):
    with pytest.raises(StartRefused) as error:
        configure(model=tmp_path)
    assert str(error.value).startswith("vLLM refuses this configuration: ")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("fork_serve")
@pytest.mark.parametrize("retain", ["0", "1"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prefix_match_unit": 17}, "--prefix-match-unit 17 does not divide the block"),
        ({"prefix_cache_retention_interval": 400}, "interval 400 is no multiple of "),
    ],
)
def test_what_would_end_the_engine_is_refused(configure, retain, arguments, sentence):
    with pytest.raises(StartRefused, match=sentence):
        configure({RETAIN_ENV: retain} | free_ports(), **arguments)


@pytest.mark.usefixtures("fork_serve")
def test_what_the_engine_takes_is_not_refused(configure, dense_model):
    """It looks at the unit with a prefix cache alone; of other models nothing is known
    before the engine runs."""
    environ = {RETAIN_ENV: "0"} | free_ports()
    configure(environ, prefix_match_unit=17, enable_prefix_caching=False)
    configure(environ, prefix_match_unit=17, model=dense_model)
    configure(environ, prefix_match_unit=16)


def test_plain_vllm_leaves_the_unit_to_the_engine(configure):
    configure({RETAIN_ENV: "1"}, prefix_match_unit=17)


def test_plain_vllm_refuses_as_it_always_did(configure, tmp_path):
    with pytest.raises(Exception) as error:  # noqa: PT011
        configure(model=tmp_path)
    assert not isinstance(error.value, StartRefused)


def test_uncaught_refusal_prints_its_sentence_alone(configure, capsys):
    with pytest.raises(StartRefused) as error:
        configure({RETAIN_ENV: "1"}, enable_prefix_caching=False)
    sys.excepthook(type(error.value), error.value, error.value.__traceback__)
    assert capsys.readouterr().err == f"vllm-fork: {error.value}\n"


def test_other_errors_keep_their_traceback(configure, capsys):
    with pytest.raises(StartRefused):
        configure({RETAIN_ENV: "1"}, enable_prefix_caching=False)
    sys.excepthook(KeyError, KeyError("k"), None)
    assert "KeyError: 'k'" in capsys.readouterr().err
