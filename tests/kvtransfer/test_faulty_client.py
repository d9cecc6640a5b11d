"""Messages of a hand-over that go wrong by plan: each ends as it should on both sides, and no block stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.errors import LayoutMismatch, RecordMismatch, StalePeer, TransferFailed
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import FaultPlan, Stage
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.faulty_client import FaultyClient
from kvtransfer.geometry import CacheSpan
from kvtransfer.loopback_agent import LoopbackNetwork
from kvtransfer.sender import Sender
from kvtransfer.ticket import SenderIdentity
from model.block_pool import BlockPool
from protos.channel import open_channel
from protos.errors import DeadlineExceeded, ServiceError
from tests.kvtransfer.cache import LAYOUT, NUM_BLOCKS, Cache, hashes_of
from tests.kvtransfer.workers import FAST_LEASE, FAST_PEER, DecodeSide, loopback

TIMEOUT_S = 0.3


class FaultySide:
    """A prefill worker without a model, whose messages meet the faults of a plan."""

    def __init__(self, network: LoopbackNetwork, decode: DecodeSide, plan: str) -> None:
        cache = Cache()
        self.killed: list[str] = []  # at which stages it would have been
        self.injector = FaultInjector(FaultPlan.parse(plan), kill=lambda stage: self.killed.append(stage.value))
        self.pool = BlockPool(NUM_BLOCKS)
        self._decode = decode
        self._cache = cache  # whose memory the agent reads
        span = CacheSpan(LAYOUT, cache.address, NUM_BLOCKS)
        self.sender = Sender(
            FaultyAgent(loopback(network, "prefill", cache), span, self.injector),
            self.pool,
            span,
            SenderIdentity("prefill-0", "s1"),
            peer_options=replace(FAST_PEER, call_timeout_s=TIMEOUT_S),
            open_client=lambda address: FaultyClient(open_channel(address), self.injector),
        )

    async def hand_over(self, attempt_id: str) -> None:
        outgoing = await self.sender.reserve(
            self._decode.target,
            attempt_id=attempt_id,
            request_id="r",
            num_tokens=10,
            block_hashes=hashes_of(10),
            timeout_s=TIMEOUT_S,
        )
        blocks = self.pool.allocate(3)
        try:
            outgoing.hold(blocks)
            outgoing.write_all_layers(0, blocks)
            await outgoing.commit(1, 10)
        finally:
            self.pool.release(blocks)


@asynccontextmanager
async def pair(plan: str, side: type[DecodeSide] = DecodeSide) -> AsyncIterator[tuple[FaultySide, DecodeSide]]:
    network, cache = LoopbackNetwork(), Cache(fill=0)
    decode = side(loopback(network, "decode", cache), cache, options=FAST_LEASE)
    await decode.start()
    prefill = FaultySide(network, decode, plan)
    try:
        yield prefill, decode
        async with asyncio.timeout(5):
            while prefill.pool.num_used or decode.pool.num_used:
                await asyncio.sleep(0.01)
    finally:
        await prefill.sender.close()
        await decode.stop()


async def result_of(prefill: FaultySide, decode: DecodeSide, attempt_id: str) -> ServiceError | None:
    try:
        await prefill.hand_over(attempt_id)
    except ServiceError as error:
        return error
    finally:
        received = decode.committed.get(attempt_id)
        if received is not None:
            decode.pool.release(received.block_ids)
    return None


@pytest.mark.parametrize(
    ("plan", "error", "is_taken"),
    [
        ("none", None, True),
        ("drop describe 1", DeadlineExceeded, False),
        ("corrupt describe 1", LayoutMismatch, False),
        ("corrupt describe answer 1", StalePeer, False),
        ("duplicate describe 1; duplicate reserve 1; duplicate heartbeat *; duplicate heartbeat answer *", None, True),
        ("drop heartbeat 1-30", TransferFailed, False),
        ("drop heartbeat answer 1-30", TransferFailed, False),
        ("corrupt heartbeat 1; corrupt heartbeat answer 1", None, True),
        ("drop reserve 1", DeadlineExceeded, False),
        ("drop reserve answer 1", DeadlineExceeded, False),
        ("delay reserve 1 0.4s", DeadlineExceeded, False),  # the ticket is granted to nobody
        ("corrupt reserve 1", LayoutMismatch, False),
        ("corrupt reserve answer 1", TransferFailed, False),
        ("drop commit 1", DeadlineExceeded, False),
        ("drop commit answer 1", DeadlineExceeded, True),
        ("delay commit 1 0.4s", DeadlineExceeded, False),  # released by the time it arrives
        ("delay commit answer 1 0.1s", None, True),
        ("corrupt commit 1", RecordMismatch, False),
        ("corrupt commit 1; drop release 1-2", RecordMismatch, False),
        ("corrupt commit 1; drop release answer 1; corrupt release 2", RecordMismatch, False),
    ],
)
async def test_a_message_that_goes_wrong(plan: str, error: type[ServiceError] | None, is_taken: bool) -> None:
    """The hand-over after it goes well, by which the sender has connected anew if it has lost the peer."""
    async with pair(plan) as (prefill, decode):
        assert type(await result_of(prefill, decode, "first")) is (error or type(None))
        assert ("first" in decode.committed) is is_taken
        prefill.injector.plan = FaultPlan()
        assert await result_of(prefill, decode, "second") is None
    assert not prefill.killed


class CountingSide(DecodeSide):
    num_commits = 0

    async def Commit(self, request: Any, context: Any) -> Any:
        self.num_commits += 1
        return await super().Commit(request, context)


async def test_what_is_doubled_is_sent_twice_and_taken_once() -> None:
    async with pair("duplicate commit 1", CountingSide) as (prefill, decode):
        assert isinstance(decode, CountingSide)
        assert await result_of(prefill, decode, "first") is None
        async with asyncio.timeout(5):
            while decode.num_commits < 2:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        ("none", ["reserving", "reserved", "first-write", "committing", "committed"]),
        ("corrupt commit 1", ["reserving", "reserved", "first-write", "committing", "releasing"]),
        ("fail write 1", ["reserving", "reserved", "first-write"]),
    ],
)
async def test_stages_of_the_sender_in_their_order(plan: str, stages: list[str]) -> None:
    rules = [f"kill at {stage.value} *" for stage in Stage]
    async with pair("; ".join([plan, *rules])) as (prefill, decode):
        await result_of(prefill, decode, "first")
        async with asyncio.timeout(5):
            while len(prefill.killed) < len(stages):
                await asyncio.sleep(0.005)
    assert prefill.killed == stages
