"""What several routers have to know of each other, behind one seam: small records that live for a while, and logs.

No request waits for a store: `router.sharing` exchanges with it beside them, and does without while it is away.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Protocol


class StoreAway(Exception):
    """The store did not answer in time, or not at all; whether it did what was asked is not known."""


class Store(Protocol):
    """Every call ends within seconds, or raises StoreAway."""

    async def put(self, kind: str, name: str, value: bytes, ttl_s: float) -> None:
        """Replaces the record of this kind and name. It goes after `ttl_s` if it is not put again."""
        ...

    async def claim(self, kind: str, name: str, value: bytes, ttl_s: float) -> bytes:
        """Puts a record unless there is another one of this name, in one step; returns the value that is there then."""
        ...

    async def remove(self, kind: str, name: str) -> None: ...

    async def records(self, kind: str) -> Mapping[str, bytes]:
        """Those that live, by name."""
        ...

    async def append(self, log: str, value: bytes, max_length: int) -> None:
        """The oldest entries go once there are more than `max_length`."""
        ...

    async def tail(self, log: str, num_entries: int) -> list[bytes]:
        """The newest ones, oldest first."""
        ...

    async def close(self) -> None: ...


class MemoryStore:
    """For a router that is alone. Several in one process may share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: defaultdict[str, dict[str, tuple[bytes, float]]] = defaultdict(dict)
        self._logs: dict[str, deque[bytes]] = {}

    async def put(self, kind: str, name: str, value: bytes, ttl_s: float) -> None:
        self._records[kind][name] = (value, self._clock() + ttl_s)

    async def claim(self, kind: str, name: str, value: bytes, ttl_s: float) -> bytes:
        held = (await self.records(kind)).get(name, value)
        if held == value:
            await self.put(kind, name, value, ttl_s)
        return held

    async def remove(self, kind: str, name: str) -> None:
        self._records[kind].pop(name, None)

    async def records(self, kind: str) -> Mapping[str, bytes]:
        now = self._clock()
        living = {name: record for name, record in self._records[kind].items() if record[1] > now}
        self._records[kind] = living
        return {name: value for name, (value, _) in living.items()}

    async def append(self, log: str, value: bytes, max_length: int) -> None:
        self._logs[log] = deque([*self._logs.get(log, ()), value], max_length)

    async def tail(self, log: str, num_entries: int) -> list[bytes]:
        entries = list(self._logs.get(log, ()))
        return entries[max(0, len(entries) - num_entries) :]

    async def close(self) -> None:
        return None
