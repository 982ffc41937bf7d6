"""The entry point by which vLLM loads this project (``vllm.general_plugins``).

vLLM calls :func:`register` once in every process: the front end, the engine, the
workers. It wraps a few methods and replaces nothing on disk:

- ``EngineArgs.__post_init__``: a model that cannot be read is told so;
- ``EngineArgs.create_engine_config``: settings are checked in the front end, where
  a mistake can be told in one sentence (in the engine process it is a traceback);
- ``SchedulerConfig.get_scheduler_cls``: the engine gets the scheduler class that
  vLLM resolved, with checkpoints mixed in;
- ``EngineCoreProc._handle_shutdown``: requests end before the engine is killed over
  them (``drain``);
- ``EngineCore.shutdown``: the stream says goodbye before the workers are waited for;
- ``WorkerBase.__init__``: where states are retained, workers copy whole pages after
  a hit inside a block (``block_copy``);
- ``Platform.validate_environ``: our variables are not "unknown". They are not
  registered in ``vllm.envs``, whose names all enter the compile key.

With retention and events both off every one of them does what vLLM does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from vllm_fork import block_copy, drain, endpoints, prefix_grid
from vllm_fork.checkpoint import EXTERNAL_ID_ATTRIBUTE
from vllm_fork.config import (
    ENVIRONMENT_VARIABLES,
    RETENTION_INTERVAL_ENV,
    SERVE_ENV,
    Settings,
    SettingsError,
    check_data_parallel,
    endpoint_of_rank,
    exposure_warning,
    load_settings,
)
from vllm_fork.server_arguments import gist
from vllm_fork.support import decide

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

PLUGIN_NAME: Final = "vllm_fork"
"""Name of the entry point: what a ``VLLM_PLUGINS`` allow-list must contain."""

SHUTDOWN_TIMEOUT_S: Final = 5
MISFIT: Final = (
    "vllm-fork does not fit this version of vLLM ({}): install the one that its "
    "package metadata names."
)

_OURS: Final = "_wrapped_by_vllm_fork"
_ACTIVE: Final = "_checkpoints_active"
"""On a ``SchedulerConfig``: what the front end decided, carried to the engine."""

serving_pid: int | None = None
"""The process that runs ``vllm-fork serve``: there, and there alone, a taken port
refuses the start, and vLLM's own refusals are told in one sentence."""

is_engine_configured = False
"""Whether this process has made an engine's configuration, which vLLM does once it has
accepted its arguments."""


class StartRefused(ValueError):
    """The engine must not start so; the message is one sentence for the operator."""


class ModelUnreadable(StartRefused):
    """The model's configuration cannot be had; the message is one sentence."""


def register() -> None:
    """Wrap vLLM. Safe to call more than once in a process.

    Raises:
        StartRefused: retention or events are asked for in the environment, and this
            vLLM has not what must be wrapped. Otherwise that is only logged.
    """
    _log_as_vllm_does()
    try:
        from vllm.config import SchedulerConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms.interface import Platform

        _wrap(EngineArgs, "__post_init__", _told_of_an_unreadable_model)
        _wrap(EngineArgs, "create_engine_config", _checked_engine_config)
        _wrap(SchedulerConfig, "get_scheduler_cls", _scheduler_with_checkpoints)
        _wrap(Platform, "validate_environ", _validate_environ_without_ours)
        # Loaded where they run; elsewhere importing them would cost seconds.
        if core := sys.modules.get("vllm.v1.engine.core"):
            _wrap(core.EngineCore, "shutdown", _shutdown_after_goodbye)
            _wrap(core.EngineCoreProc, "_handle_shutdown", drain.bounded)
        if workers := sys.modules.get("vllm.v1.worker.worker_base"):
            _wrap(workers.WorkerBase, "__init__", _worker_copying_whole_pages)
    except (ImportError, AttributeError) as error:
        sentence = MISFIT.format(error)
        if _is_active_by_environment():
            raise _refusal(sentence) from error
        logger.warning("%s vLLM runs without it.", sentence)


def _is_active_by_environment() -> bool:
    try:
        return load_settings(os.environ).active
    except SettingsError:
        return True


def _wrap(owner: type, name: str, make: Any) -> None:
    """Replace a method by ``make(original)``, once, keeping classmethods such."""
    attribute = owner.__dict__.get(name)
    if attribute is None:
        raise AttributeError(f"{owner.__name__}.{name} is missing")
    is_classmethod = isinstance(attribute, classmethod)
    original = attribute.__func__ if is_classmethod else attribute
    if getattr(original, _OURS, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _OURS, True)
    setattr(owner, name, classmethod(wrapper) if is_classmethod else wrapper)


# -- front end -----------------------------------------------------------------


