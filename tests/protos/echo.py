"""A server of ours with handlers that do what a test asks for by the `model` field of the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import open_channel
from protos.errors import NotFound
from protos.serve import GrpcServer


class Echo(inference_pb2_grpc.InferenceServicer):
    """`closed` counts streams whose `finally` has run."""

    def __init__(self) -> None:
        self.closed = 0
        self.sizes: list[int] = []

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            for index in range(1000):
                yield inference_pb2.GenerateResponse(output_index=index, token_ids=[index])
                await asyncio.sleep(0.01)
        finally:
            self.closed += 1

    async def Route(self, request: inference_pb2.RouteRequest, context: Any) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(output_index=0, token_ids=[1])
        raise NotFound("the rest is gone", field="messages", retry_after_s=0.5)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        self.sizes.append(len(request.text))
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.Model:
        if request.model == "defect":
            raise KeyError("a secret of the inside")
        if request.model == "slow":
            await asyncio.sleep(0.05)
        return inference_pb2.Model(name=request.model)


@asynccontextmanager
async def running_echo() -> AsyncIterator[tuple[Echo, GrpcServer, grpc.aio.Channel]]:
    echo, server = Echo(), GrpcServer("127.0.0.1", 0)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, echo)
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield echo, server, channel
    finally:
        await server.stop()
