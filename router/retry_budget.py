"""How often a router tries again, over all its requests: a cluster that is sick must not be asked many times as much.

After the retry budgets of Finagle and gRPC (its proposal A6), with room for workers' deaths. Pure: `now` is passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from router.candidate import WorkerId


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Within `window_s`: `floor` retries, `share` of the requests that came, and one for each that is running; and of
    those whose connection to a worker broke, for each worker process one for each request that is running."""

    window_s: float = 10.0
    share: float = 0.2
    floor: int = 10


class RetryBudget:
    """When a worker dies, all that it had goes on elsewhere, however many others have died just before. That is no
    storm: a process dies once, and what it had has left it. What else fails, and where a hand-over to the dead one
    fails, shares one allowance.
    """

    def __init__(self, policy: RetryPolicy = RetryPolicy()) -> None:
        self._policy = policy
        self._requests = _Count(policy.window_s)
        self._retries = _Count(policy.window_s)
        self._broken: dict[WorkerId, _Count] = {}

    def requested(self, now: float) -> None:
        self._requests.add(now)

    def take(self, num_running: int, now: float, broken: WorkerId | None = None) -> bool:
        """Whether one more is within the budget; it counts then. `broken`: the worker whose connection was lost."""
        policy = self._policy
        if broken is not None and self._of(broken, now).within(now) < num_running:
            self._broken[broken].add(now)
            return True
        allowed = policy.floor + policy.share * self._requests.within(now) + num_running
        if self._retries.within(now) + 1 > allowed:
            return False
        self._retries.add(now)
        return True

    def _of(self, worker: WorkerId, now: float) -> _Count:
        if worker not in self._broken:
            self._broken = {each: count for each, count in self._broken.items() if count.within(now)}
            self._broken[worker] = _Count(self._policy.window_s)
        return self._broken[worker]


class _Count:
    """Events of the last `window_s`, to a tenth of it."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / 10
        self._slices: deque[tuple[int, int]] = deque()  # its number and events, oldest first
        self._total = 0

    def add(self, now: float) -> None:
        number = int(now / self._slice_s)
        _, count = self._slices.pop() if self._slices and self._slices[-1][0] == number else (number, 0)
        self._slices.append((number, count + 1))
        self._total += 1

    def within(self, now: float) -> int:
        oldest = int(now / self._slice_s) - 10
        while self._slices and self._slices[0][0] <= oldest:
            self._total -= self._slices.popleft()[1]
        return self._total
