"""The dashboard's process put together: how it listens, whom it asks, and when it ends."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from protos.credentials import is_loopback
from protos.security import Exposed
from protos.serve import drain_on_signal
from protos.tls import TlsFiles, server_context
from router.dashboard.door import application
from router.dashboard.visitors import RouterAccess, Visitors
from router.http_server import HttpServer

logger = logging.getLogger(__name__)

_LAST_CALLS_S = 2.0


@dataclass(frozen=True, slots=True)
class DashboardConfig:
    """`tls` is for both sides: with a certificate the page is served by TLS, and the routers are shown it.

    `names`: hosts by which people reach the page, beside localhost, this machine's own name and every address.
    """

    router_address: str  # or several, with commas between
    host: str = "127.0.0.1"
    port: int = 8600
    tls: TlsFiles | None = None
    insecure: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises Exposed."""
        if is_loopback(self.host) or self.insecure or self.is_encrypted:
            return
        raise Exposed(
            f"--host {self.host} can be reached from other machines, and keys would come from there unencrypted: give "
            "--tls-cert and --tls-key, listen at 127.0.0.1, or say --insecure if the network is yours alone"
        )

    @property
    def is_encrypted(self) -> bool:
        return self.tls is not None and self.tls.cert is not None

    @property
    def access(self) -> RouterAccess:
        addresses = tuple(address.strip() for address in self.router_address.split(","))
        is_exposed = not (is_loopback(self.host) or self.insecure)
        return RouterAccess(addresses, self.tls, self.insecure, is_exposed)


async def serve_dashboard(config: DashboardConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError for a port in use, what TLS files that are unusable raise."""
    async with Dashboard(config) as dashboard:
        logger.info("the dashboard of %s is at %s", config.router_address, dashboard.url)
        await drain_on_signal(dashboard.stop)


class Dashboard:
    """`async with Dashboard(config) as dashboard:` serves at `dashboard.url` inside, and has closed all behind."""

    def __init__(self, config: DashboardConfig) -> None:
        self._scheme = "https" if config.is_encrypted else "http"
        self._visitors = Visitors(config.access)
        app = application(self._visitors, (*config.names, config.host, socket.gethostname()))
        tls = server_context(config.tls) if config.tls is not None and config.is_encrypted else None
        self._server = HttpServer(app, config.host, config.port, tls, port_option="--port")

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self._server.address}"

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._visitors.end()
        await self._server.stop(_LAST_CALLS_S)
        await self._visitors.close()
