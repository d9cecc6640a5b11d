"""A worker outlives whatever its stream to the router ends with, but not the router's own refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from deploy import reporter
from deploy.cache_feed import CacheFeed
from deploy.reporter import Reporter
from model.block_pool import BlockPool
from protos import workers_pb2, workers_pb2_grpc
from protos.errors import FailedPrecondition, ServiceError
from protos.serve import GrpcServer


class Router(workers_pb2_grpc.WorkersServicer):
    """Ends every stream but the last as it is told to: with a code of gRPC's own, or by an error of ours."""

    def __init__(self, *ends: grpc.StatusCode | ServiceError) -> None:
        self.registered: asyncio.Queue[str] = asyncio.Queue()
        self._ends = list(ends)

    async def Register(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for report in request_iterator:
            if not report.HasField("hello"):
                continue
            self.registered.put_nowait(report.hello.worker_id)
            if self._ends:
                end = self._ends.pop(0)
                if isinstance(end, ServiceError):
                    raise end
                await context.abort(end, "the connection is no more")
        yield workers_pb2.RouterCommand()


@asynccontextmanager
async def reporting_to(router: Router) -> AsyncIterator[asyncio.Task[None]]:
    server = GrpcServer("127.0.0.1", 0)
    server.add(workers_pb2_grpc.add_WorkersServicer_to_server, router)
    await server.start()
    hello, load = workers_pb2.WorkerHello(worker_id="w"), workers_pb2.WorkerLoad()
    running = asyncio.create_task(Reporter(server.address, hello, lambda: load, CacheFeed(BlockPool(4))).run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait([running])
        await server.stop()


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE],
)
async def test_a_stream_that_breaks_is_opened_again(monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode) -> None:
    """gRPC has many names for that, INTERNAL for one: so it ends for a worker that was stopped for a while."""
    monkeypatch.setattr(reporter, "_RETRY_S", 0.01)
    router = Router(code)
    async with reporting_to(router) as running, asyncio.timeout(5):
        assert [await router.registered.get() for _ in range(2)] == ["w", "w"]
        assert not running.done()


async def test_a_refusal_ends_it() -> None:
    router = Router(FailedPrecondition("another model"))
    async with reporting_to(router) as running, asyncio.timeout(5):
        with pytest.raises(FailedPrecondition, match="another model"):
            await running
