"""Prompts that begin alike go where that beginning is: the workers' own counters say so, through real processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local import ROUTER, LocalCluster
from protos.client import PdserveClient
from protos.status_values import WorkerStatus
from protos.values import Sampling, Usage
from tests.cluster.asking import ask
from tests.cluster.timed_cluster import expected, timed_config, until
from tests.cluster.tiny_model import VOCAB_SIZE, TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SHARED = 192  # tokens that prompts begin with: 12 blocks
OWN = 24  # and those that each has to itself
NUM_TOKENS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(timed_config(tiny_moe, tmp_path_factory.mktemp("prefix"))) as cluster:
        yield cluster


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num)]


async def served(cluster: LocalCluster, prompt: list[int]) -> Usage:
    async with PdserveClient(cluster.router_address) as client:
        answered = await ask(client, prompt, Sampling(temperature=0, max_tokens=NUM_TOKENS))
    assert answered.token_ids == expected(prompt, NUM_TOKENS)
    return answered.usage


def is_known_and_idle(worker: WorkerStatus) -> bool:
    return worker.num_known_blocks is not None and worker.num_running + worker.num_waiting == 0


async def blocks_known(cluster: LocalCluster, more_than: int) -> int:
    """Waits until the router knows of more blocks than that, all workers together, and that all are done."""
    while True:
        for name in WORKERS:
            await until(cluster, name, is_known_and_idle)
        known = sum(worker.num_known_blocks or 0 for worker in (await cluster.workers()).values())
        if known > more_than:
            return known


async def test_a_shared_beginning_is_computed_and_sent_once(cluster: LocalCluster) -> None:
    """With two workers of each kind, chance alone would find it one time in four."""
    rng = random.Random(21)
    beginning = tokens(rng, SHARED)
    known = await blocks_known(cluster, -1)
    first = await served(cluster, [*beginning, *tokens(rng, OWN)])
    assert (first.prefill_cached_tokens, first.decode_cached_tokens) == (0, 0)
    held = []
    for _ in range(6):
        known = await blocks_known(cluster, known)
        again = await served(cluster, [*beginning, *tokens(rng, OWN)])
        assert (again.prefill_cached_tokens, again.prefill_computed_tokens) == (SHARED, OWN)
        assert again.decode_cached_tokens + again.decode_received_tokens == SHARED + OWN
        held.append(again.decode_cached_tokens)
    assert held.count(SHARED) >= 5  # where steps are quicker may count for more, but once: then both hold it


async def test_a_router_that_has_been_restarted_learns_what_is_cached(cluster: LocalCluster) -> None:
    rng = random.Random(22)
    beginning = tokens(rng, SHARED)
    known = await blocks_known(cluster, -1)
    await served(cluster, [*beginning, *tokens(rng, OWN)])
    known = await blocks_known(cluster, known)
    await cluster.stop(ROUTER)
    await cluster.restart(ROUTER)
    async with asyncio.timeout(20):
        while len(await cluster.workers()) < len(WORKERS):
            await asyncio.sleep(0.02)
    assert await blocks_known(cluster, known - 1) == known
    held = []
    for _ in range(4):
        again = await served(cluster, [*beginning, *tokens(rng, OWN)])
        assert again.prefill_cached_tokens == SHARED
        held.append(again.decode_cached_tokens)
        known = await blocks_known(cluster, known)
    assert held.count(SHARED) >= 3


async def test_a_prompt_that_a_decode_worker_holds_is_prefilled_there(tiny_moe: TinyModel, tmp_path: Path) -> None:
    """Once speeds are known: all but 24 of its tokens are there, and they take it about 15 ms."""
    config = timed_config(tiny_moe, tmp_path, num_prefill=1, router_arguments=("--local-prefill-ms", "40"))
    rng = random.Random(23)
    beginning = tokens(rng, SHARED)
    async with LocalCluster(config) as cluster:
        first = await served(cluster, [*beginning, *tokens(rng, OWN)])
        assert first.disaggregated
        await until(cluster, "prefill-0", lambda worker: worker.prefill_tokens_per_s > 0)
        await until(cluster, "prefill-0", lambda worker: worker.transfer_bytes_per_s > 0)
        workers = await cluster.workers()
        (holder,) = [name for name in ("decode-0", "decode-1") if workers[name].decode_step_s > 0]
        await until(cluster, holder, lambda worker: (worker.num_known_blocks or 0) >= (SHARED + OWN) // 16)
        await until(cluster, holder, is_known_and_idle)
        again = await served(cluster, [*beginning, *tokens(rng, OWN)])
        assert not again.disaggregated
        assert (again.decode_cached_tokens, again.decode_computed_tokens) == (SHARED, OWN)
        long = await served(cluster, tokens(rng, SHARED))
        assert long.disaggregated
