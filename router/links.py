"""Channels to workers: one for each process, shared by its requests, closed when worker and last user are gone.

A worker that has fallen silent is given up: its calls end at once, rather than when the transport notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc.aio

from protos.channel import open_channel
from protos.credentials import Credentials
from router.bundle import Bundle
from router.candidate import Candidate, WorkerId

Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any]"


@dataclass(slots=True)
class Link:
    """`is_given_up` tells a call that was ended because its worker is silent from one that was cancelled."""

    channel: grpc.aio.Channel
    num_users: int = 0
    is_retired: bool = False
    is_given_up: bool = False
    calls: list[Call] = field(default_factory=list)
    bundle: Bundle | None = None

    def current_bundle(self) -> Bundle:
        """A new one if there is none yet, or what was is broken."""
        if self.bundle is None or self.bundle.is_broken:
            self.bundle = Bundle(self.channel)
        return self.bundle

    async def close(self) -> None:
        if self.bundle is not None:
            await self.bundle.close()
        await self.channel.close()

    @contextmanager
    def follow(self, call: Call) -> Iterator[None]:
        """Ends the call on leaving, and before if the worker is given up."""
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)
            call.cancel()  # nothing happens if it has ended


class Links:
    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._links: dict[WorkerId, Link] = {}

    def check_address(self, address: str) -> None:
        """Raises FailedPrecondition for one that may not be called at all."""
        if self._credentials is not None:
            self._credentials.check_address(address)

    @asynccontextmanager
    async def to(self, worker: Candidate) -> AsyncIterator[Link]:
        link = self._links.get(worker.id)
        if link is None:
            link = self._links[worker.id] = Link(open_channel(worker.address, self._credentials))
        link.num_users += 1
        try:
            yield link
        finally:
            link.num_users -= 1
            await self._close_if_unused(link)

    async def retire(self, worker_id: WorkerId) -> None:
        """The worker has left. Requests that it still serves go on: it may be the registration alone that broke."""
        link = self._links.pop(worker_id, None)
        if link is not None:
            link.is_retired = True
            await self._close_if_unused(link)

    async def give_up(self, worker_id: WorkerId) -> None:
        """The worker is silent: ends its calls. Should it speak again, it gets a new channel."""
        link = self._links.get(worker_id)
        if link is not None:
            link.is_given_up = True
            for call in list(link.calls):
                call.cancel()
            await self.retire(worker_id)

    async def close(self) -> None:
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    @staticmethod
    async def _close_if_unused(link: Link) -> None:
        if link.is_retired and link.num_users == 0:
            await link.close()
