"""What a router asks a worker of its inside, and what its caller is told if nothing comes."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest

from protos import insights_pb2 as pb
from protos import insights_pb2_grpc, workers_pb2
from protos.calls import Context
from protos.client import PdserveClient
from protos.errors import Internal, NotFound, ServiceError, Unavailable, Unimplemented
from protos.guard import Guard
from protos.insight_values import DraftInsights, ExpertLoad
from protos.secret import ClusterSecret
from protos.security import Security
from protos.serve import GrpcServer
from router.candidate import Role
from router.config import RouterConfig
from router.server import Router
from tests.router.fakes import CARD, FakeFleet, FakeWorker, running_fleet
from tests.router.test_workers import READY, profile


class Inside(insights_pb2_grpc.InsideServicer):
    def __init__(self) -> None:
        self.error: ServiceError | None = None
        self.waits = False
        self.deadlines_s: list[float | None] = []

    async def GetInsights(self, request: pb.GetInsightsRequest, context: Context) -> pb.WorkerInsights:
        self.deadlines_s.append(context.time_remaining())
        if self.waits:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return pb.WorkerInsights(
            worker_id="w0",
            drafts=[pb.DraftInsights(source="eagle", acceptance=[0.5, 0.25], lengths=[1, 2], speedup=1.5)],
            experts=[pb.ExpertLoad(layer=3, shares=[0.75, 0.25], imbalance=1.5)],
            transfers=pb.TransferInsights(num_leases=7, exposed_p90_s=0.25),
            draft_reason="fastest",
            uptime_s=5.0,
        )


async def with_inside(fleet: FakeFleet, inside: Inside) -> FakeWorker:
    worker = FakeWorker("w0", workers_pb2.ROLE_BOTH, fleet.hand_over, "e1", 100)
    worker.server.add(insights_pb2_grpc.add_InsideServicer_to_server, inside)
    fleet.workers["w0"] = worker
    await worker.start(fleet.router.address)
    return worker


async def test_what_a_worker_says_is_passed_on() -> None:
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        await with_inside(fleet, inside := Inside())
        told = await client.get_worker_insights("w0", deadline_s=10)
    assert told.drafts == (DraftInsights("eagle", (0.5, 0.25), (1, 2), 0.0, 1.5, 0, 0),)
    assert told.experts == (ExpertLoad(3, (0.75, 0.25), 1.5),)
    assert (told.transfers.num_leases, told.transfers.exposed_p90_s) == (7, 0.25)
    assert (told.worker_id, told.draft_reason, told.uptime_s) == ("w0", "fastest", 5.0)
    (deadline_s,) = inside.deadlines_s
    assert deadline_s is not None and 0 < deadline_s < 3.5  # to be 3 s of the caller's 10; gRPC rounds it up


async def test_one_that_is_not_there() -> None:
    async with running_fleet(num_both=1) as fleet, PdserveClient(fleet.router.address) as client:
        with pytest.raises(NotFound, match="no worker 'w7' is registered; there are: w0") as caught:
            await client.get_worker_insights("w7", deadline_s=10)
        assert caught.value.field == "worker_id"
        with pytest.raises(Unimplemented, match="worker 'w0' is of a version that tells nothing of its inside"):
            await client.get_worker_insights("w0", deadline_s=10)


async def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.insights_service._ASK_S", 0.2)
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        worker = await with_inside(fleet, inside := Inside())
        inside.waits = True
        with pytest.raises(Unavailable, match=r"worker 'w0' did not answer within 0\.2 s"):
            await client.get_worker_insights("w0", deadline_s=10)
        inside.waits, inside.error = False, Internal("a defect")
        with pytest.raises(Unavailable, match="worker 'w0' did not answer: a defect"):
            await client.get_worker_insights("w0", deadline_s=10)
        monkeypatch.setattr("router.insights_service._ASK_S", 3.0)
        await worker.server.stop()  # it is registered still
        with pytest.raises(Unavailable, match="worker 'w0'"):
            await client.get_worker_insights("w0", deadline_s=10)


async def test_it_asks_with_the_secret_of_the_cluster(tmp_path: Path) -> None:
    """A worker lets nobody else in, and what it has against a router is not laid at the caller's door."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    for path in (ours, other):
        path.write_text(hashlib.sha256(path.name.encode()).hexdigest())
    server = GrpcServer("127.0.0.1", 0, guard=Guard(ClusterSecret(ours)))
    server.add(insights_pb2_grpc.add_InsideServicer_to_server, Inside())
    await server.start()
    for path in (ours, other):
        config = RouterConfig("tiny", port=0, security=Security(secret_file=path))
        async with Router(config, CARD) as router, PdserveClient(router.address) as client:
            known = profile("w0", Role.BOTH, tokenizer_digest="digest-1", address=server.address)
            router.table.register(known, READY)
            if path is ours:
                assert (await client.get_worker_insights("w0", deadline_s=10)).uptime_s == 5.0
            else:
                with pytest.raises(Unavailable, match="did not answer: the secret is not that of this cluster"):
                    await client.get_worker_insights("w0", deadline_s=10)
    async with grpc.aio.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await insights_pb2_grpc.InsideStub(channel).GetInsights(pb.GetInsightsRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop()
