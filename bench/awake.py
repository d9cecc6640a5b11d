"""Keeps the process on the other side of a measurement from falling asleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.messages import layout_to_message
from model.kv_layout import KVLayout
from protos import decode_pb2, decode_pb2_grpc
from protos.channel import open_channel

PAUSE_S = 0.02


@asynccontextmanager
async def kept_awake(address: str, layout: KVLayout) -> AsyncIterator[None]:
    """Asks the decode side something every few milliseconds. A decode worker is always busy; one that has nothing to do
    falls asleep, pages and all, and takes tens of milliseconds to answer on a virtual machine."""

    async def ask() -> None:
        request = decode_pb2.DescribeRequest(layout=layout_to_message(layout))
        async with open_channel(address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            while True:
                await stub.Describe(request, timeout=10)
                await asyncio.sleep(PAUSE_S)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])
