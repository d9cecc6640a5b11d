"""Workers that are killed and clients that leave: every stream ends with the right tokens, and no block stays held."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.values import Sampling
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.timed_cluster import ask_all, busy_decode_worker, expected, prompts, timed_config, until
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(timed_config(tiny_moe, tmp_path)) as cluster:
        yield cluster


async def test_prefill_worker_killed_mid_prefill(cluster: LocalCluster) -> None:
    asked = prompts(NUM_STREAMS, range(300, 700))
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, 30)
        await until(cluster, "prefill-0", lambda worker: worker.num_running > 0 and worker.queued_prefill_tokens > 500)
        await cluster.kill("prefill-0")
        answers = await asyncio.gather(*tasks)
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, 30)
        assert answered.usage.decode_received_tokens + answered.usage.decode_cached_tokens == answered_kv(
            prompt, answered
        )
        assert answered.usage.decode_recomputed_tokens == 0
    assert sum(answered.usage.num_retries for answered in answers) >= 1
    await assert_at_rest(cluster)


def answered_kv(prompt: list[int], answered: Answered) -> int:
    """Tokens the last decode worker started from: the prompt, and after a resume what had been emitted."""
    if answered.usage.num_resumes == 0:
        return len(prompt)
    return answered.usage.prefill_computed_tokens + answered.usage.prefill_cached_tokens


async def test_decode_worker_killed_mid_decode(cluster: LocalCluster) -> None:
    asked = prompts(NUM_STREAMS, range(20, 200), seed=1)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, 150)
        victim = await busy_decode_worker(cluster, NUM_STREAMS // 2)
        await asyncio.sleep(0.3)
        await cluster.kill(victim)
        answers = await asyncio.gather(*tasks)
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, 150)
        assert answered.usage.decode_received_tokens + answered.usage.decode_cached_tokens == answered_kv(
            prompt, answered
        )
    assert sum(answered.usage.num_resumes for answered in answers) >= NUM_STREAMS // 2
    await assert_at_rest(cluster)


@pytest.mark.parametrize(("victim", "num_tokens", "after_s"), [("decode-0", 150, 1.0), ("prefill-0", 30, 0.4)])
async def test_stopped_worker_is_given_up(cluster: LocalCluster, victim: str, num_tokens: int, after_s: float) -> None:
    """A process that is stopped keeps its connections: only its silence tells. When it goes on it lets go of all."""
    asked = prompts(8, range(300, 700), seed=7)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, num_tokens)
        await asyncio.sleep(after_s)
        os.kill(cluster.pid(victim), signal.SIGSTOP)
        await until(cluster, victim, lambda worker: worker.state == "silent" and worker.reported_ago_s >= 5)
        answers = await asyncio.gather(*tasks)
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, num_tokens)
    assert sum(answered.usage.num_retries + answered.usage.num_resumes for answered in answers) >= 1
    os.kill(cluster.pid(victim), signal.SIGCONT)
    await until(cluster, victim, lambda worker: worker.state == "ready")
    await assert_at_rest(cluster)


async def test_killed_worker_comes_back_under_its_name(cluster: LocalCluster) -> None:
    """The same name, another process: nobody takes it for the one that was there."""
    asked = prompts(8, range(50, 200), seed=2)
    async with PdserveClient(cluster.router_address) as client:
        for victim in ("decode-0", "prefill-1"):
            tasks = await ask_all(client, asked, 40)
            await asyncio.sleep(0.2)
            await cluster.kill(victim)
            await cluster.restart(victim)
            for prompt, answered in zip(asked, await asyncio.gather(*tasks), strict=True):
                assert answered.token_ids == expected(prompt, 40)
        for prompt, answered in zip(asked, await asyncio.gather(*await ask_all(client, asked, 40)), strict=True):
            assert answered.token_ids == expected(prompt, 40)
    await assert_at_rest(cluster)


async def test_200_streams_cancelled_at_random_stages(cluster: LocalCluster) -> None:
    rng = random.Random(3)
    survivors = prompts(4, range(50, 150), seed=4)
    async with PdserveClient(cluster.router_address) as client:
        kept = await ask_all(client, survivors, 200)

        async def ask_and_leave(prompt: list[int], after_s: float) -> None:
            try:
                async with asyncio.timeout(after_s):
                    await ask(client, prompt, Sampling(temperature=0, max_tokens=100))
            except TimeoutError:
                pass

        asked = prompts(200, range(1, 400), seed=5)
        for start in range(0, 200, 25):
            leaving = [ask_and_leave(prompt, rng.uniform(0.0, 1.0)) for prompt in asked[start : start + 25]]
            await asyncio.gather(*leaving)
        for prompt, answered in zip(survivors, await asyncio.gather(*kept), strict=True):
            assert answered.token_ids == expected(prompt, 200)
    await assert_at_rest(cluster)


async def test_role_flip_under_load(cluster: LocalCluster) -> None:
    """What runs is finished where it runs; the next requests go by the new roles."""
    asked = prompts(12, range(50, 300), seed=6)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, 60)
        await asyncio.sleep(0.3)
        await client.set_role("prefill-1", "decode")
        tasks += await ask_all(client, asked, 60)
        await asyncio.sleep(0.3)
        await client.set_role("prefill-1", "prefill")
        for prompt, answered in zip(asked * 2, await asyncio.gather(*tasks), strict=True):
            assert answered.token_ids == expected(prompt, 60)
    await assert_at_rest(cluster)
