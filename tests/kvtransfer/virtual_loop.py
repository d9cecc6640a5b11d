"""An event loop whose time is a number: what takes minutes takes none, and the same steps give the same run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

_MOST_TURNS = 200
_STEP_S = 0.5


class _Impatient(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, now: float) -> None:
        super().__init__(_Impatient())
        self._now = now

    def time(self) -> float:
        return self._now

    def settle(self) -> None:
        """Runs until nothing is left to do now."""
        self.run_until_complete(self._turn())

    def do(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts it and runs on until it waits for something."""
        task = self.create_task(work)
        self.settle()
        return task

    def advance(self, seconds: float, after_each_step: Callable[[], None]) -> None:
        end = self._now + seconds
        while self._now < end:
            self._now = min(self._now + _STEP_S, end)
            self.settle()
            after_each_step()

    async def _turn(self) -> None:
        for _ in range(_MOST_TURNS):
            await asyncio.sleep(0)
            if not self._ready:  # type: ignore[attr-defined]
                return
        raise AssertionError("something goes on and on without waiting")
