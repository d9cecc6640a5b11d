"""What a worker says of its prefix cache over its registration stream, and what the router says to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from protos import workers_pb2, workers_pb2_grpc
from protos.channel import open_channel
from protos.errors import InvalidArgument, from_rpc_error
from router.candidate import WorkerId
from router.server import Router
from tests.router.fakes import FakeFleet, FakeWorker, HandOver, ready_load, running_fleet

HASHES = [bytes([number]) * 16 for number in range(4)]


class Teller:
    """A worker that registers and then says what the test tells it to."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.hello = FakeWorker("w", workers_pb2.ROLE_BOTH, HandOver(), "e1", 100).hello()
        self.hello.address = "127.0.0.1:1"
        self.reports: asyncio.Queue[workers_pb2.WorkerReport] = asyncio.Queue()
        self.reports.put_nowait(workers_pb2.WorkerReport(hello=self.hello, load=ready_load()))
        self._channel = open_channel(fleet.router.address)
        self.commands = workers_pb2_grpc.WorkersStub(self._channel).Register(self._say()).__aiter__()

    async def _say(self) -> AsyncIterator[workers_pb2.WorkerReport]:
        while True:
            yield await self.reports.get()

    def tell(self, number: int, stored: bytes = b"", removed: bytes = b"", *, is_dump: bool = False) -> None:
        cache = workers_pb2.CacheChanges(
            number=number, stored=stored, removed=removed, begins_dump=is_dump, ends_dump=is_dump
        )
        self.reports.put_nowait(workers_pb2.WorkerReport(load=ready_load(), cache=cache))

    async def close(self) -> None:
        await self._channel.close()


async def known(router: Router, num_blocks: int | None) -> None:
    async with asyncio.timeout(5):
        while router.table.prefixes.num_blocks(WorkerId("w", "e1")) != num_blocks:
            await asyncio.sleep(0.001)


async def test_router_follows_a_cache_and_asks_for_it_anew_where_it_missed_something() -> None:
    async with running_fleet() as fleet, asyncio.timeout(10):
        teller = Teller(fleet)
        worker = WorkerId("w", "e1")
        assert (await anext(teller.commands)).set_role == workers_pb2.ROLE_BOTH
        teller.tell(1, b"".join(HASHES[:3]), is_dump=True)
        await known(fleet.router, 3)
        teller.tell(2, HASHES[3], removed=HASHES[1])
        await known(fleet.router, 3)
        while fleet.router.table.prefixes.match(HASHES).of(worker) != 1:
            await asyncio.sleep(0.001)
        teller.tell(4, removed=HASHES[0])
        command = await anext(teller.commands)
        assert command.dump_cache and not command.HasField("set_role")
        assert fleet.router.table.prefixes.match(HASHES).of(worker) == 0
        teller.tell(5, b"".join(HASHES), is_dump=True)
        await known(fleet.router, 4)
        await teller.close()
        await known(fleet.router, None)


@pytest.mark.parametrize(
    "name, number", [("prefill_tokens_per_s", float("nan")), ("decode_step_s", float("inf")), ("num_running", -1)]
)
async def test_load_that_is_no_number_ends_the_registration(name: str, number: float) -> None:
    async with running_fleet() as fleet, asyncio.timeout(10):
        teller = Teller(fleet)
        await anext(teller.commands)
        load = ready_load()
        setattr(load, name, number)
        teller.reports.put_nowait(workers_pb2.WorkerReport(load=load))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(teller.commands)
        refusal = from_rpc_error(caught.value)
        assert isinstance(refusal, InvalidArgument) and f"load.{name} is {number}; it must be" in str(refusal)
        await teller.close()


async def test_hashes_that_are_not_whole_end_the_registration() -> None:
    async with running_fleet() as fleet, asyncio.timeout(10):
        teller = Teller(fleet)
        await anext(teller.commands)
        teller.tell(1, b"x" * 17, is_dump=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(teller.commands)
        refusal = from_rpc_error(caught.value)
        assert isinstance(refusal, InvalidArgument) and "cache.stored has 17 bytes; a hash has 16" in str(refusal)
        await teller.close()