def _told_of_an_unreadable_model(original: Any) -> Any:
    """Offline, vLLM looks a repository up in the cache as soon as it has its id."""

    def __post_init__(self: Any) -> None:
        from huggingface_hub.errors import HFValidationError

        if serving_pid != os.getpid():
            original(self)
            return
        try:
            original(self)
        except (OSError, HFValidationError) as error:
            raise _refusal(
                f"vLLM cannot read the model {self.model}: {_gist(error)}",
                ModelUnreadable,
            ) from error

    return __post_init__


def _checked_engine_config(original: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> VllmConfig:
        global is_engine_configured
        settings = front_end_settings(self.additional_config)
        self.prefix_cache_retention_interval = retention_interval(
            os.environ.get(RETENTION_INTERVAL_ENV), self.prefix_cache_retention_interval
        )
        if is_fork_serve():
            self.otlp_traces_endpoint = tracing_endpoint(
                os.environ, self.otlp_traces_endpoint
            )
        with _own_refusals_in_one_sentence():
            config = original(self, *args, **kwargs)
        active = settings.active and check(settings, config)
        if serving_pid == os.getpid():
            _check_grid(config)
        setattr(config.scheduler_config, _ACTIVE, active)
        if is_fork_serve() and settings.events.enabled and not config.shutdown_timeout:
            config.shutdown_timeout = SHUTDOWN_TIMEOUT_S
            logger.info(
                "--shutdown-timeout is %d s (vLLM's 0 would end the engine before it "
                "has sent its last events).",
                SHUTDOWN_TIMEOUT_S,
            )
        is_engine_configured = True
        return config

    return create_engine_config


def front_end_settings(additional_config: object) -> Settings:
    """:func:`load_settings` of this process.

    Raises:
        StartRefused: in place of ``SettingsError``.
    """
    try:
        return load_settings(os.environ, additional_config)
    except SettingsError as error:
        raise _refusal(str(error)) from None


def is_fork_serve() -> bool:
    """Whether this process belongs to ``vllm-fork serve``."""
    return os.environ.get(SERVE_ENV) == "1"


def tracing_endpoint(
    environ: MutableMapping[str, str], given: str | None
) -> str | None:
    """What vLLM's ``--otlp-traces-endpoint`` should be, where none is ``given``.

    Without it vLLM keeps a request's trace headers from the engine, and the events
    could not name the caller's trace. Taken from OpenTelemetry's own variables,
    with the protocol that they name.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if given or exporter != "otlp" or environ.get("OTEL_SDK_DISABLED") == "true":
        return given
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint and not base:
        return None
    protocol = environ.setdefault(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    )
    if not endpoint:
        endpoint = base
        if base and protocol != "grpc":
            endpoint = base.rstrip("/") + "/v1/traces"
    logger.info("--otlp-traces-endpoint is %s, from the environment.", endpoint)
    return endpoint


def retention_interval(variable: str | None, flag: int | None) -> int | None:
    """The interval that the reference's variable and vLLM's flag agree on.

    vLLM 0.32 has only the flag. Its default, 0, cannot be told from a 0 that was
    given, so 0 counts as not given; both mean sparse retention.

    Raises:
        StartRefused: they contradict each other, or the variable is no number.
    """
    if variable is None or not variable.strip():
        return flag
    if not (variable.strip().isascii() and variable.strip().isdigit()):
        raise _refusal(
            f"{RETENTION_INTERVAL_ENV} is {variable!r}: expected a number of tokens, "
            "such as 0."
        )
    value = int(variable)
    if flag in (0, value):
        return value
    raise _refusal(
        f"{RETENTION_INTERVAL_ENV} is {value} but --prefix-cache-retention-interval is "
        f"{flag}: set one of them."
    )


def check(settings: Settings, config: VllmConfig) -> bool:
    """Refuse what cannot work, tell what will not happen.

    Returns:
        Whether the engine has anything of ours to do.

    Raises:
        StartRefused: one sentence.
    """
    retain = settings.retain
    if retain:
        decision = decide(config)
        if decision.retention == "refused":
            raise _refusal(str(decision.reason))
        if decision.retention == "off":
            logger.warning("Decode checkpoints are off: %s", decision.reason)
            retain = False
        unit = config.cache_config.prefix_match_unit
        if unit and settings.copy_interval % unit:
            raise _refusal(
                f"copy_interval is {settings.copy_interval} tokens, which is no "
                f"multiple of --prefix-match-unit {unit}."
            )
    if settings.events.enabled:
        _check_events(settings, config)
    if retain or settings.events.enabled:
        _check_fit(retain)
    return retain or settings.events.enabled


def _check_fit(retain: bool) -> None:
    """Do here what would fail in the engine or in a worker."""
    try:
        importlib.import_module("vllm_fork.scheduler")
        if retain:
            block_copy.install()
    except (ImportError, AttributeError) as error:
        raise _refusal(MISFIT.format(error)) from error


def _check_grid(config: VllmConfig) -> None:
    """Told here, it is a sentence; in the engine it is a traceback."""
    refusal = prefix_grid.why_engine_refuses(config)
    if refusal:
        raise _refusal(refusal)


def _check_events(settings: Settings, config: VllmConfig) -> None:
    events = settings.events
    parallel = config.parallel_config
    try:
        check_data_parallel(events, parallel.data_parallel_size)
        if serving_pid == os.getpid():
            first = parallel.data_parallel_rank
            for rank in range(first, first + parallel.data_parallel_size_local):
                for endpoint in (events.endpoint, events.replay_endpoint):
                    if endpoint is not None:
                        endpoints.check_free(endpoint_of_rank(endpoint, rank))
    except SettingsError as error:
        raise _refusal(str(error)) from None
    except endpoints.EndpointError as error:
        raise _refusal(
            f"The event stream cannot start: {error} Stop that process, or choose "
            "others with events.endpoint and events.replay_endpoint in "
            "VLLM_CHECKPOINT_RETENTION."
        ) from None
    warning = exposure_warning(events)
    if warning:
        logger.warning("%s", warning)


@contextlib.contextmanager
def _own_refusals_in_one_sentence() -> Iterator[None]:
    """Under ``vllm-fork serve``, what vLLM itself refuses is told as what we refuse."""
    if serving_pid != os.getpid():
        yield
        return
    try:
        yield
    except StartRefused:
        raise
    except Exception as error:
        logger.debug("vLLM refuses this configuration.", exc_info=True)
        raise _refusal(f"vLLM refuses this configuration: {_gist(error)}") from error


def _gist(error: Exception) -> str:
    """An error on one line; of a pydantic one, what its validators said."""
    if isinstance(error, ValidationError):
        error = ValueError("; ".join(map(_complaint, error.errors())))
    return gist(error)


def _complaint(item: ErrorDetails) -> str:
    where = ".".join(map(str, item["loc"]))
    what = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{where}: {what}" if where else what


def _refusal(sentence: str, kind: type[StartRefused] = StartRefused) -> StartRefused:
    """A :class:`StartRefused` that, uncaught, prints its sentence and no traceback."""
    previous = sys.excepthook
    if not getattr(previous, _OURS, False):

        def print_refusal(kind: Any, value: Any, traceback: Any) -> None:
            if isinstance(value, StartRefused):
                print(f"vllm-fork: {value}", file=sys.stderr)
            else:
                previous(kind, value, traceback)

        setattr(print_refusal, _OURS, True)
        sys.excepthook = print_refusal
    return kind(sentence)


# -- engine --------------------------------------------------------------------


def _scheduler_with_checkpoints(original: Any) -> Any:
    def get_scheduler_cls(self: Any) -> type:
        stock = original(self)
        active = getattr(self, _ACTIVE, None)
        if active is None:  # a configuration that no EngineArgs made
            active = _is_active_by_environment()
        if not active:
            return stock
        from vllm.v1.request import Request

        from vllm_fork.scheduler import with_checkpoints

        _wrap(Request, "from_engine_core_request", _request_with_external_id)
        return with_checkpoints(stock)

    return get_scheduler_cls


def _request_with_external_id(original: Any) -> Any:
    """The core's ``Request`` does not keep the id that the client knows."""

    def from_engine_core_request(cls: Any, request: Any, *args: Any) -> Any:
        made = original(cls, request, *args)
        setattr(made, EXTERNAL_ID_ATTRIBUTE, request.external_req_id)
        return made

    return from_engine_core_request


def _shutdown_after_goodbye(original: Any) -> Any:
    def shutdown(self: Any) -> None:
        close_stream = getattr(self.scheduler, "close_stream", None)
        if close_stream is not None:
            close_stream()
        original(self)

    return shutdown


def _worker_copying_whole_pages(original: Any) -> Any:
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if load_settings(os.environ, vllm_config.additional_config).retain:
            block_copy.install()

    return __init__


# -- every process -------------------------------------------------------------


def _validate_environ_without_ours(original: Any) -> Any:
    def validate_environ(cls: Any, *args: Any, **kwargs: Any) -> None:
        with _hidden(ENVIRONMENT_VARIABLES):
            original(cls, *args, **kwargs)

    return validate_environ


@contextlib.contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def _log_as_vllm_does() -> None:
    """Send our log lines where vLLM's go, whenever it is told where that is."""
    logging.getLogger("vllm_fork").parent = logging.getLogger("vllm")
