"""Three times as many requests as there is capacity for, in miniature: `python -m bench.overload` is the long one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from bench.overload_load import Clients, Shape, percentile
from deploy.local import LocalCluster
from protos.client import PdserveClient
from tests.cluster.asking import assert_at_rest
from tests.cluster.timed_cluster import timed_config
from tests.cluster.tiny_model import TinyModel

TIMING = {"prefill_base_s": 0.05, "prefill_token_s": 0.001, "decode_base_s": 0.01, "decode_sequence_s": 0.0}
CAPACITY_PER_S = 1 / (0.05 + 32 * 0.001)  # by prefill, one prompt in a step
SECONDS = 4.0


async def test_what_is_let_in_is_answered_and_the_rest_is_refused_at_once(tiny_moe: TinyModel, tmp_path: Path) -> None:
    router_arguments = ("--max-queue-s", "1", "--max-backlog-s", "0.1")
    config = timed_config(tiny_moe, tmp_path, timing=TIMING, num_prefill=1, router_arguments=router_arguments)
    async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
        clients = Clients(client, Shape(num_prompt_tokens=32, num_output_tokens=4), random.Random(0))
        tally = await clients.flood(3 * CAPACITY_PER_S, SECONDS)
        assert not tally.failed
        assert tally.num_completed + len(tally.refused_s) == tally.num_requests > 100
        assert len(tally.refused_s) > tally.num_requests / 4
        assert tally.num_completed > CAPACITY_PER_S * SECONDS / 4  # on a machine that does other things
        assert percentile(tally.refused_s, 0.5) < percentile(tally.ttfts_s, 0.5)  # they did not wait before
        await assert_at_rest(cluster)
        async with asyncio.timeout(10):
            while (await client.get_status()).num_requests_in_flight:
                await asyncio.sleep(0.05)
