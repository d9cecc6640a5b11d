"""Roles that change under load: streams go on elsewhere with the right tokens, prompts are finished where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.plan_values import Flip
from protos.values import Sampling
from tests.cluster.asking import Answered, ask, assert_at_rest
from tests.cluster.timed_cluster import ask_all, expected, prompts, timed_config, until
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS, NUM_TOKENS = 16, 250
FLIP_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_moe: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = timed_config(tiny_moe, tmp_path_factory.mktemp("flips"), num_prefill=1)
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[PdserveClient]:
    """Afterwards roles are what they were, and nothing is left anywhere."""
    async with PdserveClient(cluster.router_address) as client:
        yield client
        for worker_id, role in (("decode-0", "decode"), ("decode-1", "decode"), ("prefill-0", "prefill")):
            await client.set_role(worker_id, role)
    await assert_at_rest(cluster)


def check(asked: list[list[int]], answers: list[Answered]) -> None:
    """That every answer is that of a plain loop, and nothing was computed twice."""
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, NUM_TOKENS)
        assert answered.usage.num_resumes == answered.usage.num_retries == 0
        assert answered.usage.decode_recomputed_tokens == 0


async def ended(client: PdserveClient, worker_id: str) -> Flip:
    """The last flip of a worker, once it is over."""
    async with asyncio.timeout(30):
        while True:
            plan = await client.get_plan(deadline_s=10)
            flip = next((flip for flip in plan.flips if flip.worker_id == worker_id), None)
            if flip is not None and flip.state != "running":
                return flip
            await asyncio.sleep(0.02)


async def streams_on(
    cluster: LocalCluster, client: PdserveClient, worker_id: str, other: str, asked: list[list[int]]
) -> list[asyncio.Task[Answered]]:
    """That all decode on one worker, while the other one has room."""
    await client.set_draining(other, True)
    tasks = await ask_all(client, asked, NUM_TOKENS)
    await until(cluster, worker_id, lambda worker: worker.num_running == len(asked))
    await client.set_draining(other, False)
    return tasks


async def test_a_decode_worker_under_sixteen_streams_prefills_within_two_seconds(
    cluster: LocalCluster, client: PdserveClient
) -> None:
    asked = prompts(NUM_STREAMS, range(20, 300), seed=31)
    tasks = await streams_on(cluster, client, "decode-0", "decode-1", asked)
    await client.set_role("decode-0", "prefill", deadline_s=10)
    flip = await ended(client, "decode-0")
    assert (flip.state, flip.before, flip.after, flip.num_moved) == ("done", "decode", "prefill", NUM_STREAMS)
    assert flip.took_s < FLIP_S
    assert not any(task.done() for task in tasks), "they were to be moved while they run"
    await until(cluster, "decode-0", lambda worker: (worker.num_running, worker.num_used_blocks) == (0, 0))
    await client.set_draining("prefill-0", True)  # it does what it is for now
    (later,) = prompts(1, range(50, 51), seed=32)
    answered = await ask(client, later, Sampling(temperature=0, max_tokens=20))
    assert answered.token_ids == expected(later, 20)
    await client.set_draining("prefill-0", False)
    answers = await asyncio.gather(*tasks)
    check(asked, answers)
    assert {answered.usage.num_moves for answered in answers} == {1}


async def test_a_flip_is_taken_back_while_it_runs(cluster: LocalCluster, client: PdserveClient) -> None:
    asked = prompts(NUM_STREAMS, range(20, 300), seed=33)
    tasks = await streams_on(cluster, client, "decode-0", "decode-1", asked)
    await client.set_role("decode-0", "prefill")
    await until(cluster, "decode-0", lambda worker: worker.num_running < NUM_STREAMS)
    await client.set_role("decode-0", "decode")
    back = await ended(client, "decode-0")
    assert (back.state, back.before, back.after) == ("done", "prefill", "decode")
    flips = [flip for flip in (await client.get_plan()).flips if flip.worker_id == "decode-0"]
    first = flips[1]
    if first.state == "failed":  # else all of them had left before it was taken back
        assert first.problem == "the role was set to decode meanwhile"
        assert first.num_moved < NUM_STREAMS
    answers = await asyncio.gather(*tasks)
    check(asked, answers)
    assert {answered.usage.num_moves for answered in answers} <= {0, 1}


async def test_flips_to_and_fro_among_requests_that_come_and_go(cluster: LocalCluster, client: PdserveClient) -> None:
    """Prompts that are queued on a worker when it no longer prefills are finished there."""
    asked = prompts(24, range(100, 400), seed=34)
    await client.set_role("decode-0", "prefill")  # two prefill
    tasks = await ask_all(client, asked, NUM_TOKENS)
    await until(cluster, "decode-0", lambda worker: worker.queued_prefill_tokens > 0)
    for role in ("decode", "prefill", "decode"):
        await client.set_role("decode-0", role)
        assert (await ended(client, "decode-0")).state == "done"
    check(asked, await asyncio.gather(*tasks))


async def test_a_worker_that_dies_while_it_is_emptied(cluster: LocalCluster, client: PdserveClient) -> None:
    asked = prompts(NUM_STREAMS, range(20, 300), seed=35)
    tasks = await streams_on(cluster, client, "decode-0", "decode-1", asked)
    await client.set_role("decode-0", "prefill")
    await until(cluster, "decode-1", lambda worker: worker.num_running > 0)
    await cluster.kill("decode-0")
    flip = await ended(client, "decode-0")
    assert flip.state == "done" or flip.problem == "the worker has left"
    for prompt, answered in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert answered.token_ids == expected(prompt, NUM_TOKENS)
    await cluster.restart("decode-0")


async def test_whoever_decides_is_told_in_the_log(cluster: LocalCluster, client: PdserveClient) -> None:
    await client.set_plan("auto", reason="a test")
    await client.set_role("decode-1", "prefill")
    flip = await ended(client, "decode-1")
    plan = await client.get_plan()
    assert (plan.mode, plan.num_prefill, plan.num_decode) == ("frozen", 2, 1)
    listed = await until_listed(client, lambda whats: "flip done" in whats)
    assert listed[:4] == ["flip done", "frozen", "role", "auto"]
    assert flip.state == "done"


async def until_listed(client: PdserveClient, holds: Callable[[list[str]], bool]) -> list[str]:
    async with asyncio.timeout(20):
        while not holds(whats := [each.what for each in await client.list_decisions(4)]):
            await asyncio.sleep(0.05)
    return whats
