"""The transfer thread: order, bounds, and that nothing kills it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.agent import Region, WriteState
from kvtransfer.errors import TransferFailed
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.transfer_thread import TransferOptions, TransferThread, WriteStream
from tests.kvtransfer.cache import Cache

STALL_S = 0.4
OPTIONS = TransferOptions(STALL_S, max_queued_writes=2, max_batch_bytes=64, max_moving_bytes=100)


class Turns:
    """Stands for a write on a slow link, which carries one after the other."""

    num_bytes = 10

    def __init__(self) -> None:
        self.state = WriteState.MOVING

    def poll(self) -> WriteState:
        return self.state


class Rig:
    """A thread over an agent that is connected to one peer, and a stream to it."""

    def __init__(self, options: TransferOptions, **agent_options: Any) -> None:
        network, here, there = LoopbackNetwork(), Cache(), Cache(fill=0)
        self.there = there
        self.agent = LoopbackAgent(network, "a", here.address, here.num_bytes, **agent_options)
        self.peer = LoopbackAgent(network, "b", there.address, there.num_bytes)
        self.agent.connect("b", self.peer.metadata(), -1)
        self.region = Region(here.address, there.address, 64)
        self.errors: list[Exception] = []
        self.stream = self.new_stream()
        self.thread = TransferThread(self.agent, options=options)

    def new_stream(self, beside: Callable[[Sequence[Region]], None] | None = None) -> WriteStream[Region]:
        return WriteStream("b", self.errors.append, lambda regions: regions, beside)

    def post(self, stream: WriteStream[Region], region: Region | None = None) -> None:
        self.thread.post(stream, [(region or self.region, 64)])


@asynccontextmanager
async def rig(most_s: float = 60.0, max_batch_bytes: int = 64, **agent_options: Any) -> AsyncIterator[Rig]:
    rig = Rig(replace(OPTIONS, most_s=most_s, max_batch_bytes=max_batch_bytes), **agent_options)
    yield rig
    await rig.thread.close()


async def test_drain_waits_for_all_that_was_queued_before() -> None:
    async with rig() as it:
        for _ in range(10):
            await asyncio.to_thread(it.post, it.stream)
        await it.thread.drain(it.stream)
        assert it.stream.sent_bytes == 640
        assert it.errors == []
        transferred = it.thread.meter.transferred
        assert transferred.num_bytes == pytest.approx(640, rel=0.5)  # some of it may be a while ago
        assert transferred.seconds > 0
        assert it.thread.meter.moving_bytes("b") == 0


async def test_full_queue_holds_the_caller_up_and_then_refuses() -> None:
    async with rig() as it:
        go_on = threading.Event()
        blocked = it.thread.run(go_on.wait)
        it.post(it.stream)
        it.post(it.stream)
        with pytest.raises(TransferFailed, match="2 writes are queued"):
            await asyncio.to_thread(it.post, it.stream)
        go_on.set()
        await blocked
        await it.thread.drain(it.stream)
        assert it.stream.sent_bytes == 128
        it.post(it.stream)  # there is room again


async def test_stopped_stream_posts_nothing_more() -> None:
    async with rig() as it:
        go_on = threading.Event()
        it.thread.run(go_on.wait)
        it.post(it.stream)
        it.stream.stopped = True
        go_on.set()
        await it.thread.drain(it.stream)
        assert it.agent.num_writes == 0
        assert it.errors == []


async def test_wrong_write_ends_its_own_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as it:
        it.post(it.stream, Region(0, 0, 64))
        it.post(it.stream)
        await it.thread.drain(it.stream)
        await asyncio.sleep(0)
        assert [type(error) for error in it.errors] == [ValueError]
        assert it.stream.stopped
        assert "could not be posted" in caplog.text
        other = it.new_stream()
        it.post(other)
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
            await asyncio.to_thread(it.post, it.stream)
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


@pytest.mark.parametrize(("most_s", "num_ended_well"), [(60.0, 5), (0.7, 3)])
async def test_write_that_waits_its_turn_has_not_stalled(most_s: float, num_ended_well: int) -> None:
    """Five writes, of which one ends each 200 ms, where one alone may take 400. In all there is a bound, too."""
    async with rig(most_s) as it:
        writes = [Turns() for _ in range(5)]
        posted = iter(writes)
        it.agent.write = lambda *_: next(posted)  # type: ignore[method-assign, assignment]
        streams = [it.new_stream() for _ in writes]
        for stream in streams:
            await asyncio.to_thread(it.post, stream)
        for write, stream in zip(writes, streams, strict=True):
            await asyncio.sleep(0.5 * STALL_S)
            if stream.stopped:
                break
            write.state = WriteState.DONE
            await it.thread.drain(stream)
        assert sum(stream.sent_bytes for stream in streams) == 10 * num_ended_well
        assert [str(error) for error in it.errors] == ["a write to b stalled for 0.4 s"] * (5 - num_ended_well)
        for write in writes:
            write.state = WriteState.FAILED


async def test_last_write_that_moves_stalls_after_the_others_have_ended() -> None:
    async with rig() as it:
        writes = [Turns(), Turns()]
        posted = iter(writes)
        it.agent.write = lambda *_: next(posted)  # type: ignore[method-assign, assignment]
        for _ in writes:
            await asyncio.to_thread(it.post, it.stream)
        await asyncio.sleep(0.5 * STALL_S)
        writes[0].state = WriteState.DONE
        await asyncio.sleep(0.75 * STALL_S)
        assert it.errors == []
        await asyncio.sleep(0.5 * STALL_S)
        assert [str(error) for error in it.errors] == ["a write to b stalled for 0.4 s"]
        writes[1].state = WriteState.FAILED


async def test_parts_that_wait_are_posted_as_one_write() -> None:
    async with rig(max_batch_bytes=128) as it:
        go_on = threading.Event()
        it.thread.run(go_on.wait)
        it.post(it.stream)
        it.post(it.stream)
        go_on.set()
        await it.thread.drain(it.stream)
        assert it.agent.num_writes == 1
        assert it.stream.sent_bytes == 128


async def test_write_has_not_ended_before_what_goes_beside_it() -> None:
    async with rig() as it:
        seen, go_on = list[Region](), threading.Event()

        def beside(regions: Sequence[Region]) -> None:
            go_on.wait(5)
            seen.extend(regions)

        stream = it.new_stream(beside)
        it.post(stream)
        draining = it.thread.drain(stream)
        await asyncio.sleep(0.02)
        assert it.agent.num_writes == 1  # it did not wait with the write itself
        assert not draining.done()
        go_on.set()
        await draining
        assert seen == [it.region]
        assert stream.sent_bytes == 64


async def test_what_fails_beside_a_write_fails_its_own_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as it:
        stream, other = it.new_stream(lambda _: [][0]), it.new_stream(lambda _: None)
        it.post(stream)
        it.post(other)
        await it.thread.drain(stream)
        await it.thread.drain(other)
        await asyncio.sleep(0)
        assert [str(error) for error in it.errors] == [
            "what goes beside a write to b failed: IndexError('list index out of range')"
        ]
        assert stream.stopped
        assert not other.stopped
        assert "goes beside a write" in caplog.text


async def test_agent_makes_progress_and_more_often_while_others_write_to_us(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes of it: a transport's own error does not end the thread."""
    options = replace(OPTIONS, progress_s=0.001, idle_progress_s=0.05)
    rig, called = Rig(options), list[float]()

    def progress() -> None:
        called.append(0.0)
        raise RuntimeError("the link is down")

    rig.agent.progress = progress  # type: ignore[method-assign]
    await asyncio.sleep(0.3)
    idle = len(called)
    assert 2 <= idle <= 8
    rig.thread.is_written_to = lambda: True
    await asyncio.sleep(0.3)
    assert len(called) - idle > 3 * idle
    await rig.thread.close()
    assert "could not make progress" in caplog.text


async def test_stream_has_not_drained_while_something_goes_beside_a_write_that_could_not_be_posted() -> None:
    async with rig() as it:
        go_on, order = threading.Event(), list[str]()

        def beside(_: Sequence[Region]) -> None:
            go_on.wait(5)
            order.append("beside")

        stream = it.new_stream(beside)
        stream.ended = lambda _: order.append("ended")
        it.post(stream, Region(0, 0, 64))
        draining = it.thread.drain(stream)
        await asyncio.sleep(0.02)
        assert not draining.done()
        go_on.set()
        await draining
        assert order == ["beside", "ended"]


async def test_thread_lives_though_nobody_knows_who_writes_to_us(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as it:
        it.thread.is_written_to = lambda: bool([][0])
        await asyncio.sleep(0.05)
        it.post(it.stream)
        await it.thread.drain(it.stream)
        assert it.stream.sent_bytes == 64
        assert "whether others write to us is not known" in caplog.text
