"""Decode workers that are emptied under load: streams go on elsewhere with the right tokens, and no block is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
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

NUM_STREAMS, NUM_TOKENS = 12, 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = timed_config(tiny_moe, tmp_path_factory.mktemp("drain"), num_prefill=1)
    async with LocalCluster(config) as cluster:
        yield cluster


def check(asked: list[list[int]], answers: list[Answered]) -> int:
    """That every answer is that of a plain loop, and nothing was computed twice. Returns the number of moves."""
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, len(answered.token_ids))
        assert len(answered.token_ids) == NUM_TOKENS
        assert answered.usage.num_resumes == answered.usage.decode_recomputed_tokens == 0
        assert answered.usage.decode_received_tokens + answered.usage.decode_cached_tokens == len(prompt)
        assert answered.usage.disaggregated
    return sum(answered.usage.num_moves for answered in answers)


def _other(decode_worker: str) -> str:
    return "decode-1" if decode_worker == "decode-0" else "decode-0"


async def test_drained_to_and_fro(cluster: LocalCluster) -> None:
    asked = prompts(NUM_STREAMS, range(20, 300), seed=11)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, NUM_TOKENS)
        first = await busy_decode_worker(cluster, NUM_STREAMS // 3)
        second = _other(first)
        for source, other in ((first, second), (second, first)):
            await client.set_draining(source, True)
            await until(cluster, source, lambda worker: worker.state == "draining" and worker.num_requests == 0)
            await until(cluster, source, lambda worker: (worker.num_running, worker.num_used_blocks) == (0, 0))
            assert not any(task.done() for task in tasks), "they were to be moved while they run"
            await client.set_draining(source, False)
            await until(cluster, other, lambda worker: worker.num_running == NUM_STREAMS)
        answers = await asyncio.gather(*tasks)
    assert check(asked, answers) >= NUM_STREAMS + NUM_STREAMS // 3
    await assert_at_rest(cluster)


async def test_signal_moves_what_runs(cluster: LocalCluster) -> None:
    """SIGTERM: the worker ends as soon as it is empty, long before its requests do."""
    asked = prompts(NUM_STREAMS, range(20, 300), seed=12)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, NUM_TOKENS)
        leaving = await busy_decode_worker(cluster, NUM_STREAMS // 3)
        os.kill(cluster.pid(leaving), signal.SIGTERM)
        await until(cluster, leaving, lambda worker: worker.state == "lost")
        assert not any(task.done() for task in tasks)
        answers = await asyncio.gather(*tasks)
    assert check(asked, answers) >= NUM_STREAMS // 3
    await cluster.restart(leaving)
    await assert_at_rest(cluster)


async def test_stays_where_nobody_has_room(cluster: LocalCluster) -> None:
    """The only other decode worker is drained, too: everything is finished where it runs."""
    asked = prompts(4, range(20, 100), seed=13)
    async with PdserveClient(cluster.router_address) as client:
        tasks = await ask_all(client, asked, NUM_TOKENS)
        async with asyncio.timeout(20):
            while sum(worker.num_running for worker in (await cluster.workers()).values()) < len(asked):
                await asyncio.sleep(0.02)
        for worker_id in ("decode-0", "decode-1"):
            await client.set_draining(worker_id, True)
        answers = await asyncio.gather(*tasks)
        for worker_id in ("decode-0", "decode-1"):
            await client.set_draining(worker_id, False)
    assert check(asked, answers) <= 4
    await assert_at_rest(cluster)


async def test_clients_leave_and_workers_die_while_it_is_moved(cluster: LocalCluster) -> None:
    """Whatever ends in the middle, the others' tokens are right and every block comes back."""
    rng = random.Random(14)
    asked = prompts(24, range(20, 300), seed=14)

    async def ask_and_leave(client: PdserveClient, prompt: list[int], after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                await ask(client, prompt, Sampling(temperature=0, max_tokens=NUM_TOKENS))
        except TimeoutError:
            pass

    async with PdserveClient(cluster.router_address) as client:
        kept = await ask_all(client, asked[:6], NUM_TOKENS)
        leaving = [asyncio.create_task(ask_and_leave(client, p, rng.uniform(1, 3))) for p in asked[6:]]
        first = await busy_decode_worker(cluster, 6)
        second = _other(first)
        for _ in range(3):
            for source in (first, second):
                await client.set_draining(source, True)
                await asyncio.sleep(rng.uniform(0.1, 0.5))
                await client.set_draining(source, False)
        await client.set_draining(first, True)
        await asyncio.sleep(0.1)
        await cluster.kill(second)  # while sequences are being moved there
        await client.set_draining(first, False)
        await cluster.restart(second)
        for prompt, answered in zip(asked[:6], await asyncio.gather(*kept), strict=True):
            assert answered.token_ids == expected(prompt, NUM_TOKENS)
        await asyncio.gather(*leaving)
    await assert_at_rest(cluster)
