"""Messages of a hand-over that go wrong by plan: each ends as it should on both sides, and no block stays held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.errors import LayoutMismatch, RecordMismatch, StalePeer, TransferFailed
from kvtransfer.fault_injection import FaultInjector
from kvtransfer.faults import Fault, FaultPlan, Stage
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.faulty_client import FaultyClient
from kvtransfer.geometry import CacheSpan
from kvtransfer.loopback_agent import LoopbackNetwork
from kvtransfer.sender import Sender
from kvtransfer.ticket import HandoverRecord, PeerDescription, Reservation, SenderIdentity, Ticket
from model.block_pool import BlockPool
from model.kv_layout import KVLayout
from protos.channel import open_channel
from protos.errors import DeadlineExceeded, ServiceError
from tests.kvtransfer.cache import LAYOUT, NUM_BLOCKS, Cache, hashes_of
from tests.kvtransfer.workers import FAST_LEASE, FAST_PEER, DecodeSide, loopback

LOST_S = 0.6  # after which a call is given up whose message is lost by plan
PATIENT_S = 30.0  # and any other: on a machine under load it may be slow without any fault
PEER = replace(FAST_PEER, silence_s=1.5, call_timeout_s=PATIENT_S)
LEASE = replace(FAST_LEASE, lease_s=2.0)


class PatientClient(FaultyClient):
    """`lost` are the names of calls whose messages are lost, or later than anybody waits."""

    def __init__(self, address: str, injector: FaultInjector, lost: set[str]) -> None:
        super().__init__(open_channel(address), injector)
        self._lost = lost

    async def describe(self, layout: KVLayout, timeout_s: float) -> PeerDescription:
        return await super().describe(layout, self._timeout_s("describe"))

    async def reserve(self, reservation: Reservation, timeout_s: float) -> Ticket:
        return await super().reserve(reservation, self._timeout_s("reserve"))

    async def commit(self, record: HandoverRecord, timeout_s: float) -> None:
        await super().commit(record, self._timeout_s("commit"))

    async def release(self, ticket: Ticket, sender: SenderIdentity, reason: str, timeout_s: float) -> None:
        await super().release(ticket, sender, reason, self._timeout_s("release"))

    def _timeout_s(self, call: str) -> float:
        return LOST_S if call in self._lost else PATIENT_S


class FaultySide:
    """A prefill worker without a model, whose messages meet the faults of a plan."""

    def __init__(self, network: LoopbackNetwork, decode: DecodeSide, plan: str) -> None:
        cache = Cache()
        self.killed: list[str] = []  # at which stages it would have been
        self.injector = FaultInjector(FaultPlan.parse(plan), kill=lambda stage: self.killed.append(stage.value))
        self._lost = {
            rule.target.value.removesuffix(" answer")
            for rule in self.injector.plan.rules
            if rule.fault is Fault.DROP or rule.duration_s > LOST_S
        }
        self.pool = BlockPool(NUM_BLOCKS)
        self._decode = decode
        self._cache = cache  # whose memory the agent reads
        span = CacheSpan(LAYOUT, cache.address, NUM_BLOCKS)
        self.sender = Sender(
            FaultyAgent(loopback(network, "prefill", cache), span, self.injector),
            self.pool,
            span,
            SenderIdentity("prefill-0", "s1"),
            peer_options=PEER,
            open_client=lambda address: PatientClient(address, self.injector, self._lost),
        )

    def end_faults(self) -> None:
        self.injector.plan = FaultPlan()
        self._lost.clear()

    async def hand_over(self, attempt_id: str) -> None:
        outgoing = await self.sender.reserve(
            self._decode.target,
            attempt_id=attempt_id,
            request_id="r",
            num_tokens=10,
            block_hashes=hashes_of(10),
            timeout_s=PATIENT_S,
        )
        blocks = self.pool.allocate(3)
        try:
            outgoing.hold(blocks)
            outgoing.write_all_layers(0, blocks)
            await outgoing.commit(1, 10)
        finally:
            self.pool.release(blocks)


class CountingSide(DecodeSide):
    """Counts the calls that have arrived and ended."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_taken: Counter[str] = Counter()

    async def Reserve(self, request: Any, context: Any) -> Any:
        try:
            return await super().Reserve(request, context)
        finally:
            self.num_taken["reserve"] += 1

    async def Commit(self, request: Any, context: Any) -> Any:
        try:
            return await super().Commit(request, context)
        finally:
            self.num_taken["commit"] += 1


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def pair(plan: str) -> AsyncIterator[tuple[FaultySide, CountingSide]]:
    network, cache = LoopbackNetwork(), Cache(fill=0)
    decode = CountingSide(loopback(network, "decode", cache), cache, options=LEASE)
    await decode.start()
    prefill = FaultySide(network, decode, plan)
    try:
        yield prefill, decode
        await reached(lambda: prefill.pool.num_used == decode.pool.num_used == 0)
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
        ("drop heartbeat *", TransferFailed, False),
        ("drop heartbeat answer *", TransferFailed, False),
        ("corrupt heartbeat 1; corrupt heartbeat answer 1", None, True),
        ("drop reserve 1", DeadlineExceeded, False),
        ("drop reserve answer 1", DeadlineExceeded, False),
        ("delay reserve 1 1.5s", DeadlineExceeded, False),  # the ticket is granted to nobody
        ("corrupt reserve 1", LayoutMismatch, False),
        ("corrupt reserve answer 1", TransferFailed, False),
        ("drop commit 1", DeadlineExceeded, False),
        ("drop commit answer 1", DeadlineExceeded, True),
        ("delay commit 1 1.5s", DeadlineExceeded, False),  # released by the time it arrives
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
        prefill.end_faults()
        assert await result_of(prefill, decode, "second") is None
        late = plan.split()[1] if plan.startswith("delay") and not is_taken else None
        await reached(lambda: late is None or decode.num_taken[late] == 2)  # it arrives nevertheless
        assert ("first" in decode.committed) is is_taken
    assert not prefill.killed


async def test_what_is_doubled_is_sent_twice_and_taken_once() -> None:
    async with pair("duplicate commit 1") as (prefill, decode):
        assert await result_of(prefill, decode, "first") is None
        await reached(lambda: decode.num_taken["commit"] == 2)


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
        await reached(lambda: len(prefill.killed) >= len(stages))
    assert prefill.killed == stages
