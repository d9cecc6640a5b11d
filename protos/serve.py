"""A gRPC server the way all our processes have it: errors with details, metrics, health, reflection, an orderly end.

Knows nothing of what is served. Handlers raise `protos.errors.ServiceError`; anything else is a defect, and INTERNAL.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
import prometheus_client
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.calls import CallInterceptor
from protos.channel import KEEPALIVE_S, MAX_MESSAGE_BYTES, Options, keepalive_options
from protos.guard import Guard
from protos.tls import TlsFiles, server_credentials

logger = logging.getLogger(__name__)

Servicer = TypeVar("Servicer")

_UNWIND_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server bears of its callers. Streams are those of one connection, calls those of all of them."""

    keepalive_s: float = KEEPALIVE_S
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_metadata_bytes: int = 16 * 2**10  # the headers of a call
    max_streams: int = 1024  # more of them wait at the caller
    max_calls: int = 20_000  # more are refused: RESOURCE_EXHAUSTED
    handshake_s: float = 10.0
    idle_s: float = 600.0  # a connection without calls is closed; its client connects anew when it has one
    unread_s: float = 30.0  # a message that is not read for so long ends its stream


def _options(limits: ServerLimits) -> Options:
    return (
        ("grpc.so_reuseport", 0),  # two processes on one port would each get some of the calls
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),  # between the two, chance would decide
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
        *keepalive_options(limits.keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.keepalive_s * 500)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(limits.keepalive_s * 500)),
    )


class GrpcServer:
    """`add` services, `start`, `stop`. Health: the empty name is the process (liveness), each service has its own."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: TlsFiles | None = None,
        guard: Guard | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """Without `tls` in clear, without `guard` for everybody."""
        limits = limits or ServerLimits()
        self._host = host
        self._port = port
        self._tls = tls
        self._calls = CallInterceptor(guard or Guard(), limits.unread_s)
        self._server = grpc.aio.server(
            interceptors=[self._calls], options=_options(limits), maximum_concurrent_rpcs=limits.max_calls
        )
        self._health = health.aio.HealthServicer()
        self._services: list[str] = []

    @property
    def address(self) -> str:
        """With the port that was taken, once started."""
        return joined_address(self._host, self._port)

    @property
    def num_requests(self) -> int:
        """Calls being served whose end is their own: not the streams that last as long as a peer."""
        return self._calls.num_requests

    def add(self, register: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer) -> None:
        """Adds a service by its generated `add_XServicer_to_server`."""
        register(servicer, _Registrar(self))  # type: ignore[arg-type]

    def add_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]) -> None:
        self._services.append(service)
        self._calls.requests |= {f"/{service}/{name}" for name, kind in handlers.items() if not kind.request_streaming}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))

    async def start(self) -> None:
        """Raises OSError, naming the address, if it cannot be listened at; what TLS files that are unusable raise."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        for service in self._services:
            await self.set_serving(service, True)
        _check_bindable(self._host, self._port)
        try:
            self._port = self._listening()
        except RuntimeError as error:
            raise OSError(f"cannot listen at {self.address}: {error}") from error
        await self._server.start()

    def _listening(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(self.address)
        return self._server.add_secure_port(self.address, server_credentials(self._tls))

    async def set_serving(self, service: str, serving: bool) -> None:
        """Whether `service` could do its work now (readiness)."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Tells health checks, lets requests finish for up to `grace_s`, then cancels what is left and closes.

        When it returns, every handler has (or has ignored being cancelled, which is logged).
        """
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_s):
                await self._calls.no_requests()
        except TimeoutError:
            pass  # these have had their time
        finally:
            await self._server.stop(None)
            await self._unwound()

    async def _unwound(self) -> None:
        try:
            async with asyncio.timeout(_UNWIND_S):
                await self._calls.no_calls()
        except TimeoutError:
            logger.error("handlers at %s are still running after they were cancelled", self.address)


class MetricsServer:
    """Prometheus metrics over HTTP, in a thread of its own, until `close`."""

    def __init__(self, server: WSGIServer, thread: threading.Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        self.address = address

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


async def drain_on_signal(drain: Callable[[], Awaitable[None]]) -> None:
    """Waits for SIGTERM or SIGINT, then for `drain`; a second signal cancels that. Later ones are ignored."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)  # until the loop is closed
    await received.get()
    draining, again = asyncio.ensure_future(drain()), asyncio.ensure_future(received.get())
    try:
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (draining, again):
            task.cancel()
        await asyncio.wait([draining, again])
    if not draining.cancelled():
        draining.result()


def serve_metrics(host: str, port: int) -> MetricsServer:
    """Port 0 takes any that is free. Raises OSError, naming the address, if it cannot be listened at."""
    _check_bindable(host, port)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of its own for each, which nobody asks for
    server, thread = prometheus_client.start_http_server(port, host)
    return MetricsServer(server, thread, joined_address(host, server.server_port))


class _Registrar:
    """Stands for the server in generated code, to learn the name of the service and its handlers."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers come by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[object, object]]
    ) -> None:
        self._server.add_handlers(service, handlers)


def joined_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Port 0 takes any that is free. Raises OSError, naming the address and why, and the option that gives the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        hint = f"; choose another {option}, or 0 for any that is free" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen at {joined_address(host, port)}: {error.strerror or error}{hint}") from error
    return bound


def _check_bindable(host: str, port: int) -> None:
    """gRPC says only that it failed, and says it to stderr; the system knows why."""
    bound_socket(host, port).close()
