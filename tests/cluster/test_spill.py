"""Prompts that would be late on the only prefill worker are computed where they decode, beside what decodes there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.timed_cluster import ask_all, expected, prompts, timed_config, until
from tests.cluster.tiny_model import TinyModel

TIMING = {"prefill_base_s": 0.02, "prefill_token_s": 0.002, "decode_base_s": 0.015, "decode_sequence_s": 0.0002}
NUM_TOKENS = 40


async def test_some_of_many_prompts_spill_over(tiny_moe: TinyModel, tmp_path: Path) -> None:
    """One takes half a second, so that of eight at once all but the first would have their first token too late."""
    router_arguments = ("--slo-ttft", "1", "--slo-tpot", "1")
    config = timed_config(
        tiny_moe, tmp_path, timing=TIMING, num_prefill=1, spill=True, router_arguments=router_arguments
    )
    async with LocalCluster(config) as cluster, PdserveClient(cluster.router_address) as client:
        for prompt in prompts(2, range(250, 251), seed=1):  # nobody knows before how fast they are
            first = await ask(client, prompt, Sampling(temperature=0, max_tokens=NUM_TOKENS))
            assert first.usage.disaggregated
        await until(cluster, "prefill-0", lambda worker: worker.prefill_tokens_per_s > 0 and worker.num_running == 0)
        asked = prompts(8, range(250, 251), seed=2)
        answers = await asyncio.gather(*await ask_all(client, asked, NUM_TOKENS))
        assert [answer.token_ids for answer in answers] == [expected(prompt, NUM_TOKENS) for prompt in asked]
        num_spilled = sum(not answer.usage.disaggregated for answer in answers)
        assert 1 <= num_spilled <= 7
        assert sum(answer.usage.decode_computed_tokens for answer in answers) == 250 * num_spilled
        await assert_at_rest(cluster)
