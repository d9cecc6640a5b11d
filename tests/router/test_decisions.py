"""Decisions are kept in their order and can be read, newest first, by whoever may; and what is told without store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from protos.caller import Caller, Scope
from protos.client import PdserveClient
from protos.errors import InvalidArgument, PermissionDenied, Unavailable
from protos.status_values import Decision as Listed
from router.candidate import Role
from router.decisions import Decisions
from router.shared_records import Decision
from router.store import MemoryStore
from tests.router.fakes import FakeFleet, running_fleet
from tests.router.redis_server import RedisServer
from tests.router.test_sharing import Clock, MovableStore
from tests.router.test_workers import READY, profile


class Users:
    def authenticate(self, authorization: str | None) -> Caller:
        name = (authorization or "").removeprefix("Bearer ")
        return Caller(name, scopes={"ann": Scope.OPERATE | Scope.READ, "eve": Scope.INFER}[name])


@pytest.fixture(params=["memory", "redis"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[FakeFleet]:
    with RedisServer() as server:
        store = server.url if request.param == "redis" else ""
        async with running_fleet(authenticator=Users(), store=store) as fleet:
            for name in ("w0", "w1"):
                fleet.router.table.register(replace(profile(name, Role.BOTH), tokenizer_digest="digest-1"), READY)
            yield fleet


async def test_they_are_listed_newest_first_with_who_and_when_and_where(fleet: FakeFleet) -> None:
    began = datetime.now(UTC)
    async with PdserveClient(fleet.router.address, api_key="ann") as ann:
        assert await ann.list_decisions(deadline_s=10) == []
        await ann.set_plan("frozen")  # or to set a role says so too
        await ann.set_role("w0", "prefill")
        async with asyncio.timeout(10):
            while (await ann.get_plan()).flips[0].state != "done":
                await asyncio.sleep(0.005)
        await ann.set_draining("w1", True)
        await ann.set_draining("w1", False)
        listed = await ann.list_decisions(deadline_s=10)
        assert await ann.list_decisions(2, deadline_s=10) == listed[:2]
    assert [(each.what, each.worker_id, each.role) for each in listed] == [
        ("no drain", "w1", ""),
        ("drain", "w1", ""),
        ("flip done", "w0", "prefill"),
        ("role", "w0", "prefill"),
        ("frozen", "", ""),
    ]
    assert {(each.key, each.router) for each in listed} == {("ann", fleet.router.address)}
    times = [began - timedelta(seconds=1), *(each.at for each in reversed(listed)), datetime.now(UTC)]
    assert times == sorted(times)


async def test_what_is_wrong_with_a_call_is_told() -> None:
    async with running_fleet(authenticator=Users()) as fleet:
        async with PdserveClient(fleet.router.address, api_key="ann") as ann:
            for limit in (0, -1, 1001):
                with pytest.raises(InvalidArgument, match=f"limit is {limit}; it must be 1 to 1000") as caught:
                    await ann.list_decisions(limit, deadline_s=10)
                assert caught.value.field == "limit"
            with pytest.raises(InvalidArgument, match="limit: "):
                await ann.list_decisions(2**40, deadline_s=10)
        async with PdserveClient(fleet.router.address, api_key="eve") as eve:
            with pytest.raises(PermissionDenied, match="needs the scope read"):
                await eve.list_decisions(deadline_s=10)


async def test_a_hundred_are_listed_and_a_thousand_kept() -> None:
    store = MemoryStore()
    decisions = Decisions(store, lambda: "here", now=lambda: 5.0)
    for number in range(1200):
        decisions.add("drain", f"w{number}")
        await decisions.write()
    assert [each.worker for each in await decisions.newest(3)] == ["w1199", "w1198", "w1197"]
    assert [each.worker for each in await decisions.newest(5000)] == [f"w{number}" for number in range(1199, 199, -1)]


async def test_they_are_written_once_in_order_and_not_without_bound() -> None:
    store = MovableStore(Clock())
    decisions = Decisions(store, lambda: "here")
    store.is_away = True
    for number in range(1000):
        decisions.add("drain", f"w{number}")
    with pytest.raises(Unavailable, match="in the store that routers share, which is away: gone for a test"):
        await decisions.newest(10)
    store.is_away, append = False, store.append

    async def append_elsewhere(log: str, value: bytes, max_length: int) -> None:
        await asyncio.sleep(0)  # as over a network
        await append(log, value, max_length)

    store.append = append_elsewhere  # type: ignore[method-assign]
    await asyncio.gather(*(decisions.write() for _ in range(3)), *(decisions.newest(1) for _ in range(3)))
    assert len(await store.tail("decisions", 5000)) == 100
    assert [each.worker for each in await decisions.newest(5000)] == [f"w{number}" for number in range(999, 899, -1)]


async def test_one_that_comes_while_there_is_no_room_and_another_is_being_written_is_not_lost() -> None:
    store = MemoryStore()
    decisions = Decisions(store, lambda: "here")
    append = store.append

    async def slow_append(log: str, value: bytes, max_length: int) -> None:
        await append(log, value, max_length)
        if len(store._logs[log]) == 1:
            for number in range(100, 150):
                decisions.add("drain", f"w{number}")

    store.append = slow_append  # type: ignore[method-assign]
    for number in range(100):
        decisions.add("drain", f"w{number}")
    written = [each.worker for each in reversed(await decisions.newest(1000))]
    assert written == ["w0", *(f"w{number}" for number in range(50, 150))]


async def test_entries_that_cannot_be_read_are_left_out_and_one_that_is_there_twice_is_told_once() -> None:
    store = MemoryStore()
    good = Decision(5.0, "here", "role", "w", "both", "ann")
    strange = (b"\xff", b"[]", b"{}", b'{"at": -1, "router": "r", "what": "x", "worker": "w"}', b"7", good.to_bytes())
    far = b'{"at": 1e300, "router": "r", "what": "x", "worker": "w"}'
    older = b'{"at": 4.0, "router": "r", "what": "drain", "worker": "w", "by": ""}'
    for raw in (older, good.to_bytes(), *strange, far):
        await store.append("decisions", raw, 1000)
    assert await Decisions(store, lambda: "here").newest(100) == [good, Decision(4.0, "r", "drain", "w")]


async def test_without_redis_they_are_not_there_and_whoever_asks_is_told_so_in_time() -> None:
    with RedisServer() as server:
        async with (
            running_fleet(num_both=1, store=server.url) as fleet,
            PdserveClient(fleet.router.address) as client,
        ):
            await client.set_draining("w0", True)
            assert len(await client.list_decisions(deadline_s=10)) == 1
            os.kill(server.pid, signal.SIGSTOP)  # it takes connections, and says nothing
            try:
                with pytest.raises(Unavailable, match="decisions are in the store that routers share"):
                    await client.list_decisions(deadline_s=10)
                await client.set_draining("w0", False)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            async with asyncio.timeout(20):
                while not (listed := await _listed(client)):
                    await asyncio.sleep(0.05)
            assert [each.what for each in listed] == ["no drain", "drain"]
            server.kill()
            with pytest.raises(Unavailable, match="in the store that routers share, which is away: Redis at /"):
                await client.list_decisions(deadline_s=10)


async def _listed(client: PdserveClient) -> list[Listed]:
    try:
        return await client.list_decisions(deadline_s=10)
    except Unavailable:
        return []


async def test_a_store_that_takes_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.decisions._READ_S", 0.1)
    store = MemoryStore()
    decisions = Decisions(store, lambda: "here")
    decisions.add("drain", "w0")
    append = store.append

    async def stuck(log: str, value: bytes, max_length: int) -> None:
        await asyncio.Event().wait()

    store.append = stuck  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"did not answer within 0\.1 s"):
        await decisions.newest(10)
    store.append = append  # type: ignore[method-assign]
    assert [each.worker for each in await decisions.newest(10)] == ["w0"]
