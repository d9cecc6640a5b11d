"""What is written wrong is found before anything is decoded from it; and who may speak for a ticket."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer import metrics
from kvtransfer.block_checks import BlockChecks
from kvtransfer.errors import (
    AttemptEnded,
    CorruptBlocks,
    DuplicateAttempt,
    LeaseExpired,
    RecordMismatch,
    SenderGone,
    TicketEnded,
)
from kvtransfer.integrity import Verification, is_seal, seal
from kvtransfer.loopback_agent import LoopbackNetwork
from kvtransfer.receiver import Receiver
from kvtransfer.ticket import AS_IS, HandoverRecord, HandoverTarget, Ticket
from model.block_pool import hash_blocks
from model.block_sums import BlockSums
from protos.errors import ServiceError
from tests.kvtransfer.cache import LAYOUT
from tests.kvtransfer.committing import commit
from tests.kvtransfer.test_receiver import BLOCK, OPTIONS, SENDER, Desk, record, reservation
from tests.timed_calls import answer_to, decode_request, failure_of, prefill_request, prompt_of, tokens_of
from tests.timed_worker import FAST_PEER, TimedWorker, eventually, running
from tests.timed_worker import LAYOUT as TIMED_LAYOUT

PROMPT = prompt_of(22)  # six blocks of four
SENT = (11, 12, 21, 22)  # the checksums of two blocks


class HeldSums:
    """Checksums of a cache that are there when the test says so."""

    layers, block_bytes = range(LAYOUT.num_layers), LAYOUT.block_bytes

    def __init__(self) -> None:
        self.found: tuple[int, ...] | Exception = SENT
        self.may_end = threading.Event()
        self.may_add = threading.Event()
        self.may_add.set()
        self.asked: list[Sequence[int]] = []
        self.slots: list[int] = []

    def start(self, num_blocks: int) -> HeldSums:
        return self

    def add(self, layers: range, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        assert layers == self.layers and len(block_ids) == len(slots)
        self.slots.extend(slots)
        self.asked.append(block_ids)
        assert self.may_add.wait(10), "the test never let anything be added up"

    def values(self) -> tuple[int, ...]:
        assert self.may_end.wait(10), "the test never let the check end"
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class CheckingDesk(Desk):
    def __init__(self) -> None:
        super().__init__()
        self.sums = HeldSums()
        self.receiver = Receiver(
            self.pool,
            LAYOUT,
            "d1",
            options=OPTIONS,
            failed=lambda attempt_id, error: self.failures.append((attempt_id, type(error))),
            clock=self.clock,
            verification=Verification(self.sums, 1.0),  # type: ignore[arg-type]
        )
        self.receiver.sender_attached(SENDER.epoch)

    async def checking(self) -> tuple[Ticket, asyncio.Task[Any]]:
        """A ticket whose record is being checked."""
        ticket = self.reserve()
        receiving = asyncio.create_task(self.receiver.receive(record_of(ticket)))
        await eventually(lambda: bool(self.sums.asked))
        return ticket, receiving


def record_of(ticket: Ticket) -> HandoverRecord:
    return replace(record(ticket), checksums=SENT)


@pytest.fixture
async def desk() -> AsyncIterator[CheckingDesk]:
    desk = CheckingDesk()
    yield desk
    desk.sums.may_end.set()


async def test_sequence_is_handed_over_once_it_is_found_intact(desk: CheckingDesk) -> None:
    ticket, receiving = await desk.checking()
    assert ticket.checked == (0, 1) and desk.sums.asked == [list(ticket.block_ids)] and desk.sums.slots == [0, 1]
    assert desk.reserve("b").num_cached_tokens == 0  # not published yet
    desk.advance(100)  # the lease of what is being checked does not lapse
    assert desk.failures == [("b", LeaseExpired)]
    desk.sums.may_end.set()
    received = await receiving
    assert received.block_ids == ticket.block_ids
    assert desk.reserve("c").num_cached_tokens == 2 * BLOCK


async def test_what_is_written_is_added_up_before_the_record_comes(desk: CheckingDesk) -> None:
    ticket = desk.reserve()
    desk.sums.may_end.set()
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 0, "another": 1})
    desk.receiver.written("s2", {ticket.ticket_id: 2})  # it is not theirs
    await asyncio.sleep(0)
    assert desk.sums.asked == []
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 1})
    await eventually(lambda: desk.sums.asked == [[ticket.block_ids[0]]])
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 1})  # it has heard so
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: -5})
    await desk.receiver.receive(record_of(ticket))
    assert desk.sums.asked == [[block_id] for block_id in ticket.block_ids]
    assert desk.sums.slots == [0, 1]


async def test_record_waits_for_what_is_being_added_up_and_nothing_is_added_twice(desk: CheckingDesk) -> None:
    ticket = desk.reserve()
    desk.sums.may_end.set()
    desk.sums.may_add.clear()
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 1})
    await eventually(lambda: bool(desk.sums.asked))
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 999})
    receiving = asyncio.create_task(desk.receiver.receive(record_of(ticket)))
    await asyncio.sleep(0.02)
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 2})
    assert len(desk.sums.asked) == 1 and not receiving.done()
    desk.sums.may_add.set()
    await receiving
    assert desk.sums.asked == [[block_id] for block_id in ticket.block_ids]
    assert desk.sums.slots == [0, 1]


async def test_nothing_is_added_twice_for_a_heartbeat_that_comes_behind_the_record(desk: CheckingDesk) -> None:
    ticket, receiving = await desk.checking()
    desk.receiver.written(SENDER.epoch, {ticket.ticket_id: 2})
    await asyncio.sleep(0.02)
    desk.sums.may_end.set()
    await receiving
    assert desk.sums.asked == [list(ticket.block_ids)]


async def test_ticket_that_ends_is_not_checked_any_further(desk: CheckingDesk) -> None:
    tickets = [desk.reserve(name, first=first) for name, first in (("a", 0), ("b", 500), ("c", 900))]
    desk.sums.may_add.clear()
    desk.receiver.written(SENDER.epoch, {tickets[0].ticket_id: 1})
    await eventually(lambda: bool(desk.sums.asked))
    desk.receiver.written(SENDER.epoch, {tickets[0].ticket_id: 2})
    desk.receiver.abort("a", "the client left")
    desk.receiver.release(tickets[1].ticket_id, SENDER.epoch, mac=tickets[1].mac)
    desk.receiver.sender_gone(SENDER.epoch)
    assert len(desk.receiver._contents._checks) == 0
    desk.sums.may_add.set()
    await asyncio.sleep(0.02)
    assert len(desk.sums.asked) == 1


@pytest.mark.parametrize(("late_block", "is_taken"), [(1, True), (2, False)])
async def test_block_that_is_said_to_be_written_too_early_is_not_taken(late_block: int, is_taken: bool) -> None:
    """Of a ticket of blocks 2 and 1, the first is said to be written while one of them is not yet."""
    memory = torch.zeros(LAYOUT.num_layers, 4, LAYOUT.layer_block_bytes // 4, dtype=torch.int32).random_()
    sums, ticket = BlockSums(memory), Ticket("t", "d1", 0, (2, 1), (0, 0), 1.0, checked=(0, 1))
    sent = sums.start(2)
    sent.add(sums.layers, ticket.block_ids, (0, 1))
    checks, counted = BlockChecks({AS_IS: Verification(sums, 1.0)}), metrics.CHECKED_BYTES._value.get()
    checks.start(ticket)
    memory[1, late_block, 5] += 1
    checks.written("t", 1)
    await eventually(lambda: metrics.CHECKED_BYTES._value.get() == counted + LAYOUT.block_bytes)
    memory[1, late_block, 5] -= 1
    if is_taken:
        assert await checks.finish("t", sent.values())
        for too_few in (sent.values()[:2], ()):
            with pytest.raises(CorruptBlocks, match=f"{len(too_few)} checksums came for 2 blocks"):
                await checks.finish("t", too_few)
    else:
        with pytest.raises(CorruptBlocks, match="block 2 does not hold what was sent"):
            await checks.finish("t", sent.values())


@pytest.mark.parametrize("found", [(11, 12, 21, 23), (10, 12, 21, 22), RuntimeError("no memory")])
async def test_what_differs_or_cannot_be_told_is_quarantined(
    desk: CheckingDesk, found: tuple[int, ...] | Exception
) -> None:
    rejected = metrics.REJECTED.labels("content")._value.get()
    desk.sums.found = found
    ticket, receiving = await desk.checking()
    desk.sums.may_end.set()
    with pytest.raises((CorruptBlocks, RuntimeError)):
        await receiving
    assert desk.failures == [("a", CorruptBlocks)]
    assert metrics.REJECTED.labels("content")._value.get() == rejected + 1
    assert desk.receiver.num_quarantined_blocks == 2
    with pytest.raises(CorruptBlocks):
        await desk.receiver.receive(record_of(ticket))
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    assert desk.pool.num_used == 0
    assert desk.reserve("b").num_cached_tokens == 0  # it was not published


async def test_second_record_is_refused_while_the_first_is_checked(desk: CheckingDesk) -> None:
    ticket, receiving = await desk.checking()
    with pytest.raises(DuplicateAttempt):
        await desk.receiver.receive(record_of(ticket))
    desk.sums.may_end.set()
    assert (await receiving).block_ids == ticket.block_ids


@pytest.mark.parametrize(
    ("what", "error", "num_quarantined"),
    [("abort", AttemptEnded, 2), ("release", TicketEnded, 0), ("gone", SenderGone, 2)],
)
async def test_ticket_that_ends_while_it_is_checked_is_not_handed_over(
    desk: CheckingDesk, what: str, error: type[ServiceError], num_quarantined: int
) -> None:
    ticket, receiving = await desk.checking()
    if what == "abort":
        desk.receiver.abort("a", "the client left")
    elif what == "release":
        desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    else:
        desk.receiver.sender_gone(SENDER.epoch)
    desk.sums.may_end.set()
    with pytest.raises(error):
        await receiving
    assert desk.failures == ([] if what == "abort" else [("a", error)])
    assert desk.receiver.num_quarantined_blocks == desk.pool.num_used == num_quarantined


async def test_call_that_is_cancelled_while_it_is_checked_leaves_no_block_behind(desk: CheckingDesk) -> None:
    ticket, receiving = await desk.checking()
    receiving.cancel()
    await asyncio.wait([receiving])
    assert desk.failures == [("a", CorruptBlocks)]
    desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=ticket.mac)
    assert desk.pool.num_used == 0


def test_sample_is_what_chance_chooses_and_never_nothing() -> None:
    rng = random.Random(1)
    verification = Verification(HeldSums(), 1 / 16, rng.random)  # type: ignore[arg-type]
    chosen = [verification.choose(64) for _ in range(2000)]
    assert all(one and list(one) == sorted(set(one)) and one[-1] < 64 for one in chosen)
    assert sum(map(len, chosen)) / 2000 == pytest.approx(4.0 + 0.016, abs=0.2)  # and one where there would be none
    counts = [sum(index in one for one in chosen) for index in range(64)]
    assert min(counts) > 70 and max(counts) < 190  # 125 on average
    assert all(len(verification.choose(1)) == 1 for _ in range(50))
    assert verification.choose(0) == ()
    assert Verification(HeldSums(), 1.0).choose(3) == (0, 1, 2)  # type: ignore[arg-type]


def test_seal_is_of_everything_that_makes_a_ticket() -> None:
    ticket = (b"key", "t", "s1", "a", (1, 2), (3, 4), AS_IS)
    others = [
        (b"kez", "t", "s1", "a", (1, 2), (3, 4), AS_IS),
        (b"key", "u", "s1", "a", (1, 2), (3, 4), AS_IS),
        (b"key", "t", "s2", "a", (1, 2), (3, 4), AS_IS),
        (b"key", "t", "s1", "b", (1, 2), (3, 4), AS_IS),
        (b"key", "t", "s1", "a", (2, 1), (3, 4), AS_IS),
        (b"key", "t", "s1", "a", (1,), (2, 3, 4), AS_IS),
        (b"key", "t", "s1", "a", (1, 2), (3, 5), AS_IS),
        (b"key", "t", "s1", "a", (1, 2), (3, 4), "int8"),
    ]
    assert len(seal(*ticket)) == 32 and is_seal(seal(*ticket), seal(*ticket))
    assert not any(is_seal(seal(*ticket), seal(*other)) for other in others)


def test_who_knows_only_a_tickets_id_can_neither_commit_nor_free_it() -> None:
    desk = Desk()
    ticket, other = desk.reserve(), desk.reserve("b", first=500)
    assert ticket.mac.hex() not in repr(ticket) and repr(ticket.mac) not in repr(ticket)
    for mac in (b"", other.mac, ticket.mac[:-1], bytes(32)):
        with pytest.raises(RecordMismatch) as refused:
            commit(desk.receiver, replace(record(ticket), mac=mac))
        assert refused.value.field == "mac" and ticket.mac.hex() not in str(refused.value)
        desk.receiver.release(ticket.ticket_id, SENDER.epoch, mac=mac)
    assert desk.receiver.num_reserved_blocks == 4
    commit(desk.receiver, record(ticket))


def test_another_process_start_seals_otherwise() -> None:
    one, other = Desk(), Desk()
    assert one.receiver.reserve(reservation("a", 4)).mac != other.receiver.reserve(reservation("a", 4)).mac


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[TimedWorker, TimedWorker]]:
    network = LoopbackNetwork()
    prefill = TimedWorker(network, "prefill-0", max_step_tokens=8, **options)
    decode = TimedWorker(network, "decode-0", **options)
    async with running(prefill, decode):
        yield prefill, decode


@pytest.mark.parametrize("number", [0, 4, 8])
async def test_bit_that_lands_wrong_fails_the_attempt_and_the_next_one_goes_well(number: int) -> None:
    """The first write, one in the middle, the last one of three chunks of three layers each."""
    async with pair(corrupting_writes=[number]) as (prefill, decode):
        for attempt_id in ("a", "b"):
            decoding = decode.decode_stub.Decode(decode_request(attempt_id, PROMPT, max_tokens=5))
            prefilling = prefill.prefill_stub.Prefill(prefill_request(attempt_id, PROMPT, decode.target))
            if attempt_id == "a":
                for call in (prefilling, decoding):
                    error = await failure_of(call)
                    assert isinstance(error, CorruptBlocks) and error.retryable
                await eventually(lambda: decode.pool.num_used == 0)
                assert decode.pool.num_cached == 0  # nothing of it was published
            else:
                assert await tokens_of(decoding) == answer_to(PROMPT, 5)[1:]
        await eventually(lambda: prefill.pool.num_used == decode.pool.num_used == 0)


async def test_nothing_is_checked_where_that_is_off() -> None:
    before = metrics.CHECKED_BYTES._value.get()
    async with pair(corrupting_writes=[4], verified_share=0.0) as (prefill, decode):
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT, max_tokens=5))
        prefilling = prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target))
        assert len(await tokens_of(decoding)) == 4
        assert metrics.CHECKED_BYTES._value.get() == before
        await prefilling.read()


async def test_only_the_blocks_that_the_ticket_names_are_checked() -> None:
    async with pair(verified_share=0.3) as (prefill, decode):
        before = metrics.CHECKED_BYTES._value.get()
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT, max_tokens=5))
        prefilling = prefill.prefill_stub.Prefill(prefill_request("a", PROMPT, decode.target))
        assert await tokens_of(decoding) == answer_to(PROMPT, 5)[1:]
        await prefilling.read()
        num_checked, rest = divmod(metrics.CHECKED_BYTES._value.get() - before, TIMED_LAYOUT.block_bytes)
        assert 1 <= num_checked <= 6 and rest == 0


async def test_blocks_are_checked_while_others_are_still_computed() -> None:
    async with pair() as (prefill, decode):
        prefill.sender._peer_options = replace(FAST_PEER, heartbeat_s=30.0, told_bytes=TIMED_LAYOUT.block_bytes)
        outgoing = await prefill.sender.reserve(
            HandoverTarget(decode.target.worker_id, decode.target.address, decode.target.epoch),
            attempt_id="a",
            request_id="a",
            num_tokens=len(PROMPT),
            block_hashes=hash_blocks(PROMPT, TIMED_LAYOUT.block_size),
            timeout_s=5.0,
        )
        blocks, before = prefill.pool.allocate(6), metrics.CHECKED_BYTES._value.get()
        outgoing.hold(blocks)
        outgoing.write_all_layers(0, blocks[:4])
        outgoing.write(0, 4, blocks[4:])  # one layer of three
        await eventually(lambda: metrics.CHECKED_BYTES._value.get() == before + 4 * TIMED_LAYOUT.block_bytes)
        for layer in (1, 2):
            outgoing.write(layer, 4, blocks[4:])
        decoding = decode.decode_stub.Decode(decode_request("a", PROMPT, max_tokens=2))
        await outgoing.commit(7, len(PROMPT))
        assert metrics.CHECKED_BYTES._value.get() == before + 6 * TIMED_LAYOUT.block_bytes
        assert len(await tokens_of(decoding)) == 1
        prefill.pool.release(blocks)
        await eventually(lambda: prefill.pool.num_used == decode.pool.num_used == 0)
