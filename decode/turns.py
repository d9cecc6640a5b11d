"""Whose turn it is where many want the same link: few enough at once that none of them has to wait for long on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """First come, first served: at most `most` at once, and together no more than `budget`.

    Whoever would take more than half of it takes half, so that there is always room for two. Event loop only.
    """

    def __init__(self, *, most: int, budget: int) -> None:
        self._most = most
        self._budget = budget
        self._num_taken = 0
        self._taken = 0
        self._line = asyncio.Lock()  # its holder is the first of those that wait
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, amount: int) -> AsyncIterator[None]:
        amount = min(amount, self._budget // 2)
        async with self._line:
            while self._num_taken == self._most or self._taken + amount > self._budget:
                self._freed.clear()
                await self._freed.wait()
            self._num_taken += 1
            self._taken += amount
        try:
            yield
        finally:
            self._num_taken -= 1
            self._taken -= amount
            self._freed.set()
