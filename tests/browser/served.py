"""A fake router and a dashboard that asks it, for a test that waits in another thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from protos.caller import Caller
from router.dashboard.server import Dashboard, DashboardConfig
from tests.browser.fake_cluster import FakeCluster
from tests.browser.fake_router import FakeRouter, Planning, with_history


class Served:
    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        *,
        cluster: FakeCluster | None = None,
        keys: Mapping[str, Caller] | None = None,
        **serves: Any,
    ) -> None:
        self._run = run
        self._keys = keys
        self._serves = serves
        self.planning = with_history(Planning())
        self.cluster = cluster or FakeCluster()
        self._router: FakeRouter | None = None
        self._dashboard: Dashboard | None = None

    @property
    def router(self) -> FakeRouter:
        assert self._router is not None
        return self._router

    @property
    def url(self) -> str:
        assert self._dashboard is not None
        return self._dashboard.url

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._stop())

    def stop_router(self) -> None:
        self._run(self.router.server.stop())

    def restart_router(self) -> None:
        """At the same address."""
        self._run(self._start_router(self.router.port))

    async def _start_router(self, port: int) -> None:
        self._router = FakeRouter(self.cluster, port=port, keys=self._keys, planning=self.planning, **self._serves)
        await self._router.server.start()

    async def _start(self) -> None:
        await self._start_router(0)
        self._dashboard = Dashboard(DashboardConfig(self.router.address, port=0))
        await self._dashboard.__aenter__()

    async def _stop(self) -> None:
        if self._dashboard is not None:
            await self._dashboard.stop()
        if self._router is not None:
            await self._router.server.stop()
