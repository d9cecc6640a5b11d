"""The client that reads at workers, against a router and a worker that say what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos import decode_pb2, decode_pb2_grpc, inference_pb2_grpc
from protos import inference_pb2 as pb
from protos.client import PdserveClient
from protos.errors import Internal, Interrupted
from protos.serve import GrpcServer
from protos.values import Sampling
from tests.protos.test_client import SUMMARY, Scripted, tokens
from tests.router.asking import answer


class Both(Scripted, decode_pb2_grpc.DirectServicer):
    """A router and its worker in one: `address` is set once it is known."""

    def __init__(self, at_worker: list[pb.GenerateResponse], at_router: list[pb.GenerateResponse]) -> None:
        super().__init__([])
        self.address = ""
        self.at_worker = at_worker
        self.at_router = at_router
        self.num_read = 0
        self.breaks_off: Exception | None = None  # once
        self.asked: list[list[int]] = []
        self.go_on = asyncio.Event()  # what the router says after its directions

    async def Route(self, request: pb.RouteRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append([token for each in request.generate.emitted for token in each.ids])
        yield pb.GenerateResponse(directions=pb.Directions(address=self.address, attempt_id="a", permit=b"p" * 32))
        await self.go_on.wait()
        for message in self.at_router:
            yield message

    async def Read(self, request: decode_pb2.ReadRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for message in self.at_worker:
            yield message
            self.num_read += 1
        if self.breaks_off is not None:
            error, self.breaks_off = self.breaks_off, None
            raise error


@asynccontextmanager
async def reading_from(both: Both) -> AsyncIterator[PdserveClient]:
    server = GrpcServer("127.0.0.1", 0)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, both)
    server.add(decode_pb2_grpc.add_DirectServicer_to_server, both)
    await server.start()
    both.address = server.address
    try:
        async with PdserveClient(server.address, direct=True) as client:
            yield client
    finally:
        await server.stop()


@pytest.mark.parametrize("num_ahead", [1, 1000])
async def test_worker_may_be_far_ahead_of_a_router_that_stands_still(num_ahead: int) -> None:
    text = "x" * 1000  # so that what is not taken does not find room on the way
    said = [tokens(index, index, text=text) for index in range(1, num_ahead)]
    last = tokens(num_ahead, num_ahead, finish_reason=pb.FINISH_REASON_LENGTH)
    both = Both([*said, last], [tokens(0, 0), SUMMARY])
    async with reading_from(both) as client:
        asking = asyncio.create_task(answer(client, Sampling(max_tokens=num_ahead + 1)))
        num_before = -1
        while both.num_read == 0 or both.num_read > num_before:  # as far as the client takes it
            num_before = both.num_read
            await asyncio.sleep(0.2)
        both.go_on.set()
        got, _, _ = await asking
    assert got == list(range(num_ahead + 1))
    assert num_before <= 512


async def test_router_that_ends_without_a_summary_is_not_waited_for() -> None:
    both = Both([tokens(1, 1, finish_reason=pb.FINISH_REASON_LENGTH)], [tokens(0, 0)])
    both.go_on.set()
    async with reading_from(both) as client, asyncio.timeout(10):
        with pytest.raises(Internal, match="the answer ended without its summary"):
            await answer(client, Sampling(max_tokens=2))


@pytest.mark.parametrize("breaks_off", [Interrupted("its client has stopped reading"), None])
async def test_end_that_is_lost_on_its_way_from_the_worker_is_asked_for(breaks_off: Exception | None) -> None:
    """The worker has made it and the router has it, but the client has not, however the stream ended."""
    both = Both([tokens(1, 1)], [tokens(0, 0), SUMMARY])
    both.breaks_off = breaks_off
    both.go_on.set()
    async with reading_from(both) as client, asyncio.timeout(20):
        parts = client.generate("x", sampling=Sampling(max_tokens=3))
        assert [(await anext(parts)).output_index for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        both.at_worker, both.at_router = [tokens(2, 2, finish_reason=pb.FINISH_REASON_LENGTH)], [SUMMARY]
        rest = [part async for part in parts]
    assert both.asked == [[], [0, 1]]
    assert rest[0].token_ids == (2,) and len(rest) == 2  # type: ignore[union-attr]
