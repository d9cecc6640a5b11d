"""A worker outlives whatever its stream to the router ends with, but not the router's own refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from deploy import reporter
from deploy.cache_feed import CacheFeed
from deploy.reporter import Reporter
from deploy.step_feed import StepFeed
from deploy.step_meter import StepMeter
from model.block_pool import BlockPool
from model.runner import Chunk, StepOutput
from protos import workers_pb2, workers_pb2_grpc
from protos.credentials import Credentials
from protos.errors import FailedPrecondition, ServiceError, Unauthenticated
from protos.serve import GrpcServer
from protos.tls import TlsFiles
from tests.protos.certificates import Authority


class Router(workers_pb2_grpc.WorkersServicer):
    """Ends every stream but the last as told: with a code of gRPC's own, an error of ours, or (None) after a word.

    With a `refusal`, it ends the last like that too, as often as it is asked: gRPC may lose a status that comes while
    the worker is writing.
    """

    def __init__(self, *ends: grpc.StatusCode | ServiceError | None, refusal: ServiceError | None = None) -> None:
        self.registered: asyncio.Queue[str] = asyncio.Queue()
        self.steps: asyncio.Queue[workers_pb2.StepsReport] = asyncio.Queue()
        self._ends = list(ends)
        self._refusal = refusal

    async def Register(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for report in request_iterator:
            if report.HasField("steps"):
                self.steps.put_nowait(report.steps)
            if not report.HasField("hello"):
                continue
            self.registered.put_nowait(report.hello.worker_id)
            if self._ends:
                end = self._ends.pop(0)
                if isinstance(end, ServiceError):
                    raise end
                if end is None:
                    break
                await context.abort(end, "the connection is no more")
            elif self._refusal is not None:
                raise self._refusal
        yield workers_pb2.RouterCommand()


@asynccontextmanager
async def reporting_to(
    router: Router,
    tls: TlsFiles | None = None,
    credentials: Credentials | None = None,
    meter: StepMeter | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    server = GrpcServer("127.0.0.1", 0, tls=tls)
    server.add(workers_pb2_grpc.add_WorkersServicer_to_server, router)
    await server.start()
    hello, load = workers_pb2.WorkerHello(worker_id="w"), workers_pb2.WorkerLoad()
    reporter = Reporter(
        server.address, hello, lambda: load, CacheFeed(BlockPool(4)), StepFeed(meter or StepMeter()), credentials
    )
    running = asyncio.create_task(reporter.run())
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


async def test_steps_that_were_measured_go_out_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.step_feed._EVERY_S", 0.0)
    monkeypatch.setattr(reporter, "_AT_LEAST_EVERY_S", 0.0)
    router, meter = Router(), StepMeter()
    async with reporting_to(router, meter=meter), asyncio.timeout(5):
        await router.registered.get()
        meter.observe([Chunk([1] * 100, 0, [0])], StepOutput((None,), 0.25))
        (steps,) = (await router.steps.get()).prefill
        assert (steps.num_tokens, steps.num_pairs, steps.step_s) == (100, 10000, 0.25)
    assert meter.tallies == []


async def test_a_secret_that_changes_while_it_runs_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is running here has no part in it; but a worker that never was let in says so and ends."""
    monkeypatch.setattr(reporter, "_RETRY_S", 0.01)
    router = Router(None, Unauthenticated("another secret"))
    async with reporting_to(router) as running, asyncio.timeout(5):
        assert [await router.registered.get() for _ in range(3)] == ["w"] * 3
        assert not running.done()
    async with reporting_to(Router(refusal=Unauthenticated("another secret"))) as running, asyncio.timeout(5):
        with pytest.raises(Unauthenticated, match="another secret"):
            await running


@pytest.mark.parametrize(
    "case, problem", [("wrong CA", "unable to get local issuer"), ("expired", "certificate has expired")]
)
async def test_a_router_that_cannot_be_trusted_is_waited_for_and_told(
    case: str, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets its report once its files are right: the worker need not be started again."""
    monkeypatch.setattr(reporter, "_RETRY_S", 0.01)
    monkeypatch.setattr("protos.watched.LOOK_S", 0.0)
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    wrong = Authority(tmp_path, "other") if case == "wrong CA" else authority
    tls = wrong.issue("router", has_expired=case == "expired")
    router = Router()
    async with reporting_to(router, tls, Credentials(TlsFiles(ca=authority.path))) as running, asyncio.timeout(20):
        while problem not in caplog.text:
            await asyncio.sleep(0.01)
        assert router.registered.empty() and not running.done()
        authority.issue("router")
        assert await router.registered.get() == "w"


async def test_a_refusal_ends_it() -> None:
    router = Router(refusal=FailedPrecondition("another model"))
    async with reporting_to(router) as running, asyncio.timeout(5):
        with pytest.raises(FailedPrecondition, match="another model"):
            await running
