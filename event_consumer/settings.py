"""Settings of the consumer.

From the command line, then the environment (``EVENT_CONSUMER_STORE=…``), then one
TOML file (``--config FILE``), then the defaults. Example of a file::

    store = "postgresql://consumer@db/checkpoints"
    otlp = "http://collector:4317"

    [[endpoints]]
    endpoint = "dns+tcp://vllm-headless:5567"
    replay = "dns+tcp://vllm-headless:5568"
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

from event_consumer.store import DEFAULT_URL
from event_consumer.stream_state import StreamTimes
from vllm_fork.events import DEFAULT_ENDPOINT, DEFAULT_REPLAY_ENDPOINT, DEFAULT_TOPIC

ENV_PREFIX: Final = "EVENT_CONSUMER_"
SCHEMES: Final = ("tcp://", "ipc://", "dns+tcp://")
DEFAULT_HTTP: Final = "127.0.0.1:9464"
MAX_PORT: Final = 65_535
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024

MAX_KEEP_DAYS: Final = 36_500
EXAMPLE: Final = (
    '[{"endpoint": "tcp://HOST:5567", "replay": "tcp://HOST:5568"}] (in TOML: '
    "[[endpoints]] with endpoint and replay under it)"
)
"""A list of endpoints, as it is written."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(ValueError):
    """A setting cannot be used; the message is one sentence for the operator."""


class EndpointSettings(BaseModel):
    """One publisher, or several behind one name.

    ``endpoint``: its PUB socket; ``replay``: its ROUTER socket, None where there is
    none (a gap is then lost). ``dns+tcp://NAME:PORT`` stands for every address that
    ``NAME`` has. ``ranks``: data-parallel ranks, each at the next port.
    ``curve_server_key``: the engine's public key (40 characters, or a ``.key``
    file); ``curve_secret_key_file``: our own key pair, where the engine asks who
    we are. ``kv_events``: vLLM's own KV-event stream of the same engine, read for
    evictions of attention blocks only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str
    replay: str | None = None
    topic: str = DEFAULT_TOPIC
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    curve_server_key: str | None = None
    curve_secret_key_file: str | None = None
    kv_events: str | None = None

    @model_validator(mode="after")
    def _check(self) -> EndpointSettings:
        for name in ("endpoint", "replay", "kv_events"):
            value = getattr(self, name)
            if value is not None:
                _check_endpoint(name, value)
        if self.curve_secret_key_file and not self.curve_server_key:
            raise ValueError("curve_secret_key_file needs curve_server_key beside it")
        return self


def _default_endpoints() -> list[EndpointSettings]:
    return [EndpointSettings(endpoint=DEFAULT_ENDPOINT, replay=DEFAULT_REPLAY_ENDPOINT)]


class ConsumerSettings(BaseSettings):
    """What ``event-consumer run`` does.

    ``store``: SQLAlchemy URL, SQLite or PostgreSQL. ``otlp``: collector, None for
    no export; ``otlp_protocol``: ``grpc`` or ``http/protobuf``, None lets the URL
    say. ``otlp_logs`` and ``otlp_metrics`` are for collectors that take traces only
    (Jaeger: switch both off), ``trace_span_events`` for backends that show no logs.
    ``trace_sample_ratio``: share of the traces that are exported. ``http``: address
    of ``/healthz`` and ``/metrics``, or ``off``. ``flush_interval_s``: how often what
    came is committed. ``keep_days``: rows whose last event is older are deleted (0:
    never). ``dns_refresh_s``: how often names are asked for again.
    ``replay_timeout_s``, ``replay_attempts``: silence of a replay that counts as a
    failure, and failures after which a gap is lost.
    ``max_waiting``: batches that may wait behind a gap. ``engine_lost_after_s``:
    how long a connection may be broken before its engine counts as lost.
    ``max_frame_bytes``: longer frames are counted and skipped.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True
    )

    endpoints: list[EndpointSettings] = Field(default_factory=_default_endpoints)
    store: str = DEFAULT_URL
    otlp: str | None = None
    otlp_protocol: str | None = None
    otlp_logs: bool = True
    otlp_metrics: bool = True
    trace_span_events: bool = False
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    http: str = DEFAULT_HTTP
    flush_interval_s: _Positive = 0.2
    keep_days: Annotated[float, Field(ge=0, le=MAX_KEEP_DAYS)] = 30
    dns_refresh_s: _Positive = 10
    replay_timeout_s: _Positive = 3
    replay_attempts: Annotated[int, Field(ge=1)] = 4
    max_waiting: Annotated[int, Field(ge=1)] = 10_000
    engine_lost_after_s: _Positive = 5
    max_frame_bytes: Annotated[int, Field(ge=1024)] = MAX_FRAME_BYTES

    @model_validator(mode="after")
    def _check(self) -> ConsumerSettings:
        self.http_address()
        if not self.endpoints:
            raise ValueError(
                f"endpoints names no stream: name one, as {EXAMPLE}, or leave it out "
                f"for {DEFAULT_ENDPOINT}"
            )
        seen: set[str] = set()
        for each in self.endpoints:
            for rank in range(each.ranks):
                stream = of_rank(each.endpoint, rank)
                if stream in seen:
                    raise ValueError(f"endpoints names {stream} twice: name it once")
                seen.add(stream)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def times(self) -> StreamTimes:
        return StreamTimes(
            replay_timeout_s=self.replay_timeout_s,
            max_failures=self.replay_attempts,
            max_waiting=self.max_waiting,
            lost_after_s=self.engine_lost_after_s,
        )

    def http_address(self) -> tuple[str, int] | None:
        """``(host, port)``, or None where it is off."""
        if self.http == "off":
            return None
        host, _, port = self.http.rpartition(":")
        if not host or not port.isdigit() or int(port) > MAX_PORT:
            raise ValueError(f"http is HOST:PORT or off, not {self.http!r}")
        return host.strip("[]"), int(port)


