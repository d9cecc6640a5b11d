"""The Attach stream ends when it is told to, whatever is arriving at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvtransfer.decode_client import DecodeClient
from kvtransfer.errors import TransferFailed
from kvtransfer.ticket import Heartbeat, SenderIdentity
from protos import decode_pb2
from protos.channel import open_channel


class Call:
    """Stands where gRPC's call stands; answers when a test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[decode_pb2.HeartbeatResponse] = asyncio.get_running_loop().create_future()
        self.is_read = asyncio.Event()
        self.cancelled = False

    def Attach(self, heartbeats: AsyncIterator[object]) -> Call:
        return self

    async def read(self) -> decode_pb2.HeartbeatResponse:
        self.is_read.set()
        answer = await self.answer
        self.answer = asyncio.get_running_loop().create_future()
        return answer

    def cancel(self) -> None:
        self.cancelled = True


async def no_heartbeats() -> AsyncIterator[Heartbeat]:
    return
    yield


async def listen(call: Any, silence_s: float = 60.0) -> None:
    async with open_channel("127.0.0.1:1") as channel:
        client = DecodeClient(channel)
        client._stub = call
        async for _ in client.attach(SenderIdentity("prefill-0", "s1"), no_heartbeats(), silence_s):
            pass


@pytest.mark.parametrize("num_ticks", range(4))
async def test_cancelled_while_an_answer_arrives_it_ends(num_ticks: int) -> None:
    """A peer that is lost is closed this way: else its stream would go on for ever, and its closing wait for it."""
    call = Call()
    listening = asyncio.create_task(listen(call))
    await call.is_read.wait()
    call.answer.set_result(decode_pb2.HeartbeatResponse())
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    listening.cancel()
    done, _ = await asyncio.wait([listening], timeout=2)
    listening.cancel()
    await asyncio.wait([listening])
    assert done
    assert call.cancelled


async def test_silence_ends_it_by_an_error() -> None:
    call = Call()
    with pytest.raises(TransferFailed, match=r"did not answer a heartbeat for 0\.01 s"):
        await listen(call, silence_s=0.01)
    assert call.cancelled
