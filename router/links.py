"""Channels to workers: one for each process, shared by its requests, closed when worker and last user are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from protos.channel import open_channel
from router.placement import Candidate, WorkerId


@dataclass(slots=True)
class _Link:
    channel: grpc.aio.Channel
    num_users: int = 0
    is_retired: bool = False


class Links:
    def __init__(self) -> None:
        self._links: dict[WorkerId, _Link] = {}

    @asynccontextmanager
    async def to(self, worker: Candidate) -> AsyncIterator[grpc.aio.Channel]:
        link = self._links.get(worker.id)
        if link is None:
            link = self._links[worker.id] = _Link(open_channel(worker.address))
        link.num_users += 1
        try:
            yield link.channel
        finally:
            link.num_users -= 1
            await self._close_if_unused(worker.id)

    async def retire(self, worker_id: WorkerId) -> None:
        """The worker has left. Requests that it still serves go on: it may be the registration alone that broke."""
        if worker_id in self._links:
            self._links[worker_id].is_retired = True
            await self._close_if_unused(worker_id)

    async def close(self) -> None:
        links, self._links = self._links, {}
        await asyncio.gather(*(link.channel.close() for link in links.values()))

    async def _close_if_unused(self, worker_id: WorkerId) -> None:
        link = self._links.get(worker_id)
        if link is not None and link.is_retired and link.num_users == 0:
            del self._links[worker_id]
            await link.channel.close()
