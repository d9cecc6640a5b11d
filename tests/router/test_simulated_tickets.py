"""A simulated decode worker grants and refuses what `kvtransfer.admission` does."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvtransfer.admission import Admission
from model.block_pool import BlockPool, NoFreeBlocks
from router.candidate import Role
from router.scenario import Scenario
from router.simulated_cluster import SimulatedCluster
from router.simulated_pool import Held
from router.simulated_request import Decoding
from router.virtual_time import VirtualTime
from tests.router.simulations import LAYOUT, a_worker

NUM_BLOCKS, PLACE_S = 30, 0.5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_running", [0, 4])
def test_grants_what_the_real_one_grants(seed: int, num_running: int) -> None:
    """Three senders want up to 20 blocks each, give some back, and forget to ask again; sequences run there that may
    want to grow."""
    rng, time = random.Random(seed), VirtualTime()
    pool = BlockPool(NUM_BLOCKS)
    real = Admission(pool, headroom=lambda: num_running, place_s=PLACE_S, clock=time.clock)
    scenario = Scenario([a_worker("d", Role.DECODE, num_blocks=NUM_BLOCKS)], LAYOUT)
    cluster = SimulatedCluster(scenario, time, rng, cast(Any, None))
    worker = cluster.workers["d"]
    cluster.start(worker)
    worker.batch.halted = {Decoding(cast(Any, None), 1, None): None for _ in range(num_running)}
    both: list[tuple[list[int], Held]] = []
    outcomes = set()
    for _ in range(300):
        time.now += rng.choice([0.0, 0.1, 0.3])
        if both and rng.random() < 0.4:
            blocks, held = both.pop(rng.randrange(len(both)))
            pool.release(blocks)
            worker.pool.give_back(held)
            continue
        sender, num_blocks = rng.choice("abc"), rng.randint(1, 20)
        granted = cluster.tickets["d"].reserve(sender, num_blocks * LAYOUT.block_size, (), time.now)
        try:
            _, blocks = real.allocate(sender, num_blocks, ())
        except NoFreeBlocks:
            assert granted is None
        else:
            assert granted is not None
            both.append((blocks, granted))
        outcomes.add(granted is None)
        assert worker.pool.num_free == pool.num_free
    assert outcomes == {True, False}
