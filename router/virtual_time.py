"""Time that passes from one event to the next: a heap of what is to happen, and the moment it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(slots=True, eq=False)
class _Cancellable:
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualTime:
    """What is due at the same moment happens in the order in which it was asked for. Has `router.turns.Timers`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def clock(self) -> float:
        return self.now

    def at(self, moment: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """What is due in the past happens now."""
        heapq.heappush(self._due, (max(moment, self.now), next(self._numbers), callback, argument))

    def later(self, delay_s: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), callback, argument))

    def call_soon(self, callback: Callable[[], None]) -> _Cancellable:
        return self.call_later(0.0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> _Cancellable:
        handle = _Cancellable(callback)
        self.later(delay_s, _call, handle)
        return handle

    def step(self) -> bool:
        """To the next event; False if there is none."""
        if not self._due:
            return False
        self.now, _, callback, argument = heapq.heappop(self._due)
        callback(argument)
        return True


def _call(handle: _Cancellable) -> None:
    if not handle.is_cancelled:
        handle.callback()
