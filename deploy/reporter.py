"""Keeps a worker registered with the router: one stream that says who it is, then how it fares; commands come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from deploy.cache_feed import CacheFeed, CacheNews
from deploy.step_feed import StepFeed
from protos import workers_pb2, workers_pb2_grpc
from protos.channel import open_channel
from protos.credentials import Credentials
from protos.errors import ServiceError, Unauthenticated, from_rpc_error, is_connection_failure
from router.step_messages import steps_message

logger = logging.getLogger(__name__)

_LOOK_S = 0.05  # how soon a change of load, or of the prefix cache, is reported
_PAUSE_S = 0.005  # between messages of one dump
_AT_LEAST_EVERY_S = 1.0
_RETRY_S = 0.5


class Reporter:
    """To one router. `run` lasts as long as the worker. One that is away is waited for; its refusal ends this."""

    def __init__(
        self,
        router_address: str,
        hello: workers_pb2.WorkerHello,
        load: Callable[[], workers_pb2.WorkerLoad],
        feed: CacheFeed,
        steps: StepFeed,
        credentials: Credentials | None = None,
        told: Callable[[Sequence[str]], None] = lambda addresses: None,
    ) -> None:
        """`told` is called with the addresses of all routers, as often as this one tells them, and when it is away."""
        self._router_address = router_address
        self._hello = hello
        self._load = load
        self._feed = feed
        self._steps = steps
        self._credentials = credentials
        self._told = told
        self._is_away = False
        self._was_registered = False

    async def run(self) -> None:
        """Raises the router's refusal (another model, another layout), which no retry would change."""
        async with open_channel(self._router_address, self._credentials) as channel, _closed(self._feed, self._steps):
            stub = workers_pb2_grpc.WorkersStub(channel)
            while True:
                try:
                    await self._session(stub)
                except grpc.aio.AioRpcError as error:
                    refusal = from_rpc_error(error)
                    if not (refusal.retryable or is_connection_failure(error) or self._may_be_known_again(refusal)):
                        raise refusal from None
                    if not self._is_away:
                        logger.info("router %s is away (%s); waiting for it", self._router_address, refusal)
                self._is_away = True
                self._told(())
                await asyncio.sleep(_RETRY_S)

    def _may_be_known_again(self, refusal: ServiceError) -> bool:
        """The secret of the cluster is being replaced: what runs here need not end for that."""
        return self._was_registered and isinstance(refusal, Unauthenticated)

    async def _session(self, stub: workers_pb2_grpc.WorkersStub) -> None:
        """A role that was set is kept: it is what this worker registers with at a router that has restarted."""
        async for command in stub.Register(self._reports()):
            self._is_away, self._was_registered = False, True
            if command.HasField("set_role"):
                self._hello.role = command.set_role
            if command.routers:
                self._told(command.routers)
            if command.dump_cache:
                self._feed.dump()

    async def _reports(self) -> AsyncIterator[workers_pb2.WorkerReport]:
        """What the router misses of the prefix cache goes out in small messages: tokens are streamed meanwhile."""
        self._feed.dump()
        self._steps.begin()
        load = self._load()
        yield workers_pb2.WorkerReport(hello=self._hello, load=load)
        reported_at = time.monotonic()
        while True:
            news = self._feed.next()
            current = self._load()
            if news is not None or current != load or time.monotonic() - reported_at > _AT_LEAST_EVERY_S:
                load, reported_at = current, time.monotonic()
                yield workers_pb2.WorkerReport(
                    load=load,
                    cache=None if news is None else _message(news),
                    steps=steps_message(steps) if (steps := self._steps.next()) else None,
                )
            await asyncio.sleep(_LOOK_S if news is None else _PAUSE_S)


@asynccontextmanager
async def _closed(*feeds: CacheFeed | StepFeed) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for feed in feeds:
            feed.close()


def _message(news: CacheNews) -> workers_pb2.CacheChanges:
    return workers_pb2.CacheChanges(
        number=news.number,
        stored=b"".join(news.stored),
        removed=b"".join(news.removed),
        begins_dump=news.begins_dump,
        ends_dump=news.ends_dump,
    )
