"""Workers that die at each stage of a request in turn: nobody's answer changes, and no block stays held.

One cluster serves all of it; a victim comes back while the next one, of the other pool, is being killed. The workers
are timed ones, whose every token depends on every byte of KV that was handed over.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy.fault_seams import set_fault_plan
from deploy.local import LocalCluster
from model.timed_runner import expected_tokens
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import ask, assert_at_rest
from tests.cluster.timed_cluster import LAYOUT, timed_config
from tests.cluster.tiny_model import EOS, VOCAB_SIZE, TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REQUESTS, NUM_TOKENS = 16, 24  # so many that a worker gets some although it was measured slower than the other
TIMING = {"prefill_base_s": 0.005, "prefill_token_s": 0.0002, "decode_base_s": 0.01, "decode_sequence_s": 0.0002}
VICTIMS = [  # each of a pool, and then of the other
    ("prefill-0", "kill at reserving 2"),
    ("decode-0", "kill at granted 2"),
    ("prefill-1", "kill at reserved 2"),
    ("decode-1", "kill at record-arrived 2"),
    ("prefill-0", "kill at first-write 1"),
    ("decode-0", "kill at record-accepted 2"),
    ("prefill-1", "kill at computed 2"),
    ("decode-1", "kill at first-step 2"),
    ("prefill-0", "kill at committing 2"),
    ("decode-0", "kill at mid-stream 5"),
    ("prefill-1", "kill at committed 1"),
    ("prefill-0", "kill at releasing 1; corrupt commit 2"),  # a record that is refused is followed by a release
]
NOT_NEEDED_ANY_MORE = [VICTIMS[-1][1], "kill at mid-stream 5"]  # the last of each pool


class Cluster:
    """A cluster whose victims are started again beside the tests."""

    def __init__(self, local: LocalCluster) -> None:
        self.local = local
        self._returning: dict[str, asyncio.Task[None]] = {}

    def restart_soon(self, name: str) -> None:
        self._returning[name] = asyncio.create_task(self.local.restart(name))

    async def wait_for_pool_of(self, name: str) -> None:
        """Both its workers are there, so that what one of them leaves the other can take."""
        pool = name.split("-")[0]
        await asyncio.gather(*(task for other, task in self._returning.items() if other.startswith(pool)))

    async def wait_for_all(self) -> None:
        await asyncio.gather(*self._returning.values())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    scratch = tmp_path_factory.mktemp("stages")
    environment = {"PDSERVE_FAULTS": "none"}
    config = timed_config(tiny_moe, scratch, timing=TIMING, arguments=(), environment=environment)
    async with LocalCluster(config) as local:
        cluster = Cluster(local)
        yield cluster
        await cluster.wait_for_all()
        await assert_at_rest(local)


def expected(prompt: list[int]) -> list[int]:
    return expected_tokens(prompt, NUM_TOKENS, LAYOUT, vocab_size=VOCAB_SIZE, never_sampled=[EOS])


@pytest.mark.parametrize(("victim", "plan"), VICTIMS, ids=[plan.split()[2] for _, plan in VICTIMS])
async def test_killed_at_a_stage(cluster: Cluster, victim: str, plan: str) -> None:
    await cluster.wait_for_pool_of(victim)
    address = (await cluster.local.workers())[victim].address
    rng = random.Random(plan)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(20, 300))] for _ in range(NUM_REQUESTS)]
    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS)
    await set_fault_plan(address, plan)
    async with PdserveClient(cluster.local.router_address) as client:
        asking = [asyncio.create_task(ask(client, prompt, sampling)) for prompt in prompts]
        async with asyncio.timeout(20):
            assert await cluster.local.ended(victim) == -signal.SIGKILL
        if plan not in NOT_NEEDED_ANY_MORE:
            cluster.restart_soon(victim)
        answers = await asyncio.gather(*asking)
    for prompt, answered in zip(prompts, answers, strict=True):
        assert answered.token_ids == expected(prompt)
        assert (answered.usage.decode_computed_tokens, answered.usage.decode_recomputed_tokens) == (0, 0)
    assert sum(answered.usage.num_retries + answered.usage.num_resumes for answered in answers) >= 1
    if "first-step" in plan or "mid-stream" in plan:  # somebody's answer had begun there
        assert sum(answered.usage.num_resumes for answered in answers) >= 1
    await assert_at_rest(cluster.local)
