"""Hand-overs in eight bits: what arrives is what coding it number by number gives, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer import metrics, unpacking
from kvtransfer.agent import Grid, Pieces, WriteState
from kvtransfer.coding import block_bytes, codings
from kvtransfer.errors import AttemptEnded, CorruptBlocks, InvalidReservation, TicketEnded, TransferFailed
from kvtransfer.loopback_agent import LoopbackAgent, LoopbackNetwork
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.outgoing import Outgoing
from kvtransfer.ticket import Reservation
from kvtransfer.unpacking import Unpacking
from model.kv_layout import KVLayout
from protos.errors import Internal
from tests.kvtransfer.cache import Cache, hashes_of
from tests.kvtransfer.progress import making_progress
from tests.kvtransfer.wire import BLOCK, LAYOUT, WirePair, arriving, memory_of, wire_pair
from tests.kvtransfer.workers import DecodeSide, loopback
from tests.timed_worker import eventually

LATENT = replace(LAYOUT, num_kv_heads=1, latent=True, head_dim=24)


def nixl(network: LoopbackNetwork, name: str, cache: Cache, **options: Any) -> NixlAgent:
    return NixlAgent(f"wire-{name}", cache.address, cache.num_bytes)


async def send(pair: WirePair, outgoing: Outgoing, blocks: Sequence[int], *, by_layer: bool = True) -> None:
    """In two chunks, layer by layer; or all at once."""
    outgoing.hold(blocks)
    if not by_layer:
        await asyncio.to_thread(outgoing.write_all_layers, 0, blocks)
        return
    for first, stop in ((0, 2), (2, len(blocks))):
        for layer in range(pair.layout.num_layers):
            await asyncio.to_thread(outgoing.write, layer, first, blocks[first:stop])


@pytest.mark.parametrize("agents", [(loopback, loopback), (nixl, nixl)], ids=["loopback", "nixl"])
@pytest.mark.parametrize("coding", ["int8", "fp8"])
@pytest.mark.parametrize(
    "layout",
    [LAYOUT, replace(LAYOUT, dtype="float32"), replace(LAYOUT, dtype="float16"), LATENT],
    ids=["bfloat16", "float32", "float16", "latent"],
)
async def test_what_arrives_is_what_plain_coding_gives(
    layout: KVLayout, coding: str, agents: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_BLOCKS_AT_ONCE", 4)
    before = {name: metrics.SENT_BYTES.labels(name)._value.get() for name in ("as-is", coding)}
    received_before = metrics.RECEIVED_BYTES.labels(coding)._value.get()
    checked_before = metrics.CHECKED_BYTES._value.get()
    async with wire_pair(coding, layout=layout, agents=agents) as pair:
        pair.decode.pool.allocate(3)  # so that blocks have other ids there
        num_tokens = 9 * BLOCK + 1
        blocks = [30, 2, *range(7, 15)]  # some in a run
        pair.prefill.pool.allocate(32)
        outgoing = await pair.reserve("a", num_tokens)
        await send(pair, outgoing, blocks)
        stats = await outgoing.commit(11, num_tokens)
        received = pair.decode.committed["a"]
        assert torch.equal(pair.there(received.block_ids), arriving(pair.here(blocks), num_tokens, coding))
        untouched = sorted(set(range(32)) - set(received.block_ids))
        assert bool((torch.from_numpy(pair.decode.cache.blocks(untouched)) == 1).all())
        num_bytes = 10 * block_bytes(layout, coding)
        assert (stats.sent_tokens, stats.sent_bytes) == (num_tokens, num_bytes)
        assert pair.all_slots_are_free
    assert num_bytes < 0.7 * 10 * layout.block_bytes
    assert metrics.SENT_BYTES.labels(coding)._value.get() - before[coding] == num_bytes
    assert metrics.SENT_BYTES.labels("as-is")._value.get() == before["as-is"]
    assert metrics.RECEIVED_BYTES.labels(coding)._value.get() - received_before == num_bytes
    assert metrics.CHECKED_BYTES._value.get() - checked_before == num_bytes


def test_bytes_by_hand() -> None:
    """2 heads of a key and a value each: 4 scales and 4 * 4 * 8 codes, in 3 layers; head dimension 8, 4 tokens."""
    assert block_bytes(LAYOUT, "int8") == block_bytes(LAYOUT, "fp8") == 3 * (4 * 4 + 4 * 4 * 8)
    assert block_bytes(LAYOUT, "as-is") == 3 * 4 * 4 * 8 * 2
    assert codings(LAYOUT) == ("int8", "fp8")
    assert codings(replace(LAYOUT, block_size=1, head_dim=4)) == ()  # 32 bytes as it is, and 32 packed


async def test_only_what_decode_lacks_is_sent_and_what_it_has_stays_coded() -> None:
    async with wire_pair() as pair:
        blocks = pair.prefill.pool.allocate(5)
        outgoing = await pair.reserve("a", 3 * BLOCK)
        await send(pair, outgoing, blocks[:3])
        await outgoing.commit(11, 3 * BLOCK)
        there = pair.decode.committed["a"].block_ids
        outgoing = await pair.reserve("b", 4 * BLOCK + 1)
        assert outgoing.num_cached_tokens == 3 * BLOCK
        await send(pair, outgoing, blocks, by_layer=False)
        stats = await outgoing.commit(5, 4 * BLOCK + 1)
        received = pair.decode.committed["b"]
        assert received.block_ids[:3] == there and stats.sent_bytes == 2 * block_bytes(LAYOUT, "int8")
        assert torch.equal(pair.there(there), arriving(pair.here(blocks[:3]), 3 * BLOCK, "int8"))
        assert torch.equal(pair.there(received.block_ids[3:]), arriving(pair.here(blocks[3:]), BLOCK + 1, "int8"))


@pytest.mark.parametrize("number", [0, 4, 5])
async def test_packed_byte_that_lands_wrong_is_found(number: int) -> None:
    async with wire_pair(corrupting_writes=[number]) as pair:
        blocks = pair.prefill.pool.allocate(6)
        outgoing = await pair.reserve("a", 6 * BLOCK)
        await send(pair, outgoing, blocks)
        with pytest.raises(CorruptBlocks):
            await outgoing.commit(11, 6 * BLOCK)
        assert list(pair.decode.failed) == ["a"] and not pair.decode.committed
        pair.prefill.pool.release(blocks)
        await eventually(lambda: pair.prefill.pool.num_used == pair.decode.pool.num_used == 0)
        assert pair.all_slots_are_free
        assert (await pair.reserve("b", 6 * BLOCK)).num_cached_tokens == 0  # it was not published


async def test_nobody_checks_and_it_arrives_all_the_same() -> None:
    async with wire_pair(checks=False) as pair:
        blocks = pair.prefill.pool.allocate(3)
        outgoing = await pair.reserve("a", 3 * BLOCK)
        await send(pair, outgoing, blocks)
        await outgoing.commit(11, 3 * BLOCK)
        received = pair.decode.committed["a"].block_ids
        assert torch.equal(pair.there(received), arriving(pair.here(blocks), 3 * BLOCK, "int8"))


async def test_worker_without_the_coding_gets_kv_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    before = metrics.UNCODED._value.get()
    async with wire_pair(takes_it=False) as pair:
        blocks = pair.prefill.pool.allocate(4)
        with caplog.at_level(logging.WARNING, logger="kvtransfer.sender"):
            for attempt_id, first in (("a", 0), ("b", 1000)):
                outgoing = await pair.reserve(attempt_id, 4 * BLOCK, first)
                await send(pair, outgoing, blocks)
                stats = await outgoing.commit(11, 4 * BLOCK)
                assert stats.sent_bytes == 4 * LAYOUT.block_bytes
                assert torch.equal(pair.there(pair.decode.committed[attempt_id].block_ids), pair.here(blocks))
        assert caplog.messages == ["decode-0 takes no int8: KV goes there as it is"]
    assert metrics.UNCODED._value.get() - before == 2


async def test_sender_that_wants_no_coding_uses_none() -> None:
    async with wire_pair(None) as pair:
        blocks = pair.prefill.pool.allocate(4)
        outgoing = await pair.reserve("a", 4 * BLOCK)
        await send(pair, outgoing, blocks)
        await outgoing.commit(11, 4 * BLOCK)
        assert torch.equal(pair.there(pair.decode.committed["a"].block_ids), pair.here(blocks))


async def test_unknown_coding_is_refused_by_name() -> None:
    async with wire_pair() as pair, wire_pair(takes_it=False) as without:
        for one, coding, allowed in ((pair, "zip", "as-is, int8, fp8"), (without, "int8", "as-is")):
            await one.prefill.sender.connect(one.decode.target)
            sender = one.prefill.sender._identity
            hashes = tuple(hashes_of(BLOCK, layout=LAYOUT))
            asked = Reservation("a", "r", sender, LAYOUT.fingerprint, BLOCK, hashes, coding)
            with pytest.raises(InvalidReservation, match=f"coding is '{coding}'; this worker takes {allowed}$") as said:
                one.decode.receiver.reserve(asked)
            assert said.value.field == "coding"
            assert one.decode.pool.num_used == 0


async def test_worker_that_does_not_say_which_coding_it_granted_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that says it takes it, and then forgets."""
    async with wire_pair() as pair:
        reserve = pair.decode.receiver.reserve
        monkeypatch.setattr(pair.decode.receiver, "reserve", lambda asked: replace(reserve(asked), coding="as-is"))
        with pytest.raises(TransferFailed, match="does not fit the reservation"):
            await pair.reserve("a", BLOCK)
        await eventually(lambda: pair.decode.pool.num_used == 0)


