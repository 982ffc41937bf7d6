"""Settings of checkpoint retention and of its event stream.

Three sources, merged; where two of them name the same setting with different
values the start is refused:

1. the reference's switch, ``VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS=0|1``
   (vLLM PR 50551);
2. one JSON object in ``VLLM_CHECKPOINT_RETENTION``;
3. the same object under ``checkpoint_retention`` in vLLM's
   ``--additional-config`` (which enters the compile key: a change recompiles).

What no source names takes its default: off with plain ``vllm serve``, on under
``vllm-fork serve`` (which sets ``VLLM_FORK_SERVE=1`` for its processes).

This module imports neither vLLM nor torch.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from vllm_fork.events import DEFAULT_ENDPOINT, DEFAULT_REPLAY_ENDPOINT, DEFAULT_TOPIC

RETAIN_ENV: Final = "VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS"
RETENTION_ENV: Final = "VLLM_CHECKPOINT_RETENTION"
RETENTION_INTERVAL_ENV: Final = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
"""The reference's variable; vLLM 0.32 has only the flag, see ``plugin``."""
SERVE_ENV: Final = "VLLM_FORK_SERVE"
"""Set by ``vllm-fork serve`` alone: retention and events default to on."""
ADDITIONAL_CONFIG_KEY: Final = "checkpoint_retention"

ENVIRONMENT_VARIABLES: Final = (
    RETAIN_ENV,
    RETENTION_ENV,
    RETENTION_INTERVAL_ENV,
    SERVE_ENV,
)

_OUR_PREFIXES: Final = (
    "VLLM_CHECKPOINT",
    "VLLM_PREFIX_CACHE_RETAIN",
    "VLLM_PREFIX_CACHE_RETENTION",
)

PUBLISH_ON: Final = ("stop", "length", "abort", "preempt")
OVERFLOW_POLICIES: Final = ("drop_oldest", "drop_newest")
MAX_PORT: Final = 65_535
MAX_IPC_PATH_BYTES: Final = 100
"""A Unix socket's path has at most 107 bytes; some are left for the rank."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SettingsError(ValueError):
    """A setting cannot be used; the message is one sentence for the operator."""


class EventSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how lifecycle events go out.

    ``endpoint`` (PUB) and ``replay_endpoint`` (ROUTER; None: no replay) are bound:
    ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; the data-parallel rank is added to the
    port. ``queue_size``: events that may wait for the publisher's thread.
    ``overflow``: which of them go when it is full. ``buffer_batches`` and
    ``buffer_bytes`` bound the replay buffer. ``heartbeat_s``: silence after which a
    heartbeat is sent. ``curve_secret_key_file``: a key pair as written by
    ``zmq.auth.create_certificates``; ``curve_client_keys_dir``: the public keys that
    may connect (None: any client that knows the server's public key).
    """

    enabled: bool = False
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = DEFAULT_REPLAY_ENDPOINT
    topic: str = DEFAULT_TOPIC
    label: str = ""
    queue_size: _Count = 65_536
    overflow: str = "drop_oldest"
    buffer_batches: _Count = 10_000
    buffer_bytes: _Count = 64 * 1024 * 1024
    send_hwm: _Count = 1_000
    """Batches that may wait for one slow subscriber before it misses some."""
    heartbeat_s: _Seconds = 1.0
    hash_session_ids: bool = False
    curve_secret_key_file: str | None = None
    curve_client_keys_dir: str | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine retains, when it publishes, and what it tells.

    ``copy_interval``: tokens between rolling copies while decoding, 0 for none, a
    multiple of the hash unit. ``publish_on``: the ends of a request that publish
    its checkpoint, of :data:`PUBLISH_ON`. ``one_step_tokens``: new tokens behind a
    checkpoint that are prefilled in one step, at most (``short_follow_up``); 0: the
    last of any prompt run in a step of their own, as in vLLM.
    """

    retain: bool = False
    exact_tail: bool = True
    one_step_tokens: Annotated[int, msgspec.Meta(ge=0)] = 256
    copy_interval: Annotated[int, msgspec.Meta(ge=0)] = 0
    publish_on: frozenset[str] = frozenset({"stop"})
    events: EventSettings = EventSettings()

    @property
    def active(self) -> bool:
        """Whether anything of this project runs in the engine at all."""
        return self.retain or self.events.enabled


def load_settings(
    environ: Mapping[str, str], additional_config: object = None
) -> Settings:
    """Read, merge and check every source (see the module).

    Args:
        environ: the process environment.
        additional_config: vLLM's ``additional_config``; what is not a mapping
            holds nothing of ours.

    Raises:
        SettingsError: one sentence: what was wrong and what was expected.
    """
    serving = _parse_switch(SERVE_ENV, environ.get(SERVE_ENV)) or False
    sources: list[tuple[str, dict[str, Any]]] = []
    retain = _parse_switch(RETAIN_ENV, environ.get(RETAIN_ENV))
    if retain is not None:
        sources.append((RETAIN_ENV, {"retain": retain}))
    text = environ.get(RETENTION_ENV, "")
    if text.strip():
        sources.append((RETENTION_ENV, _parse_json(text)))
    if isinstance(additional_config, Mapping):
        # Others may have theirs there: what is not nearly ours is not our business.
        for key in map(str, additional_config):
            close = difflib.get_close_matches(key, [ADDITIONAL_CONFIG_KEY], cutoff=0.85)
            if close and key != ADDITIONAL_CONFIG_KEY:
                raise SettingsError(
                    f"--additional-config has {key!r}, which nobody reads: write "
                    f"{ADDITIONAL_CONFIG_KEY!r}."
                )
        given = additional_config.get(ADDITIONAL_CONFIG_KEY)
        if given is not None:
            sources.append((f"--additional-config {ADDITIONAL_CONFIG_KEY}", given))

    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, given in sources:
        for path, value in _flatten(source, given):
            if path in merged and merged[path] != value:
                raise SettingsError(
                    f"{source} sets {path} to {_show(value)} but {origin[path]} sets "
                    f"it to {_show(merged[path])}: set it in one place."
                )
            merged[path] = value
            origin[path] = source

    asked_for_events = any(path.startswith("events.") for path in merged)
    merged.setdefault("retain", serving)
    merged.setdefault("events.enabled", serving or asked_for_events)
    settings = _build(merged, origin)
    _check(settings, origin)
    return settings


def endpoint_of_rank(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint that one data-parallel rank binds.

    As vLLM's ``ZmqEventPublisher.offset_endpoint_port``: a TCP port grows by the
    rank, a port of 0 stays; a path gets the suffix ``_dp<rank>``.
    """
    if data_parallel_rank == 0:
        return endpoint
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return endpoint if port == "0" else f"{host}:{int(port) + data_parallel_rank}"
    return f"{endpoint}_dp{data_parallel_rank}"


