"""A store in Redis, for several routers. Its keys are in one slot, so that a Redis cluster takes them too."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import RedisError

from router.store import StoreAway

_TIMEOUT_S = 1.0  # of connecting and of each command

# Reads the names and their values at once, and forgets names whose records have gone: done in two steps, a record that
# is put in between would be forgotten with them.
_RECORDS = """
local found, names = {}, redis.call('SMEMBERS', KEYS[1])
for _, name in ipairs(names) do
    local value = redis.call('GET', KEYS[1] .. ':' .. name)
    if value then
        found[#found + 1] = name
        found[#found + 1] = value
    else
        redis.call('SREM', KEYS[1], name)
    end
end
return found
"""

_CLAIM = """
local key = KEYS[1] .. ':' .. ARGV[1]
local held = redis.call('GET', key)
if held and held ~= ARGV[2] then
    return held
end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
return ARGV[2]
"""


class RedisStore:
    """`url` as redis-py has it: redis://, rediss:// (TLS) or unix://. `namespace` keeps deployments apart.

    Connects at the first call, and again after every loss. Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str, namespace: str = "pdserve") -> None:
        self._prefix = f"{{{namespace}}}"  # the braces make it the slot
        self._where = _without_password(url)
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=None, health_check_interval=0
        )
        self._records = self._redis.register_script(_RECORDS)
        self._claim = self._redis.register_script(_CLAIM)

    async def put(self, kind: str, name: str, value: bytes, ttl_s: float) -> None:
        with self._errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(f"{self._key(kind)}:{name}", value, px=max(1, round(ttl_s * 1000)))
                pipe.sadd(self._key(kind), name)
                await pipe.execute()

    async def claim(self, kind: str, name: str, value: bytes, ttl_s: float) -> bytes:
        with self._errors():
            ttl_ms = max(1, round(ttl_s * 1000))
            return cast(bytes, await self._claim(keys=[self._key(kind)], args=[name, value, ttl_ms]))

    async def remove(self, kind: str, name: str) -> None:
        with self._errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(f"{self._key(kind)}:{name}")
                pipe.srem(self._key(kind), name)
                await pipe.execute()

    async def records(self, kind: str) -> Mapping[str, bytes]:
        with self._errors():
            found = cast(list[bytes], await self._records(keys=[self._key(kind)]))
        return {name.decode(): value for name, value in zip(found[::2], found[1::2], strict=True)}

    async def append(self, log: str, value: bytes, max_length: int) -> None:
        with self._errors():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.rpush(self._key(log), value)
                pipe.ltrim(self._key(log), -max_length, -1)
                await pipe.execute()

    async def tail(self, log: str, num_entries: int) -> list[bytes]:
        if num_entries < 1:
            return []
        with self._errors():
            reading: Awaitable[Any] = cast(Awaitable[Any], self._redis.lrange(self._key(log), -num_entries, -1))
            return list(await reading)

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, kind: str) -> str:
        return f"{self._prefix}:{kind}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreAway(f"Redis at {self._where}: {error or type(error).__name__}") from error


def _without_password(url: str) -> str:
    """For messages. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("the URL of a store must begin with redis://, rediss:// or unix://")
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
