"""Answers read at the decode workers, over real processes: emptied and killed under load, with the right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.timed_cluster import ask_all, busy_decode_worker, expected, prompts, timed_config, until
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS, NUM_TOKENS = 8, 150


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = timed_config(tiny_moe, tmp_path_factory.mktemp("direct"), num_prefill=1, router_arguments=("--direct",))
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[PdserveClient]:
    async with PdserveClient(cluster.router_address, direct=True) as client:
        yield client


def check(asked: list[list[int]], answers: list[Answered]) -> None:
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, NUM_TOKENS)
        assert answered.usage.output_tokens == NUM_TOKENS


async def test_same_as_through_the_router(cluster: LocalCluster, client: PdserveClient) -> None:
    prompt, sampling = prompts(1, range(40, 41))[0], Sampling(max_tokens=40, temperature=1.0, seed=7, logprobs=2)
    async with PdserveClient(cluster.router_address) as through_router:
        there = await ask(through_router, prompt, sampling)
    here = await ask(client, prompt, sampling)
    assert (here.token_ids, here.text, here.finish_reason) == (there.token_ids, there.text, there.finish_reason)
    assert here.logprobs == there.logprobs


async def test_drained_while_they_run(cluster: LocalCluster, client: PdserveClient) -> None:
    asked = prompts(NUM_STREAMS, range(20, 200), seed=21)
    tasks = await ask_all(client, asked, NUM_TOKENS)
    source = await busy_decode_worker(cluster, NUM_STREAMS // 4)
    await client.set_draining(source, True)
    await until(cluster, source, lambda worker: (worker.num_running, worker.num_used_blocks) == (0, 0))
    await client.set_draining(source, False)
    answers = await asyncio.gather(*tasks)
    check(asked, answers)
    assert sum(answered.usage.num_moves for answered in answers) >= NUM_STREAMS // 4
    assert all(answered.usage.num_resumes == 0 for answered in answers)
    await assert_at_rest(cluster)


async def test_decode_worker_killed_under_load(cluster: LocalCluster, client: PdserveClient) -> None:
    asked = prompts(NUM_STREAMS, range(20, 200), seed=22)
    tasks = await ask_all(client, asked, NUM_TOKENS)
    await cluster.kill(await busy_decode_worker(cluster, NUM_STREAMS // 4))
    answers = await asyncio.gather(*tasks)
    check(asked, answers)
    assert any(answered.usage.num_resumes for answered in answers)
