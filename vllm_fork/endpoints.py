"""Binding ZMQ sockets to the endpoints that the settings name."""

from __future__ import annotations

import errno
import socket as unix

import zmq


class EndpointError(OSError):
    """An endpoint cannot be bound; the message is one sentence."""


def bind(socket: zmq.Socket, endpoint: str) -> str:
    """Bind ``socket`` and return the endpoint with the port it really got.

    Raises:
        EndpointError: taken, not permitted, or no such address or folder.
    """
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    # libzmq unlinks a Unix socket's path before it binds: a second publisher would
    # take the first one's readers without a word.
    if endpoint.startswith("ipc://") and _is_listening(endpoint):
        raise EndpointError(f"{endpoint} is in use by another process.")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointError(f"{endpoint} is in use by another process.") from None
        raise EndpointError(f"{endpoint} cannot be bound: {error.strerror}.") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def check_free(endpoint: str) -> None:
    """Bind ``endpoint`` and let go of it again.

    Raises:
        EndpointError: as :func:`bind`.
    """
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        bind(socket, endpoint)


def _is_listening(endpoint: str) -> bool:
    path = endpoint.removeprefix("ipc://")
    if path.startswith("@"):
        path = "\0" + path[1:]
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
