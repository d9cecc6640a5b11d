"""The transfer thread: order, bounds, and that nothing kills it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtransfer.agent import Region
from kvtransfer.errors import TransferFailed
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.transfer_thread import TransferOptions, TransferThread, WriteStream
from tests.kvtransfer.cache import Cache


class Rig:
    """A thread over an agent that is connected to one peer, and a stream to it."""

    def __init__(self, **agent_options: Any) -> None:
        network, here, there = LoopbackNetwork(), Cache(), Cache(fill=0)
        self.there = there
        self.agent = LoopbackAgent(network, "a", here.address, here.num_bytes, **agent_options)
        self.peer = LoopbackAgent(network, "b", there.address, there.num_bytes)
        self.agent.connect("b", self.peer.metadata(), -1)
        self.regions = [Region(here.address, there.address, 64)]
        self.errors: list[Exception] = []
        self.stream = WriteStream("b", self.errors.append)
        self.thread = TransferThread(
            self.agent, options=TransferOptions(stall_s=0.1, max_queued_writes=2, max_moving_bytes=100)
        )


@asynccontextmanager
async def rig(**agent_options: Any) -> AsyncIterator[Rig]:
    rig = Rig(**agent_options)
    yield rig
    await rig.thread.close()


async def test_drain_waits_for_all_that_was_queued_before() -> None:
    async with rig() as it:
        for _ in range(10):
            await asyncio.to_thread(it.thread.post, it.stream, lambda: it.regions)
        await it.thread.drain(it.stream)
        assert it.stream.sent_bytes == 640
        assert it.errors == []


async def test_full_queue_holds_the_caller_up_and_then_refuses() -> None:
    async with rig() as it:
        go_on = threading.Event()
        blocked = it.thread.run(go_on.wait)
        it.thread.post(it.stream, lambda: it.regions)
        it.thread.post(it.stream, lambda: it.regions)
        with pytest.raises(TransferFailed, match="2 writes are queued"):
            await asyncio.to_thread(it.thread.post, it.stream, lambda: it.regions)
        go_on.set()
        await blocked
        await it.thread.drain(it.stream)
        assert it.stream.sent_bytes == 128
        it.thread.post(it.stream, lambda: it.regions)  # there is room again


async def test_stopped_stream_posts_nothing_more() -> None:
    async with rig() as it:
        go_on = threading.Event()
        it.thread.run(go_on.wait)
        it.thread.post(it.stream, lambda: it.regions)
        it.stream.stopped = True
        go_on.set()
        await it.thread.drain(it.stream)
        assert it.agent.num_writes == 0
        assert it.errors == []


async def test_wrong_write_ends_its_own_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as it:
        it.thread.post(it.stream, lambda: [Region(0, 0, 64)])
        it.thread.post(it.stream, lambda: it.regions)
        await it.thread.drain(it.stream)
        await asyncio.sleep(0)
        assert [type(error) for error in it.errors] == [ValueError]
        assert it.stream.stopped
        assert "could not be posted" in caplog.text
        other = WriteStream("b", it.errors.append)
        it.thread.post(other, lambda: it.regions)
        await it.thread.drain(other)
        assert other.sent_bytes == 64


async def test_what_a_call_raises_comes_to_whoever_awaits_it() -> None:
    async with rig() as it:
        with pytest.raises(ZeroDivisionError):
            await it.thread.run(lambda: 1 // 0)
        assert await it.thread.run(lambda: threading.current_thread().name) == "transfer"


async def test_peer_that_takes_nothing_gets_no_more_than_may_move() -> None:
    """Of writes of 64 bytes, at most 100 of which may be on their way: the second is posted, the third is not."""
    now = 0.0
    async with rig(completion_delay_s=0.05, clock=lambda: now) as it:
        for _ in range(4):
            await asyncio.to_thread(it.thread.post, it.stream, lambda: it.regions)
        draining = it.thread.drain(it.stream)
        await asyncio.sleep(0.03)
        assert it.agent.num_writes == 2
        now = 1.0
        async with asyncio.timeout(5):
            while it.agent.num_writes < 4:
                await asyncio.sleep(0.001)
        assert not draining.done()
        now = 2.0
        await draining
        assert it.stream.sent_bytes == 256