def load_settings(
    config: Path | None, environ: Mapping[str, str], **given: Any
) -> ConsumerSettings:
    """Read and check every source (see the module).

    Args:
        config: the TOML file, where there is one.
        environ: the environment, checked for misspelt names.
        given: what the command line says; it comes first.

    Raises:
        SettingsError: one sentence: what was wrong and what was expected.
    """
    _refuse_unknown_variables(environ)
    if config is not None:
        _parse_toml(config)

    class FromFile(ConsumerSettings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        return FromFile(**given)
    except ValidationError as error:
        raise SettingsError(_sentence(error, config)) from None
    except SourceError as error:
        name = re.search('field "(.+?)"', str(error))
        variable = ENV_PREFIX + name[1].upper() if name else "A setting"
        raise SettingsError(
            f"{variable} is no JSON: write a list, as {EXAMPLE}."
        ) from None


def _parse_toml(config: Path) -> None:
    try:
        tomllib.loads(config.read_text())
    except OSError as error:
        raise SettingsError(
            f"The configuration {config} cannot be read: {error.strerror}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"The configuration {config} is not TOML: {error}."
        ) from None


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in ConsumerSettings.model_fields]
    for name in environ:
        if name.startswith(ENV_PREFIX) and name.upper() not in known:
            raise SettingsError(
                f"The environment variable {name} is not known: {_nearest(name, known)}"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(known)}."


def _sentence(error: ValidationError, config: Path | None) -> str:
    """The first thing that is wrong, in one sentence."""
    errors = error.errors()
    # A misspelt name also leaves the right one missing; the spelling tells more.
    misspelt = (each for each in errors if each["type"] == "extra_forbidden")
    first = next(misspelt, errors[0])
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        where = ".".join(path)
        of_endpoint = path[0] == "endpoints"
        model = EndpointSettings if of_endpoint else ConsumerSettings
        near = _nearest(path[-1], model.model_fields)
        source = f"The configuration {config} sets" if config else "There is no"
        return f"{source} {where}, which is not a known setting: {near}"
    if first["type"] in ("model_type", "list_type") and path[0] == "endpoints":
        return (
            f"The setting {'.'.join(path)} cannot be used: endpoints is a list, as "
            f"{EXAMPLE}."
        )
    message = first["msg"].removeprefix("Value error, ")
    subject = f"The setting {'.'.join(path)}" if path else "A setting"
    return f"{subject} cannot be used: {message}."


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one data-parallel rank: the port grows by the rank, a path
    gets the suffix ``_dp<rank>`` (docs/events.md)."""
    if rank == 0:
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    if scheme.endswith("tcp"):
        host, _, port = rest.rpartition(":")
        return f"{scheme}://{host}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def _check_endpoint(name: str, value: str) -> None:
    if not value.startswith(SCHEMES):
        raise ValueError(
            f"{name} is {value!r}, and must be tcp://HOST:PORT, ipc://PATH or "
            "dns+tcp://NAME:PORT"
        )
    if value.startswith("ipc://"):
        if value == "ipc://":
            raise ValueError(f"{name} is {value!r}, without a path")
        return
    host, _, port = value.partition("tcp://")[2].rpartition(":")
    if not host or host == "*" or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
        raise ValueError(
            f"{name} is {value!r}, and must name a host and a port from 1 to "
            f"{MAX_PORT} (tcp://HOST:PORT)"
        )
