"""Which endpoints to watch: the settings, with names and ranks written out."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final, NamedTuple

from event_consumer.settings import EndpointSettings, of_rank

DNS_PREFIX: Final = "dns+"


class Endpoint(NamedTuple):
    """One stream: ``endpoint``, ``replay`` and ``kv_events`` as ZMQ connects to
    them, and the settings they came from."""

    endpoint: str
    replay: str | None
    kv_events: str | None
    settings: EndpointSettings


class ResolverError(Exception):
    """A name could not be asked for; whether it has addresses is not known."""


def expand(endpoints: Iterable[EndpointSettings]) -> list[Endpoint]:
    """Every stream that ``endpoints`` name now.

    ``dns+tcp://NAME:PORT`` becomes one stream an address of ``NAME`` (a headless
    service): none where it has no address now. ``ranks`` become one stream each, as
    vLLM numbers their ports. Asks the resolver, and waits for it.

    Raises:
        ResolverError: the resolver did not answer.
    """
    found: dict[str, Endpoint] = {}
    for settings in endpoints:
        templates = (settings.endpoint, settings.replay, settings.kv_events)
        for one in _at_each_address(templates):
            for rank in range(settings.ranks):
                endpoint, replay, kv_events = (
                    each and of_rank(each, rank) for each in one
                )
                assert endpoint is not None
                found[endpoint] = Endpoint(endpoint, replay, kv_events, settings)
    return list(found.values())


def _at_each_address(
    templates: tuple[str | None, ...],
) -> Iterable[tuple[str | None, ...]]:
    """``templates`` with their names replaced, one tuple an address of the first."""
    first = templates[0]
    assert first is not None
    if not first.startswith(DNS_PREFIX):
        yield templates
        return
    host = first.partition("://")[2].rpartition(":")[0]
    for address in _addresses(host):
        yield tuple(
            t and (_with_host(t, address) if t.startswith(DNS_PREFIX) else t)
            for t in templates
        )


def _with_host(endpoint: str, address: str) -> str:
    port = endpoint.rpartition(":")[2]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _addresses(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise ResolverError(f"cannot look up {name}: {error.strerror}") from None
    return sorted({str(answer[4][0]) for answer in answers})
