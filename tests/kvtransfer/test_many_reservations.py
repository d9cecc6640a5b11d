"""Ten thousand reservations, most of which are cancelled or given up at some random moment: nothing is left of any."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from protos.errors import ServiceError
from tests.kvtransfer.test_handover import BLOCK, Pair, eventually, pair

NUM_RESERVATIONS, AT_ONCE = 10_000, 8


async def _one(both: Pair, number: int, rng: random.Random) -> str:
    """What became of it."""
    num_tokens = rng.randint(1, 3 * BLOCK)
    reserving = asyncio.create_task(both.reserve(f"attempt-{number}", num_tokens, first=number))
    if rng.random() < 0.5:
        await asyncio.sleep(rng.uniform(0.0, 0.006))
        reserving.cancel()
    try:
        outgoing = await reserving
    except asyncio.CancelledError:
        return "cancelled"
    except ServiceError as error:  # the machine is busy, and leases are short here
        return error.reason
    await eventually(lambda: both.prefill.pool.num_free >= 3, within_s=20.0)  # those cancelled let go of theirs later
    blocks = both.compute(outgoing, num_tokens)
    ending = asyncio.create_task(outgoing.commit(11, num_tokens) if rng.random() < 0.3 else outgoing.abort("enough"))
    if rng.random() < 0.3:
        await asyncio.sleep(rng.uniform(0.0, 0.005))
        ending.cancel()
    try:
        await ending
    except asyncio.CancelledError:
        outcome = "cancelled at its end"
    except ServiceError:
        outcome = "failed"
    else:
        outcome = "ended"
    finally:
        both.prefill.pool.release(blocks)
    return outcome


@pytest.mark.timeout(120)
async def test_ten_thousand_reservations_cancelled_at_random() -> None:
    rng, outcomes = random.Random(5), Counter[str]()
    async with pair(decode_blocks=64, stall_s=20.0) as both:
        numbers = iter(range(NUM_RESERVATIONS))

        async def one_after_another() -> None:
            for number in numbers:
                outcomes[await _one(both, number, rng)] += 1
                taken = both.decode.committed.pop(f"attempt-{number}", None)
                if taken is not None:
                    both.decode.pool.release(taken.block_ids)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(one_after_another())
        for taken in both.decode.committed.values():  # accepted after its sender was cancelled
            both.decode.pool.release(taken.block_ids)
        both.decode.committed.clear()
        await both.at_rest()
    assert outcomes.total() == NUM_RESERVATIONS
    assert min(outcomes[kind] for kind in ("cancelled", "ended", "cancelled at its end")) > NUM_RESERVATIONS / 50
