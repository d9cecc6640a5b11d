"""Two router processes over one Redis: what a key uses at one counts at the other, while they hear of each other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest_asyncio

from deploy.local import LocalCluster
from deploy.process import ChildProcess
from protos.caller import Limits, Scope
from protos.client import PdserveClient
from protos.errors import LimitExceeded
from protos.secret import ClusterSecret
from protos.values import Sampling
from router.keys import create_key
from tests.cluster.asking import ask
from tests.cluster.test_routers import second_router, until
from tests.cluster.timed_cluster import TIMING, timed_config
from tests.cluster.tiny_model import TinyModel
from tests.router.redis_server import RedisServer

SLOW = TIMING | {"decode_base_s": 0.5}
LASTS = Sampling(temperature=0, max_tokens=200, ignore_eos=True, max_draft_tokens=0)  # a hundred seconds
PROMPT = [5, 6, 7]


@dataclass(frozen=True)
class Pair:
    redis: RedisServer
    cluster: LocalCluster
    addresses: tuple[str, str]
    keys: dict[str, str]
    second_process: ChildProcess

    def client(self, router: int, key: str) -> PdserveClient:
        return PdserveClient(self.addresses[router], api_key=self.keys[key])

    async def is_refused(self, router: int, key: str) -> str:
        """Why; empty if it was answered."""
        async with self.client(router, key) as client:
            try:
                await ask(client, PROMPT, Sampling(max_tokens=1))
            except LimitExceeded as error:
                return str(error)
        return ""

    async def until_refused(self, router: int, key: str, wanted: bool) -> None:
        async with asyncio.timeout(40):
            while bool(await self.is_refused(router, key)) != wanted:
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def running(self, router: int, key: str) -> AsyncIterator[None]:
        async with self.client(router, key) as client, aclosing(client.generate(PROMPT, sampling=LASTS)) as answer:
            await anext(answer)
            yield


@pytest_asyncio.fixture
async def pair(tiny_moe: TinyModel, tmp_path: Path) -> AsyncIterator[Pair]:
    secret, keys_file = tmp_path / "secret", tmp_path / "keys.json"
    secret.write_text(secrets.token_hex(32))
    limits = {"one a minute": Limits(requests_per_minute=1), "one at once": Limits(num_concurrent=1)}
    keys = {
        name: create_key(keys_file, name.replace(" ", "-"), tenant="t", scopes=Scope.INFER, limits=limit)
        for name, limit in limits.items()
    }
    trusted = ("--cluster-secret-file", str(secret))
    connect = partial(PdserveClient, secret=ClusterSecret(secret))
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        arguments = ("--store", redis.url, "--keys-file", str(keys_file), *trusted)
        config = timed_config(
            tiny_moe,
            tmp_path,
            timing=SLOW,
            arguments=trusted,
            num_prefill=1,
            router_arguments=arguments,
            connect=connect,
        )
        cluster = await stack.enter_async_context(LocalCluster(config))
        process, address = await stack.enter_async_context(second_router(tiny_moe, tmp_path, arguments))
        status = await stack.enter_async_context(connect(address))
        await until(status, lambda told: [worker.state for worker in told.workers] == ["ready"] * 3)
        yield Pair(redis, cluster, (cluster.router_address, address), keys, process)


async def test_limits_of_a_key_count_at_both_routers(pair: Pair) -> None:
    assert not await pair.is_refused(0, "one a minute")
    async with pair.running(0, "one at once"):
        await pair.until_refused(1, "one at once", True)  # so by now it knows of all that was before
        assert "may have 1 requests at once, and has 1" in await pair.is_refused(1, "one at once")
        assert "may make 1 requests per minute, and has made them" in await pair.is_refused(1, "one a minute")
    await pair.until_refused(1, "one at once", False)

    async with pair.running(0, "one at once"):
        await pair.until_refused(1, "one at once", True)
        pair.redis.kill()  # each goes by what it sees itself
        await pair.until_refused(1, "one at once", False)
        pair.redis.start()
        await pair.until_refused(1, "one at once", True)
    await pair.until_refused(1, "one at once", False)

    async with pair.running(1, "one at once"):
        await pair.until_refused(0, "one at once", True)
        pair.second_process.kill()  # what ran there does not count for ever
        await pair.until_refused(0, "one at once", False)