class OneStuckPeer(LoopbackAgent):
    """What goes to `stuck` never arrives."""

    def write(self, peer_name: str, what: Any) -> Any:
        self._completion_delay_s = float("inf") if peer_name == "stuck" else 0.001
        return super().write(peer_name, what)


def one_stuck_peer(network: LoopbackNetwork, name: str, cache: Cache, **options: Any) -> LoopbackAgent:
    return OneStuckPeer(network, name, cache.address, cache.num_bytes)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_few_slots_make_progress(num_slots: int) -> None:
    """A hundred writes through one slot of one block."""
    async with wire_pair(num_slots=num_slots, blocks_per_slot=1, agents=(one_stuck_peer, loopback)) as pair:
        blocks = pair.prefill.pool.allocate(32)
        outgoing = await pair.reserve("a", 32 * BLOCK)
        await send(pair, outgoing, blocks, by_layer=False)
        assert len(pair.prefill.sender._thread._queue) <= LAYOUT.num_layers  # whoever queues has not to wait
        async with asyncio.timeout(10):
            await outgoing.commit(11, 32 * BLOCK)
        received = pair.decode.committed["a"].block_ids
        assert torch.equal(pair.there(received), arriving(pair.here(blocks), 32 * BLOCK, "int8"))
        assert pair.all_slots_are_free


