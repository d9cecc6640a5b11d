"""What any store does, and what only a real Redis can: go away, come back, and refuse."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from router.redis_store import RedisStore
from router.store import MemoryStore, Store, StoreAway
from tests.router.redis_server import RedisServer
from tests.router.test_server import free_port

LONG_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Store]:
    made: Store = MemoryStore()
    if request.param == "redis":
        made = RedisStore(server.url, namespace=f"test {request.node.name}")
    yield made
    await made.close()


async def test_a_record_is_what_was_put_last(store: Store) -> None:
    await store.put("routers", "a", b"1", LONG_S)
    await store.put("routers", "a", b"\x00\xff2", LONG_S)
    await store.put("routers", "b:c d", b"3", LONG_S)
    await store.put("assignments", "a", b"4", LONG_S)
    assert await store.records("routers") == {"a": b"\x00\xff2", "b:c d": b"3"}
    assert await store.records("assignments") == {"a": b"4"}
    assert await store.records("nothing") == {}


async def test_a_removed_record_is_gone(store: Store) -> None:
    await store.put("routers", "a", b"1", LONG_S)
    await store.remove("routers", "a")
    await store.remove("routers", "never")
    assert await store.records("routers") == {}


async def test_a_claim_is_the_first_ones_until_it_lapses(store: Store) -> None:
    assert await store.claim("plan", "lease", b"a", 0.2) == b"a"
    assert await store.claim("plan", "lease", b"b", LONG_S) == b"a"
    assert await store.claim("plan", "lease", b"a", 0.2) == b"a"  # renewed
    assert await store.records("plan") == {"lease": b"a"}
    while (held := await store.claim("plan", "lease", b"b", LONG_S)) == b"a":
        await asyncio.sleep(0.01)
    assert held == b"b"
    assert await store.claim("plan", "lease", b"a", 0.05) == b"b"
    await store.remove("plan", "lease")
    assert await store.claim("plan", "lease", b"a", LONG_S) == b"a"
    assert await store.records("plan") == {"lease": b"a"}


async def test_a_record_lives_as_long_as_it_is_put_again(store: Store) -> None:
    await store.put("routers", "short", b"1", 0.05)
    await store.put("routers", "long", b"2", LONG_S)
    while await store.records("routers") != {"long": b"2"}:
        await asyncio.sleep(0.01)
    await store.put("routers", "short", b"3", LONG_S)
    assert await store.records("routers") == {"short": b"3", "long": b"2"}


async def test_a_log_keeps_the_newest(store: Store) -> None:
    for number in range(7):
        await store.append("decisions", b"%d" % number, max_length=5)
    assert await store.tail("decisions", 3) == [b"4", b"5", b"6"]
    assert await store.tail("decisions", 100) == [b"2", b"3", b"4", b"5", b"6"]
    assert await store.tail("decisions", 0) == []
    assert await store.tail("nothing", 3) == []


async def test_deployments_with_names_of_their_own_do_not_meet(server: RedisServer) -> None:
    first, second = RedisStore(server.url, "one"), RedisStore(server.url, "two")
    await first.put("routers", "a", b"1", LONG_S)
    assert await second.records("routers") == {}
    await first.close()
    await second.close()


async def test_redis_that_comes_back_is_used_again() -> None:
    with RedisServer() as server:
        store = RedisStore(server.url)
        await store.put("routers", "a", b"1", LONG_S)
        server.kill()
        with pytest.raises(StoreAway, match="Redis at /"):
            await store.records("routers")
        server.start()
        assert await store.records("routers") == {}
        await store.put("routers", "a", b"2", LONG_S)
        assert await store.records("routers") == {"a": b"2"}
        await store.close()


async def test_redis_that_stands_still_is_away_and_its_late_answer_is_no_answer() -> None:
    """Else the answer to one command would be taken for that to the next."""
    with RedisServer() as server:
        store = RedisStore(server.url)
        await store.put("routers", "a", b"1", LONG_S)
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(StoreAway):
            await store.tail("decisions", 5)
        os.kill(server.pid, signal.SIGCONT)
        assert await store.records("routers") == {"a": b"1"}
        await store.close()


async def test_nobody_there() -> None:
    store = RedisStore(f"redis://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(StoreAway, match=r"Redis at 127\.0\.0\.1:\d+") as caught:
        await store.put("routers", "a", b"1", LONG_S)
    assert "secret" not in str(caught.value)
    await store.close()


def test_a_url_of_something_else() -> None:
    with pytest.raises(ValueError, match="must begin with redis://"):
        RedisStore("http://user:secret@127.0.0.1")
