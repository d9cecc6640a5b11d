"""Sender and receiver together, over the loopback agent and a real gRPC server."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import (
    AttemptEnded,
    DecodePoolFull,
    IncompleteTransfer,
    LayoutMismatch,
    LeaseExpired,
    StalePeer,
    TicketEnded,
    TransferFailed,
)
from kvtransfer.loopback_agent import LoopbackNetwork
from kvtransfer.outgoing import Outgoing
from kvtransfer.ticket import HandoverTarget
from protos.errors import ServiceError, Unavailable
from tests.kvtransfer.cache import LAYOUT, Cache, hashes_of
from tests.kvtransfer.workers import FAST_PEER, DecodeSide, PrefillSide, loopback

BLOCK = LAYOUT.block_size


class Pair:
    """One prefill and one decode worker that can reach each other."""

    def __init__(self, network: LoopbackNetwork, prefill: PrefillSide, decode: DecodeSide) -> None:
        self.network, self.prefill, self.decode = network, prefill, decode
        self.target: HandoverTarget = decode.target

    async def reserve(self, attempt_id: str, num_tokens: int, first: int = 0) -> Outgoing:
        return await self.prefill.sender.reserve(
            self.target,
            attempt_id=attempt_id,
            request_id="r",
            num_tokens=num_tokens,
            block_hashes=hashes_of(num_tokens, first),
            timeout_s=1.0,
        )

    def compute(self, outgoing: Outgoing, num_tokens: int) -> list[int]:
        """Blocks of a sequence on the prefill side, whose KV is there and queued for sending."""
        blocks = self.prefill.pool.allocate(LAYOUT.num_blocks(num_tokens))
        outgoing.hold(blocks)
        for layer in range(LAYOUT.num_layers):
            outgoing.write(layer, 0, blocks)
        return blocks

    async def hand_over(self, attempt_id: str, num_tokens: int, first: int = 0) -> tuple[list[int], list[int]]:
        """Sends a whole sequence. Returns its blocks there and here, each with one reference."""
        outgoing = await self.reserve(attempt_id, num_tokens, first)
        blocks = self.compute(outgoing, num_tokens)
        await outgoing.commit(11, num_tokens)
        return list(self.decode.committed[attempt_id].block_ids), blocks

    async def at_rest(self) -> None:
        """No block is held on either side, nor quarantined."""
        await eventually(lambda: self.prefill.pool.num_used == self.decode.pool.num_used == 0)
        self.prefill.pool.check_integrity()
        self.decode.pool.check_integrity()
        assert self.decode.receiver.num_quarantined_blocks == 0


@asynccontextmanager
async def pair(
    decode_blocks: int = 32, *, stall_s: float = 0.5, max_batch_bytes: int = 0, **agent_options: Any
) -> AsyncIterator[Pair]:
    network = LoopbackNetwork()
    decode_cache, prefill_cache = Cache(num_blocks=decode_blocks, fill=0), Cache()
    decode = DecodeSide(loopback(network, "decode", decode_cache), decode_cache)
    await decode.start()
    agent = loopback(network, "prefill", prefill_cache, **agent_options)
    prefill = PrefillSide(agent, prefill_cache, stall_s=stall_s, max_batch_bytes=max_batch_bytes)
    both = Pair(network, prefill, decode)
    try:
        yield both
    finally:
        await prefill.stop()
        await both.decode.stop()


async def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_sequence_arrives_layer_by_layer_bit_exact() -> None:
    async with pair() as both:
        num_tokens = 5 * BLOCK + 2
        blocks = both.prefill.pool.allocate(6)
        outgoing = await both.reserve("a", num_tokens)
        outgoing.hold(blocks)
        for first, stop in ((0, 2), (2, 6)):  # two chunks
            for layer in range(LAYOUT.num_layers):
                await asyncio.to_thread(outgoing.write, layer, first, blocks[first:stop])
        stats = await outgoing.commit(11, num_tokens)
        received = both.decode.committed["a"]
        assert np.array_equal(both.decode.cache.blocks(received.block_ids), both.prefill.cache.blocks(blocks))
        assert (received.num_tokens, received.first_token_id) == (num_tokens, 11)
        assert (received.num_cached_tokens, received.num_received_tokens) == (0, num_tokens)
        assert (stats.sent_tokens, stats.sent_bytes) == (num_tokens, 6 * LAYOUT.block_bytes)
        assert both.prefill.pool.num_used == 6  # the sequence's own references are left
        both.prefill.pool.release(blocks)
        both.decode.pool.release(received.block_ids)
        await both.at_rest()


async def test_only_what_decode_lacks_is_sent() -> None:
    async with pair() as both:
        there, here = await both.hand_over("a", 3 * BLOCK)
        both.decode.pool.release(there)  # cached now, held by nobody
        num_tokens = 4 * BLOCK + 1
        outgoing = await both.reserve("b", num_tokens)
        assert outgoing.num_cached_tokens == 3 * BLOCK
        blocks = here + both.prefill.pool.allocate(2)
        outgoing.hold(blocks)
        outgoing.write_all_layers(0, here)  # prefix-cached here too: all of it is held there
        for layer in range(LAYOUT.num_layers):
            outgoing.write(layer, 2, blocks[2:])
        stats = await outgoing.commit(5, num_tokens)
        assert stats.sent_tokens == BLOCK + 1
        assert stats.sent_bytes == 2 * LAYOUT.block_bytes
        received = both.decode.committed["b"]
        assert (received.num_cached_tokens, received.num_received_tokens) == (3 * BLOCK, BLOCK + 1)
        assert list(received.block_ids[:3]) == there
        assert np.array_equal(both.decode.cache.blocks(received.block_ids), both.prefill.cache.blocks(blocks))
        both.prefill.pool.release(blocks)
        both.decode.pool.release(received.block_ids)
        await both.at_rest()


async def test_everything_held_already_needs_no_write() -> None:
    async with pair() as both:
        there, here = await both.hand_over("a", 2 * BLOCK)
        outgoing = await both.reserve("b", 2 * BLOCK)
        assert outgoing.num_cached_tokens == 2 * BLOCK
        stats = await outgoing.commit(5, 2 * BLOCK)
        assert (stats.sent_tokens, stats.sent_bytes) == (0, 0)
        again = list(both.decode.committed["b"].block_ids)
        assert again == there
        both.decode.pool.release(there)
        both.decode.pool.release(again)
        both.prefill.pool.release(here)
        await both.at_rest()


async def test_other_layout_is_refused_with_the_difference() -> None:
    network, cache = LoopbackNetwork(), Cache()
    decode = DecodeSide(loopback(network, "decode", cache), cache)
    await decode.start()
    other = replace(LAYOUT, num_kv_heads=1)
    small = Cache(other)
    prefill = PrefillSide(loopback(network, "prefill", small), small, layout=other)
    with pytest.raises(LayoutMismatch, match="num_kv_heads is 1 there and 2 here"):
        await prefill.sender.reserve(
            decode.target, attempt_id="a", request_id="r", num_tokens=4, block_hashes=hashes_of(4), timeout_s=1.0
        )
    await prefill.stop()
    await decode.stop()


async def test_full_pool_says_when_to_retry_and_then_has_room() -> None:
    async with pair(decode_blocks=4) as both:
        there, here = await both.hand_over("a", 3 * BLOCK)
        with pytest.raises(DecodePoolFull, match="2 KV blocks wanted, 1 to give") as full:
            await both.reserve("b", 2 * BLOCK, first=100)
        assert full.value.retryable
        assert full.value.retry_after_s == 0.05
        both.decode.pool.release(there)
        there_too, here_too = await both.hand_over("b", 2 * BLOCK, first=100)
        both.decode.pool.release(there_too)
        both.prefill.pool.release(here + here_too)
        await both.at_rest()


async def test_commit_before_all_is_written_is_our_defect() -> None:
    async with pair() as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.prefill.pool.allocate(2)
        outgoing.hold(blocks)
        outgoing.write(0, 0, blocks)
        with pytest.raises(IncompleteTransfer, match=r"layers \[1, 2\]"):
            await outgoing.commit(1, 2 * BLOCK)
        assert both.decode.committed == {}
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_what_was_computed_while_the_link_was_busy_arrives_in_one_write() -> None:
    """Two chunks of scattered blocks, whose layers are queued one by one."""
    async with pair(max_batch_bytes=1 << 20) as both:
        go_on, others = threading.Event(), both.prefill.pool.allocate(8)
        blocks = [others[index] for index in (5, 1, 2, 7, 0)]
        outgoing = await both.reserve("a", 5 * BLOCK)
        outgoing.hold(blocks)
        busy = both.prefill.sender._thread.run(lambda: go_on.wait(5))
        for first, stop in ((0, 3), (3, 5)):
            for layer in range(LAYOUT.num_layers):
                outgoing.write(layer, first, blocks[first:stop])
        go_on.set()
        assert await busy
        await outgoing.commit(11, 5 * BLOCK)
        received = both.decode.committed["a"].block_ids
        assert both.prefill.agent.num_writes == 1
        assert np.array_equal(both.decode.cache.blocks(received), both.prefill.cache.blocks(blocks))
        both.prefill.pool.release(others)
        both.decode.pool.release(received)
        await both.at_rest()


async def test_failed_write_fails_the_hand_over_and_nothing_else_later() -> None:
    async with pair(failing_writes={1}) as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.compute(outgoing, 2 * BLOCK)
        with pytest.raises(TransferFailed, match=r"a write of \d+ bytes to decode failed") as failed:
            await outgoing.commit(1, 2 * BLOCK)
        assert failed.value.retryable
        both.prefill.pool.release(blocks)
        await both.at_rest()
        assert both.decode.failed["a"].reason == "SENDER_GONE"
        there, here = await both.hand_over("b", 2 * BLOCK)  # connects anew
        assert np.array_equal(both.decode.cache.blocks(there), both.prefill.cache.blocks(here))
        both.decode.pool.release(there)
        both.prefill.pool.release(here)


async def test_blocks_stay_held_on_both_sides_while_an_aborted_write_moves() -> None:
    write_time = 0.0
    async with pair(completion_delay_s=1.0, stall_s=20.0, clock=lambda: write_time) as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.compute(outgoing, 2 * BLOCK)
        await eventually(lambda: both.prefill.agent.num_writes == LAYOUT.num_layers)
        both.prefill.pool.release(blocks)  # the sequence has gone
        ending = asyncio.create_task(outgoing.abort("cancelled"))
        both.decode.receiver.abort("a", "cancelled")
        await asyncio.sleep(0.1)
        assert not ending.done()
        assert both.prefill.pool.num_used == 2
        assert both.decode.receiver.num_quarantined_blocks == both.decode.pool.num_used == 2
        write_time = 2.0
        await ending
        assert both.prefill.pool.num_used == 0
        await both.at_rest()
        with pytest.raises(AttemptEnded, match="attempt 'a' was aborted: cancelled"):
            await both.reserve("a", 2 * BLOCK)


async def test_abort_keeps_queued_writes_from_being_posted() -> None:
    async with pair() as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        await outgoing.abort("not needed")
        blocks = both.prefill.pool.allocate(2)
        outgoing.hold(blocks)
        outgoing.write_all_layers(0, blocks)
        with pytest.raises(TransferFailed, match="has ended"):
            await outgoing.commit(1, 2 * BLOCK)
        assert both.prefill.agent.num_writes == 0
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_calls_under_way_to_a_peer_that_is_lost_fail_rather_than_look_cancelled() -> None:
    """Closing the channel cancels them; whoever took that for its own cancellation would leave its request hanging."""
    async with pair(failing_writes={0}) as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        both.decode.answer_delay_s = 0.6
        reserving = asyncio.create_task(both.reserve("b", BLOCK))
        await asyncio.sleep(0.05)
        both.prefill.pool.release(both.compute(outgoing, 2 * BLOCK))
        with pytest.raises(TransferFailed):
            await outgoing.commit(1, 2 * BLOCK)
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(asyncio.shield(reserving), 1.0)
        await both.at_rest()


async def test_stalled_write_is_given_up_and_everything_comes_back() -> None:
    async with pair(completion_delay_s=math.inf, stall_s=0.1) as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.compute(outgoing, 2 * BLOCK)
        with pytest.raises(TransferFailed, match=r"stalled for 0\.1 s"):
            await outgoing.commit(1, 2 * BLOCK)
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_lease_lapses_without_heartbeats_and_blocks_wait_for_the_release() -> None:
    async with pair() as both:
        both.decode.mute = True
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.compute(outgoing, 2 * BLOCK)
        await eventually(lambda: both.decode.receiver.num_quarantined_blocks == 2)
        assert both.decode.failed["a"].reason == "LEASE_EXPIRED"
        await asyncio.sleep(1.0)  # longer than another lease
        assert both.decode.receiver.num_quarantined_blocks == 2
        with pytest.raises(ServiceError, match="was not renewed") as lapsed:
            await outgoing.commit(1, 2 * BLOCK)
        assert lapsed.value.reason == "LEASE_EXPIRED"
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_nothing_is_written_under_a_lease_that_nobody_has_confirmed_in_time() -> None:
    """A worker that was stopped goes on with what it had queued, before it learns that it has been given up."""
    async with pair() as both:
        both.prefill.sender._peer_options = replace(FAST_PEER, silence_s=10.0)
        (there, here), outgoing = await both.hand_over("first", BLOCK), await both.reserve("a", 2 * BLOCK, first=500)
        both.decode.silent = True
        await eventually(lambda: "a" in both.decode.failed)
        assert outgoing.failed is None  # it has not been told
        before = both.decode.cache.array.copy()
        blocks = both.compute(outgoing, 2 * BLOCK)
        await eventually(lambda: outgoing.failed is not None)
        assert np.array_equal(both.decode.cache.array, before)
        with pytest.raises(LeaseExpired):
            await outgoing.commit(1, 2 * BLOCK)
        both.decode.silent = False
        (there_too, here_too) = await both.hand_over("b", BLOCK)
        assert both.decode.num_streams == 2  # what had been posted before was in doubt, too: it has connected anew
        for pool, held in ((both.decode.pool, [*there, *there_too]), (both.prefill.pool, [*here, *here_too, *blocks])):
            pool.release(held)
        await both.at_rest()


async def test_heartbeats_keep_a_lease_for_as_long_as_it_takes() -> None:
    async with pair() as both:
        outgoing = await both.reserve("a", BLOCK)
        await asyncio.sleep(2.0)  # the lease is 0.8 s
        blocks = both.compute(outgoing, BLOCK)
        await outgoing.commit(1, BLOCK)
        both.decode.pool.release(both.decode.committed["a"].block_ids)
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_sender_learns_from_a_heartbeat_that_its_ticket_ended() -> None:
    async with pair() as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        both.decode.receiver.abort("a", "the router cancelled")
        await eventually(lambda: isinstance(outgoing.failed, TicketEnded))
        num_writes = both.prefill.agent.num_writes
        blocks = both.compute(outgoing, 2 * BLOCK)
        await outgoing.abort("its ticket ended")
        assert both.prefill.agent.num_writes == num_writes
        both.prefill.pool.release(blocks)
        await both.at_rest()


async def test_cancelled_reservation_gives_its_ticket_back() -> None:
    async with pair() as both:
        both.decode.answer_delay_s = 0.1
        reserving = asyncio.create_task(both.reserve("a", 2 * BLOCK))
        await eventually(lambda: both.decode.receiver.num_reserved_blocks == 2)
        reserving.cancel()
        await asyncio.wait([reserving])
        await eventually(lambda: both.decode.pool.num_used == 0)
        await both.at_rest()


async def test_restarted_peer_at_the_same_address_is_another_peer() -> None:
    async with pair() as both:
        there, here = await both.hand_over("a", 2 * BLOCK)
        pending = await both.reserve("b", 2 * BLOCK, first=50)
        port = int(both.target.address.rsplit(":", 1)[1])
        await both.decode.stop()
        cache = Cache(fill=0)
        both.decode = DecodeSide(loopback(both.network, "decode-again", cache), cache)
        await both.decode.start(port)
        await eventually(lambda: pending.failed is not None)
        await pending.abort("its peer is gone")
        with pytest.raises(StalePeer):  # the router has not learnt of it yet
            await both.reserve("c", BLOCK)
        both.target = both.decode.target
        there, here_too = await both.hand_over("c", 2 * BLOCK)
        assert np.array_equal(cache.blocks(there), both.prefill.cache.blocks(here_too))
        both.decode.pool.release(there)
        both.prefill.pool.release(here + here_too)
        await both.at_rest()


async def test_unreachable_peer_is_a_clean_retryable_error() -> None:
    async with pair() as both:
        nowhere = HandoverTarget("nobody", "127.0.0.1:1", "e")
        both.target, target = nowhere, both.target
        with pytest.raises(Unavailable) as error:
            await both.reserve("a", BLOCK)
        assert error.value.retryable
        both.target = target
        there, here = await both.hand_over("a", BLOCK)
        both.decode.pool.release(there)
        both.prefill.pool.release(here)


async def test_peer_that_answers_no_heartbeat_is_a_clean_retryable_error() -> None:
    async with pair() as both:
        both.decode.silent = True
        both.prefill.sender._peer_options = replace(FAST_PEER, call_timeout_s=0.2)
        with pytest.raises(TransferFailed, match="decode worker 'decode-0' did not answer the first heartbeat"):
            await both.reserve("a", BLOCK)
        both.decode.silent = False
        there, here = await both.hand_over("a", BLOCK)
        both.decode.pool.release(there)
        both.prefill.pool.release(here)


async def test_many_at_once_through_a_small_queue_all_arrive() -> None:
    async with pair() as both:
        results = await asyncio.gather(*(both.hand_over(f"a{i}", BLOCK + 1, first=100 * i) for i in range(10)))
        for there, here in results:
            assert np.array_equal(both.decode.cache.blocks(there), both.prefill.cache.blocks(here))
            both.decode.pool.release(there)
            both.prefill.pool.release(here)
        await both.at_rest()


async def test_closing_the_sender_ends_what_is_open() -> None:
    async with pair() as both:
        outgoing = await both.reserve("a", 2 * BLOCK)
        blocks = both.compute(outgoing, 2 * BLOCK)
        await both.prefill.sender.close()
        both.prefill.pool.release(blocks)
        await both.at_rest()
        with pytest.raises(TransferFailed, match="closing"):
            await both.reserve("b", BLOCK)