async def test_peer_that_takes_nothing_leaves_slots_to_others() -> None:
    async with wire_pair(num_slots=4, blocks_per_slot=1, agents=(one_stuck_peer, loopback)) as pair:
        assert pair.packing is not None
        network, cache = pair.prefill.agent._network, Cache(LAYOUT, fill=0)
        stuck = DecodeSide(
            loopback(network, "stuck", cache), cache, layout=LAYOUT, unpacking=Unpacking(LAYOUT, memory_of(cache))
        )
        await stuck.start()
        blocks = pair.prefill.pool.allocate(8)
        to_stuck = await pair.prefill.sender.reserve(
            replace(stuck.target, worker_id="stuck"),
            attempt_id="s",
            request_id="r",
            num_tokens=8 * BLOCK,
            block_hashes=hashes_of(8 * BLOCK, layout=LAYOUT),
            timeout_s=10.0,
        )
        await send(pair, to_stuck, blocks, by_layer=False)
        await eventually(lambda: pair.packing.staging.num_free == 2)  # type: ignore[union-attr]
        outgoing = await pair.reserve("a", 8 * BLOCK)
        await send(pair, outgoing, blocks, by_layer=False)
        async with asyncio.timeout(8):  # long before the other is given up
            await outgoing.commit(11, 8 * BLOCK)
        assert pair.packing.staging.num_free == 2
        await stuck.stop()  # its stream ends, and so do the writes to it
        await to_stuck.abort("it is gone")
        assert pair.all_slots_are_free
        pair.prefill.pool.release(blocks)
        assert pair.prefill.pool.num_used == 0