def check_data_parallel(events: EventSettings, num_ranks: int) -> None:
    """Refuse PUB and replay ports of which two ranks would need the same one.

    Raises:
        SettingsError: the ranges of ``num_ranks`` ports each overlap, or run past
            the last port.
    """
    publish = _tcp_port(events.endpoint)
    replay = _tcp_port(events.replay_endpoint) if events.replay_endpoint else None
    for port in (publish, replay):
        if port and port + num_ranks - 1 > MAX_PORT:
            raise SettingsError(
                f"events need ports {port} to {port + num_ranks - 1} for {num_ranks} "
                f"data-parallel ranks, but {MAX_PORT} is the last one: choose a lower "
                "port."
            )
    if publish and replay and abs(publish - replay) < num_ranks:
        raise SettingsError(
            f"with {num_ranks} data-parallel ranks events.endpoint takes ports "
            f"{publish} to {publish + num_ranks - 1} and events.replay_endpoint "
            f"{replay} to {replay + num_ranks - 1}, which overlap: move "
            f"events.replay_endpoint to port {publish + num_ranks} or above."
        )


def exposure_warning(events: EventSettings) -> str | None:
    """One sentence if the stream can be read from other machines by anybody."""
    if not events.enabled or events.curve_secret_key_file is not None:
        return None
    endpoints = [events.endpoint, events.replay_endpoint or events.endpoint]
    public = sorted({e for e in endpoints if not _is_local(e)})
    if not public:
        return None
    return (
        f"The event stream on {' and '.join(public)} can be read by everybody who "
        "reaches that address (request and session ids, no text): bind 127.0.0.1 or "
        "ipc://, or set events.curve_secret_key_file."
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a mistyped name, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence on each variable that looks like one of ours and is none."""
    ours = (RETAIN_ENV, RETENTION_ENV, RETENTION_INTERVAL_ENV)
    return [
        f"The environment variable {name} is not read{nearest(name, ours)}: unset or "
        "correct it."
        for name in sorted(environ)
        if name.startswith(_OUR_PREFIXES) and name not in ours
    ]


def _parse_switch(name: str, text: str | None) -> bool | None:
    if text is None or not text.strip():
        return None
    values = {"1": True, "true": True, "0": False, "false": False}
    try:
        return values[text.strip().lower()]
    except KeyError:
        raise SettingsError(f"{name} is {text!r}: expected 0 or 1.") from None


def _parse_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SettingsError(
            f"{RETENTION_ENV} is not JSON ({error}): expected an object such as "
            "'{\"retain\": true}'."
        ) from None


def _flatten(source: str, given: Any) -> list[tuple[str, Any]]:
    """``{"events": {"label": "a"}}`` to ``[("events.label", "a")]``, names checked."""
    found: list[tuple[str, Any]] = []
    for key, value in _named(source, "", given, Settings):
        if key != "events":
            found.append((key, value))
        elif isinstance(value, bool):
            found.append(("events.enabled", value))
        else:
            found += [
                (f"events.{k}", v)
                for k, v in _named(source, "events", value, EventSettings)
            ]
    return found


def _named(
    source: str, path: str, given: Any, kind: type[msgspec.Struct]
) -> list[tuple[str, Any]]:
    place = f" at {path}" if path else ""
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{source} has {_show(given)}{place}: expected an object with any of "
            f"{', '.join(kind.__struct_fields__)}."
        )
    for key in given:
        if key not in kind.__struct_fields__:
            full = f"{path}.{key}" if path else str(key)
            guess = nearest(str(key), kind.__struct_fields__)
            raise SettingsError(
                f"{source} names the unknown setting {full!r}{guess}; known are "
                f"{', '.join(kind.__struct_fields__)}."
            )
    return list(given.items())


def _build(merged: Mapping[str, Any], origin: Mapping[str, str]) -> Settings:
    nested: dict[str, Any] = {"events": {}}
    for path, value in merged.items():
        head, _, tail = path.partition(".")
        if tail:
            nested[head][tail] = value
        else:
            nested[head] = value
    try:
        return msgspec.convert(nested, Settings)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        path = where.rstrip("`").partition("[")[0]
        source = origin.get(path, RETENTION_ENV)
        raise SettingsError(
            f"{source} sets {path} to {_show(merged.get(path))}: "
            f"{what[:1].lower()}{what[1:].replace('`', '')}."
        ) from None


def _check(settings: Settings, origin: Mapping[str, str]) -> None:
    def refuse(path: str, why: str) -> None:
        raise SettingsError(f"{origin.get(path, 'the default')} sets {path} {why}")

    for name in sorted(settings.publish_on - set(PUBLISH_ON)):
        guess = nearest(name, PUBLISH_ON)
        refuse(
            "publish_on",
            f"to {name!r}{guess}: expected any of {', '.join(PUBLISH_ON)}.",
        )
    events = settings.events
    if events.overflow not in OVERFLOW_POLICIES:
        guess = nearest(events.overflow, OVERFLOW_POLICIES)
        refuse(
            "events.overflow",
            f"to {events.overflow!r}{guess}: expected one of "
            f"{', '.join(OVERFLOW_POLICIES)}.",
        )
    if not events.topic:
        refuse("events.topic", "to nothing: expected a name such as kv-checkpoints.")
    _check_endpoint("events.endpoint", events.endpoint)
    if events.replay_endpoint is not None:
        _check_endpoint("events.replay_endpoint", events.replay_endpoint)
        if events.replay_endpoint == events.endpoint and not events.endpoint.endswith(
            ":0"
        ):
            raise SettingsError(
                f"events.endpoint and events.replay_endpoint are both "
                f"{events.endpoint}: each needs an address of its own."
            )
    if events.curve_client_keys_dir is not None:
        if events.curve_secret_key_file is None:
            raise SettingsError(
                "events.curve_client_keys_dir is set without "
                "events.curve_secret_key_file: set both, or neither."
            )
        if not Path(events.curve_client_keys_dir).is_dir():
            raise SettingsError(
                f"events.curve_client_keys_dir {events.curve_client_keys_dir!r} is "
                "not a folder: expected one with the clients' public .key files."
            )
    if events.curve_secret_key_file is not None:
        load_curve_keys(events.curve_secret_key_file)


def load_curve_keys(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key of a CURVE certificate file.

    Raises:
        SettingsError: no such file, or no key pair in it.
    """
    import zmq.auth

    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"events.curve_secret_key_file {path!r} cannot be read ({error}): expected "
            "a .key_secret file of zmq.auth.create_certificates."
        ) from None
    if not secret:
        raise SettingsError(
            f"events.curve_secret_key_file {path!r} holds no secret key: expected the "
            ".key_secret file, not the public .key one."
        )
    return public, secret


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        size = len(endpoint.removeprefix("ipc://").encode())
        if size > MAX_IPC_PATH_BYTES:
            raise SettingsError(
                f"{name} {endpoint!r} has a path of {size} bytes: a Unix socket takes "
                f"at most {MAX_IPC_PATH_BYTES} here, choose a shorter one."
            )
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if (
        endpoint.startswith("tcp://")
        and host
        and port.isascii()
        and port.isdigit()
        and int(port) <= MAX_PORT
    ):
        return
    raise SettingsError(
        f"{name} is {endpoint!r}: expected tcp://ADDRESS:PORT or ipc://PATH, such as "
        f"{DEFAULT_ENDPOINT}."
    )


def _tcp_port(endpoint: str) -> int | None:
    """The port of a TCP endpoint; None for a path or a port the OS chooses."""
    if not endpoint.startswith("tcp://"):
        return None
    return int(endpoint.rpartition(":")[2]) or None


def _is_local(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _show(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
