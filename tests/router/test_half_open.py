"""Connections of which one side has gone and the other does not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from protos.client import PdserveClient
from protos.serve import ServerLimits
from protos.values import Chunk, Sampling
from tests.router.asking import PROMPT, all_workers
from tests.router.fakes import plain_loop, running_fleet

NUM_TOKENS = 12


class Middle:
    """Passes bytes on. `lose`: clients see their connections break, and the other side sees nothing at all."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lost: list[asyncio.StreamWriter] = []
        self._links: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter, list[asyncio.Task[None]]]] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.rsplit(":", 1)
        reader_there, writer_there = await asyncio.open_connection(host, int(port))
        passing = [
            asyncio.create_task(_pass_on(reader, writer_there)),
            asyncio.create_task(_pass_on(reader_there, writer)),
        ]
        self._links.append((writer, writer_there, passing))

    async def lose(self) -> None:
        links, self._links = self._links, []
        for here, there, passing in links:
            for each in passing:
                each.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
            here.transport.abort()
            self._lost.append(there)

    async def close(self) -> None:
        await self.lose()
        for there in self._lost:
            there.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()


@asynccontextmanager
async def between(target: str) -> AsyncIterator[tuple[Middle, str]]:
    middle = Middle(target)
    server = await asyncio.start_server(middle.take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield middle, f"{host}:{port}"
    finally:
        server.close()
        await middle.close()


@pytest.mark.parametrize("direct", [False, True])
async def test_answer_goes_on_at_the_only_router_once_that_has_noticed_the_loss(direct: bool) -> None:
    limits = ServerLimits(keepalive_s=2.0)
    async with running_fleet(num_prefill=1, num_decode=1, direct=True, limits=limits) as fleet:

        async def hold(attempt_id: str, num_tokens: int) -> None:
            """The first attempt stays where it is until the router ends it."""
            if num_tokens > len(PROMPT) + 4 and attempt_id == fleet.workers["d0"].decodes[0].attempt_id:
                await asyncio.sleep(60)

        for worker in all_workers(fleet, "d"):
            worker.hooks["decode.token"] = hold
        async with (
            between(fleet.router.address) as (middle, address),
            PdserveClient(address, direct=direct) as client,
            aclosing(client.generate(PROMPT, sampling=Sampling(max_tokens=NUM_TOKENS))) as parts,
        ):
            token_ids = list[int]()
            async for part in parts:
                if not isinstance(part, Chunk):
                    break
                token_ids += part.token_ids
                if len(token_ids) == 4:
                    await middle.lose()
        assert token_ids == plain_loop(PROMPT, NUM_TOKENS)
        await fleet.settled()