async def test_abort_in_the_middle_frees_every_slot_once_its_write_has_ended() -> None:
    now = [0.0]
    delayed: dict[str, Any] = {"completion_delay_s": 1.0, "clock": lambda: now[0]}
    async with wire_pair(num_slots=4, blocks_per_slot=1, **delayed) as pair:
        assert pair.packing is not None
        blocks = pair.prefill.pool.allocate(6)
        outgoing = await pair.reserve("a", 6 * BLOCK)
        there = list(range(6))
        await send(pair, outgoing, blocks, by_layer=False)
        await eventually(lambda: pair.packing.staging.num_free == 2)  # type: ignore[union-attr]
        aborting = asyncio.create_task(outgoing.abort("the client left"))
        await asyncio.sleep(0.05)
        assert pair.packing.staging.num_free == 2 and not aborting.done()
        assert pair.decode.pool.num_used == 6  # it may still be written
        now[0] = 10.0
        await aborting
        assert pair.all_slots_are_free
        await eventually(lambda: pair.decode.pool.num_used == 0)
        left = pair.there(there).clone()
        await asyncio.sleep(0.05)
        assert torch.equal(pair.there(there), left)
        assert pair.prefill.pool.num_used == 6
        again = await pair.reserve("b", 6 * BLOCK)  # what is left of it does no harm
        now[0] = 1000.0
        await send(pair, again, blocks, by_layer=False)
        commit = asyncio.create_task(again.commit(11, 6 * BLOCK))
        while not commit.done():
            now[0] += 10
            await asyncio.sleep(0.002)
        received = pair.decode.committed["b"].block_ids
        assert torch.equal(pair.there(received), arriving(pair.here(blocks), 6 * BLOCK, "int8"))


async def test_write_that_cannot_be_posted_frees_its_slot() -> None:
    async with wire_pair() as pair:
        blocks = pair.prefill.pool.allocate(4)
        outgoing = await pair.reserve("a", 4 * BLOCK)
        pair.prefill.agent.disconnect("decode")
        await send(pair, outgoing, blocks, by_layer=False)
        with pytest.raises(TransferFailed):
            await outgoing.commit(11, 4 * BLOCK)
        await outgoing.abort("it failed")
        assert pair.all_slots_are_free


