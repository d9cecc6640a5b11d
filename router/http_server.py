"""An HTTP server the way our processes have it: in the loop that is there, quiet, with limits, and an orderly end.

Knows nothing of what is served: that is an ASGI application, whose calls it counts. uvicorn speaks the protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos.serve import bound_socket, joined_address
from router.metrics import HTTP_REQUESTS, UNKNOWN_ROUTE

MAX_HEADER_BYTES = 32 * 2**10  # the request line and all headers together
MAX_CONNECTIONS = 4096  # beyond them, 503
_HEADERS_S = 20.0  # for a connection to bring the headers of a request, the first one or another
_SILENT_READER_S = 60.0  # one that takes nothing for so long is gone, as is one that no longer answers at all
_CLOSE_S = 1.0  # for the last bytes to leave


class HttpServer:
    """`start`, then `stop`. Calls that are still running at its end are cancelled, and may say so to their clients."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        port_option: str = "--http-port",
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._port_option = port_option
        self._server = _Server(_settings(self._counted, tls))
        self._serving: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def address(self) -> str:
        """With the port that was taken, once started."""
        return joined_address(self._host, self._port)

    async def start(self) -> None:
        """Raises OSError, naming the address, if it cannot be listened at."""
        listener = bound_socket(self._host, self._port, self._port_option)
        self._port = listener.getsockname()[1]
        _end_silent_readers(listener)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait([self._serving, started], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            self._serving.result()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Lets calls finish for up to `grace_s`, then cancels what is left and closes. New ones are served till then:
        they are the application's to refuse."""
        if self._serving is None:
            return
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._is_idle.wait()
        finally:
            for call in self._running:
                call.cancel()
            self._server.end()
            await asyncio.wait([self._serving])
            self._server.abort_connections()
            self._serving.result()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = asyncio.current_task()
        assert call is not None
        self._running.add(call)
        self._is_idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running.remove(call)
            if not self._running:
                self._is_idle.set()


class _Server(uvicorn.Server):
    """Signals are the process's own, and so is when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()
        self._ending = asyncio.Event()

    def end(self) -> None:
        self._ending.set()

    def abort_connections(self) -> None:
        """Of readers that have not taken all that was said."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.on_tick(0)
        self.has_started.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it should end."""
        while not self._ending.is_set():
            await self.on_tick(0)  # writes the Date header anew
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()


class _Protocol(H11Protocol):
    """Closes a connection that is slow to bring its headers: uvicorn times only those that have had an answer."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, or has too many headers. uvicorn's own is plain text."""
        told = f"this is no HTTP request that is understood here; headers may have {MAX_HEADER_BYTES} bytes at most"
        body = json.dumps({"error": {"message": told, "type": "invalid_request_error", "param": None, "code": None}})
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.our_state is h11.IDLE:  # else the application has it, and counts it
                HTTP_REQUESTS.labels(UNKNOWN_ROUTE, "400").inc()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n{body}".encode())
        self.transport.close()

    def _time_headers(self) -> None:
        if self.conn.their_state is h11.IDLE:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(_HEADERS_S, self.transport.close)
        elif self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


def _settings(app: Callable[[Scope, Receive, Send], Any], tls: ssl.SSLContext | None) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below that, it tells what clients do wrong
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=round(_CLOSE_S),
        timeout_keep_alive=round(_HEADERS_S),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        reset_contextvars=True,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )


def _end_silent_readers(listener: socket.socket) -> None:
    """The kernel ends connections whose other end takes nothing, or is gone: those accepted here have its options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(_SILENT_READER_S / 2)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(_SILENT_READER_S / 6)))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_SILENT_READER_S * 1000))
