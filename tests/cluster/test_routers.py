"""Two routers over one Redis: workers find both, both agree, and neither ends with the other, or with the store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest_asyncio

from deploy.local import LocalCluster
from deploy.process import ChildProcess, Command
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.status_values import Status
from protos.values import Sampling
from tests.cluster.asking import Answered, ask
from tests.cluster.cuttable import Cuttable, cuttable
from tests.cluster.timed_cluster import ask_all, expected, prompts, timed_config
from tests.cluster.tiny_model import TinyModel
from tests.router.redis_server import RedisServer
from tests.router.test_server import free_port

NUM_TOKENS = 100


@dataclass(frozen=True)
class Pair:
    """`first` is the router that the workers were given; `second` they learn of."""

    cluster: LocalCluster
    redis: RedisServer
    first: PdserveClient
    second: PdserveClient
    either: PdserveClient  # asks the first as long as it is there
    directly: PdserveClient  # so does this, and reads at the workers
    link: Cuttable  # from the second to Redis
    second_process: ChildProcess


@pytest_asyncio.fixture
async def pair(tiny_moe: TinyModel, tmp_path: Path) -> AsyncIterator[Pair]:
    with RedisServer() as redis:
        arguments, via_link = ("--store", redis.url, "--direct"), ("--store", f"{redis.url}.link", "--direct")
        socket = Path(redis.url.removeprefix("unix://"))
        async with (
            cuttable(Path(f"{socket}.link"), socket) as link,
            LocalCluster(timed_config(tiny_moe, tmp_path, num_prefill=1, router_arguments=arguments)) as cluster,
            second_router(tiny_moe, tmp_path, via_link) as (process, address),
            PdserveClient(cluster.router_address) as first,
            PdserveClient(address) as second,
            PdserveClient(f"{cluster.router_address},{address}") as either,
            PdserveClient(f"{cluster.router_address},{address}", direct=True) as directly,
        ):
            await until(
                second, lambda status: {w.state for w in status.workers} == {"ready"} and len(status.workers) == 3
            )
            yield Pair(cluster, redis, first, second, either, directly, link, process)


@asynccontextmanager
async def second_router(
    model: TinyModel, folder: Path, arguments: tuple[str, ...]
) -> AsyncIterator[tuple[ChildProcess, str]]:
    port = free_port()
    options = ("--model", str(model.folder), "--port", str(port), "--plan", "frozen", "--no-spill")
    start = (sys.executable, "-P", "-m", "deploy.cli", "router", *options)
    root = str(Path(__file__).resolve().parents[2])
    command = Command("second", (*start, "--http-port", "off", *arguments), folder / "second.log", {"PYTHONPATH": root})
    process = await ChildProcess.start(command)
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        await process.stop(10.0)
        assert "Traceback" not in command.log_path.read_text()


async def until(client: PdserveClient, holds: Callable[[Status], bool]) -> None:
    async with asyncio.timeout(40):
        while True:
            try:
                if holds(await client.get_status(deadline_s=5)):
                    return
            except ServiceError:  # it is starting
                pass
            await asyncio.sleep(0.05)


def roles(status: Status) -> dict[str, str]:
    return {worker.worker_id: worker.role for worker in status.workers}


async def answers_of(client: PdserveClient, seed: int) -> None:
    asked = prompts(6, range(20, 200), seed=seed)
    check(asked, await asyncio.gather(*await ask_all(client, asked, NUM_TOKENS)))


def check(asked: list[list[int]], answers: list[Answered]) -> None:
    for prompt, answered in zip(asked, answers, strict=True):
        assert answered.token_ids == expected(prompt, NUM_TOKENS)


async def test_two_routers_agree_and_outlive_each_other_and_their_store(pair: Pair) -> None:
    await asyncio.gather(answers_of(pair.first, 1), answers_of(pair.second, 2))

    await pair.second.set_role("decode-1", "both")  # what one is told, both do
    await until(pair.first, lambda status: roles(status)["decode-1"] == "both")
    await pair.first.set_draining("decode-0", draining=True)
    await until(pair.second, lambda status: {w.worker_id: w.state for w in status.workers}["decode-0"] == "draining")
    await pair.second.set_draining("decode-0", draining=False)
    await until(pair.first, lambda status: {w.worker_id: w.state for w in status.workers}["decode-0"] == "ready")

    pair.link.is_whole.clear()
    await pair.first.set_role("decode-1", "decode")
    await asyncio.gather(answers_of(pair.first, 9), answers_of(pair.second, 10))
    assert roles(await pair.second.get_status())["decode-1"] == "both"  # nobody could tell it
    pair.link.is_whole.set()
    await until(pair.second, lambda status: roles(status)["decode-1"] == "decode")
    await pair.second.set_role("decode-1", "both")
    await until(pair.first, lambda status: roles(status)["decode-1"] == "both")

    pair.redis.kill()
    await asyncio.gather(answers_of(pair.first, 3), answers_of(pair.second, 4))
    await pair.first.set_role("decode-1", "decode")
    pair.redis.start()  # it has lost everything
    await until(pair.second, lambda status: roles(status)["decode-1"] == "decode")

    asked, others, resumed = (prompts(6, range(20, 200), seed=seed) for seed in (5, 6, 7))
    through_first, through_second = (
        await ask_all(pair.first, asked, NUM_TOKENS),
        await ask_all(pair.second, others, NUM_TOKENS),
    )
    begun = {client: asyncio.Event() for client in (pair.either, pair.directly)}

    async def begin(client: PdserveClient) -> None:
        begun[client].set()

    sampling = Sampling(temperature=0, max_tokens=NUM_TOKENS)
    through_either = [
        asyncio.create_task(ask(client, prompt, sampling, at_token=2, then=partial(begin, client)))
        for client, prompt in zip([pair.either, pair.directly] * 3, resumed, strict=True)
    ]
    await asyncio.gather(*(each.wait() for each in begun.values()))
    await pair.cluster.kill("router")
    lost = await asyncio.gather(*through_first, return_exceptions=True)
    assert any(isinstance(each, ServiceError) for each in lost)  # its own open streams, and no others
    check(others, await asyncio.gather(*through_second))
    went_on = await asyncio.gather(*through_either)
    check(resumed, went_on)
    assert any(answered.usage.num_resumes for answered in went_on[::2])
    assert any(answered.usage.num_resumes for answered in went_on[1::2])
    await answers_of(pair.second, 8)
    await until(pair.second, lambda status: all(worker.num_used_blocks == 0 for worker in status.workers))