class HeldUnpacking(Unpacking):
    """Waits in the thread until the test lets it write, and again before it ends."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()
        held.append(self)

    def unpack(self, coding: str, block_ids: Sequence[int]) -> None:
        self.is_waiting.set()
        assert self.may_go_on.wait(10), "the test never let it go on"
        super().unpack(coding, block_ids)


held: list[HeldUnpacking] = []


@pytest.mark.parametrize("what", ["abort", "release", "cancelled"])
async def test_blocks_that_are_being_unpacked_are_given_to_nobody(what: str) -> None:
    """Whatever becomes of their ticket: the thread still writes there."""
    async with wire_pair(unpacking=HeldUnpacking) as pair:
        thread, decode = held[-1], pair.decode
        blocks = pair.prefill.pool.allocate(4)
        outgoing = await pair.reserve("a", 4 * BLOCK)
        await send(pair, outgoing, blocks)
        committing = asyncio.create_task(outgoing.commit(11, 4 * BLOCK))
        await eventually(thread.is_waiting.is_set)
        assert decode.pool.match_prefix(hashes_of(4 * BLOCK, layout=LAYOUT)) == []  # not published yet
        if what == "abort":
            decode.receiver.abort("a", "the router's stream ended")
        elif what == "cancelled":
            committing.cancel()
            await asyncio.wait([committing])
        else:
            ticket = outgoing._ticket
            decode.receiver.release(ticket.ticket_id, pair.prefill.sender._identity.epoch, "", mac=ticket.mac)
        await eventually(lambda: decode.receiver.num_quarantined_blocks == 0 or what == "abort")
        await asyncio.sleep(0.05)
        assert decode.pool.num_used == 4
        taken = decode.pool.allocate(28)  # everybody else's
        assert not set(taken) & set(outgoing._ticket.block_ids)
        thread.may_go_on.set()
        if what != "cancelled":
            with pytest.raises((AttemptEnded, TicketEnded)):
                await committing
        await eventually(lambda: decode.pool.num_used == 28)
        assert not decode.committed
        assert bool((pair.decode.cache.blocks(taken) == 1).all())
        decode.pool.release(taken)
        pair.prefill.pool.release(blocks)
        await eventually(lambda: pair.prefill.pool.num_used == 0)
        decode.pool.check_integrity()


async def test_what_cannot_be_unpacked_is_not_decoded_from() -> None:
    class Failing(Unpacking):
        def unpack(self, coding: str, block_ids: Sequence[int]) -> None:
            raise RuntimeError("no memory")

    async with wire_pair(unpacking=Failing) as pair:
        blocks = pair.prefill.pool.allocate(4)
        outgoing = await pair.reserve("a", 4 * BLOCK)
        await send(pair, outgoing, blocks)
        with pytest.raises(Internal):
            await outgoing.commit(11, 4 * BLOCK)
        assert isinstance(pair.decode.failed["a"], CorruptBlocks) and not pair.decode.committed
        await eventually(lambda: pair.decode.pool.num_used == 0)
        assert (await pair.reserve("b", 4 * BLOCK)).num_cached_tokens == 0


def test_memory_that_was_added_is_written_from_over_nixl() -> None:
    """And pieces with gaps between them arrive where they belong."""
    source, extra, target = (Cache(LAYOUT, 8, fill=fill) for fill in (0, None, 1))
    sender = NixlAgent("wire-sender", source.address, source.num_bytes)
    receiver = NixlAgent("wire-receiver", target.address, target.num_bytes)
    sender.register(extra.address, extra.num_bytes)
    sender.connect("wire-receiver", receiver.metadata(), -1)
    size, piece = LAYOUT.layer_block_bytes, LAYOUT.layer_block_bytes // 2
    here = Grid(extra.address, piece, 48)
    there = Grid(target.address, piece, 24, size)
    write = sender.write(
        "wire-receiver", Pieces(here, there, np.array([5, 6, 7, 20, 9], np.int32), np.array([1, 2, 3, 23, 0], np.int32))
    )
    with making_progress(receiver):
        while write.poll() is WriteState.MOVING:
            pass
    assert write.poll() is WriteState.DONE and write.num_bytes == 5 * piece
    expected = Cache(LAYOUT, 8, fill=1).array.reshape(24, size)
    pieces = extra.array.reshape(48, piece)
    for index, block in zip([5, 6, 7, 20, 9], [1, 2, 3, 23, 0], strict=True):
        expected[block, :piece] = pieces[index]
    assert (target.array.reshape(24, size) == expected).all()
    sender.close()
    receiver.close()
