"""What one server bears of its callers: those that do not read, speak too much, or open too many streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from prometheus_client import REGISTRY

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import ResourceExhausted, ServiceError
from protos.serve import GrpcServer, ServerLimits
from tests.protos.slow_client import WINDOW, SlowClient

GENERATE = "/pdserve.v1.Inference/Generate"
UNREAD_S = 0.4


@dataclass
class Endless(inference_pb2_grpc.InferenceServicer):
    """Answers that never end, and how they ended."""

    num_written: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    how: BaseException | None = None

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield inference_pb2.GenerateResponse(text="x" * 1000)
                self.num_written += 1
        except BaseException as error:
            self.how = error
            raise
        finally:
            self.ended.set()

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.Model:
        return inference_pb2.Model(name=request.model)


@asynccontextmanager
async def serving(limits: ServerLimits) -> AsyncIterator[tuple[Endless, GrpcServer]]:
    endless, server = Endless(), GrpcServer("127.0.0.1", 0, limits=limits)  # type: ignore[abstract]
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, endless)
    await server.start()
    try:
        yield endless, server
    finally:
        await server.stop()


def num_slow_readers() -> float:
    return REGISTRY.get_sample_value("pdserve_grpc_slow_readers_total", {"method": GENERATE}) or 0.0


async def test_a_client_that_does_not_read_holds_little_and_is_ended() -> None:
    """The handler gets no further than the client's window and is closed; the client is told once it reads."""
    before = num_slow_readers()
    async with serving(ServerLimits(unread_s=UNREAD_S)) as (endless, server):
        async with SlowClient(server.address, GENERATE, b"") as client, asyncio.timeout(20):
            await client.is_full.wait()
            await endless.ended.wait()
            assert isinstance(endless.how, asyncio.CancelledError | GeneratorExit)
            assert endless.num_written <= WINDOW // 1000 + 2
            while server.num_requests:
                await asyncio.sleep(0.01)
            client.give_room(1_000_000)
            trailers = await client.trailers()
        assert b"grpc-status\x018" in trailers and b"a message was not read for 0.4 s" in trailers
    assert num_slow_readers() == before + 1


async def test_a_client_that_reads_slowly_but_reads_is_not_ended() -> None:
    """For several times as long as one message may wait."""
    limits = ServerLimits(unread_s=UNREAD_S)
    async with (
        serving(limits) as (endless, server),
        SlowClient(server.address, GENERATE, b"") as client,
        asyncio.timeout(20),
    ):
        await client.is_full.wait()
        for _ in range(8):
            client.give_room(10_000)
            before = client.num_bytes
            await asyncio.sleep(UNREAD_S / 3)
            assert client.num_bytes > before
        assert not endless.ended.is_set()
    assert endless.num_written > 2 * WINDOW // 1000


async def test_what_waits_for_the_next_token_is_not_slow_reading() -> None:
    """A handler may take its time; only what it has written has to be read."""

    class Thoughtful(inference_pb2_grpc.InferenceServicer):
        async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
            for index in range(2):
                await asyncio.sleep(1.5 * UNREAD_S)
                yield inference_pb2.GenerateResponse(output_index=index)

    server = GrpcServer("127.0.0.1", 0, limits=ServerLimits(unread_s=UNREAD_S))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Thoughtful())  # type: ignore[abstract]
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
            assert [message.output_index async for message in call] == [0, 1]
    finally:
        await server.stop()


@pytest.mark.parametrize("num_bytes, is_served", [(7_000, True), (20_000, False)])
async def test_headers_have_a_limit(num_bytes: int, is_served: bool) -> None:
    limits = ServerLimits(max_metadata_bytes=8 * 1024)
    async with serving(limits) as (_, server), open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GetModelRequest(model="fine")
        if is_served:
            answer = await stub.GetModel(request, timeout=10, metadata=[("x-header", "x" * num_bytes)])
            assert answer.name == "fine"
        else:
            with pytest.raises(ServiceError) as caught, service_errors():
                await stub.GetModel(request, timeout=10, metadata=[("x-header", "x" * num_bytes)])
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.GetModel(request, timeout=10)).name == "fine"


async def test_streams_of_a_connection_have_a_limit_and_further_ones_wait() -> None:
    async with serving(ServerLimits(max_streams=2)) as (_, server), open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        first, second = (stub.Generate(inference_pb2.GenerateRequest()) for _ in range(2))
        await asyncio.gather(first.read(), second.read())
        third = stub.Generate(inference_pb2.GenerateRequest())
        reading = asyncio.ensure_future(third.read())
        await asyncio.wait([reading], timeout=0.2)
        assert not reading.done() and server.num_requests == 2
        first.cancel()
        message = await asyncio.wait_for(reading, 10)
        assert isinstance(message, inference_pb2.GenerateResponse)
        for call in (second, third):
            call.cancel()


async def test_calls_have_a_limit_and_further_ones_are_refused() -> None:
    async with serving(ServerLimits(max_calls=1)) as (_, server), open_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        first = stub.Generate(inference_pb2.GenerateRequest())
        await first.read()
        with pytest.raises(ResourceExhausted), service_errors():
            await stub.GetModel(inference_pb2.GetModelRequest(model="fine"), timeout=10)
        first.cancel()


async def test_an_idle_connection_is_closed_and_its_client_comes_again() -> None:
    limits = ServerLimits(idle_s=0.2)
    async with serving(limits) as (_, server), open_channel(server.address) as channel, asyncio.timeout(20):
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GetModelRequest(model="fine")
        assert (await stub.GetModel(request)).name == "fine"
        while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
            await channel.wait_for_state_change(state)
        assert (await stub.GetModel(request)).name == "fine"


async def test_a_connection_that_says_nothing_is_closed() -> None:
    """It never gets as far as HTTP/2, so that no keepalive watches it."""
    async with serving(ServerLimits(handshake_s=0.3)) as (_, server):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(20):
                while await reader.read(4096):  # its settings
                    pass
        finally:
            writer.close()
