"""The dashboard beside a router on this machine: where it listens, how it is started, and whether it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.free_port import free_port


@dataclass(frozen=True, slots=True)
class PageConfig:
    """Arguments are those of `pdserve dashboard`, beside where it listens and whom it asks."""

    port: int = 0  # 0: any that is free
    arguments: Sequence[str] = ()
    is_encrypted: bool = False


class Page:
    def __init__(self, config: PageConfig, host: str) -> None:
        """Raises OSError if the port is not free."""
        self._config = config
        self._host = host
        self._port = free_port(host, config.port, "--dashboard-port")

    @property
    def url(self) -> str:
        return f"{'https' if self._config.is_encrypted else 'http'}://{self._host}:{self._port}"

    def command(self, router_address: str) -> list[str]:
        listening = ["--router", router_address, "--host", self._host, "--port", str(self._port)]
        return ["dashboard", *listening, *self._config.arguments]

    async def is_served(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return False
        writer.close()
        return True
