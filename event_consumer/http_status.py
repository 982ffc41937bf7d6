"""``/healthz``, ``/livez`` and ``/metrics`` over HTTP, on the service's own loop.

A loop that hangs does not answer, which is what a liveness probe wants to know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

REQUEST_TIMEOUT_S: Final = 5.0
MAX_HEAD_BYTES: Final = 16 * 1024

Response = tuple[HTTPStatus, str, bytes]


class StatusServer:
    """Answers GET and HEAD, one request a connection."""

    def __init__(self) -> None:
        self._problems: Callable[[], list[str]] = list
        self._metrics: Callable[[str], tuple[bytes, str]] | None = None
        self._server: asyncio.Server | None = None

    async def bind(self, host: str, port: int) -> int:
        """Take the address, and answer nobody yet; returns the port (of ``port`` 0:
        the one that was free).

        Raises:
            OSError: the address cannot be had.
        """
        self._server = await asyncio.start_server(
            self._answer, host, port, limit=MAX_HEAD_BYTES, start_serving=False
        )
        return self._server.sockets[0].getsockname()[1]

    async def serve(
        self,
        problems: Callable[[], list[str]],
        metrics: Callable[[str], tuple[bytes, str]],
    ) -> None:
        """Answer from now on.

        Args:
            problems: what is wrong now, a sentence each.
            metrics: body and content type for an ``Accept`` header; may take a
                while, runs on a thread.

        Raises:
            OSError: another has taken the address since :meth:`bind`.
        """
        assert self._server is not None
        self._problems, self._metrics = problems, metrics
        await self._server.start_serving()

    async def stop(self) -> None:
        """May be called again."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = await self._respond(head.decode("latin-1"))
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\n"
                    f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                if not head.startswith(b"HEAD "):
                    writer.write(body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.LimitOverrunError:
            pass
        finally:
            writer.close()

    async def _respond(self, head: str) -> Response:
        request, *headers = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET or HEAD\n"
        if path == "/livez":
            return HTTPStatus.OK, "text/plain", b"ok\n"
        if path == "/healthz":
            problems = self._problems()
            status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
            body = {"status": "unhealthy" if problems else "ok", "problems": problems}
            return status, "application/json", json.dumps(body).encode() + b"\n"
        if path == "/metrics" and self._metrics is not None:
            accept = next(
                (h.partition(":")[2] for h in headers if h[:7].lower() == "accept:"), ""
            )
            text, content_type = await asyncio.to_thread(self._metrics, accept)
            return HTTPStatus.OK, content_type, text
        return HTTPStatus.NOT_FOUND, "text/plain", b"/healthz, /livez or /metrics\n"
