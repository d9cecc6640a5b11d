"""Circuit breakers, one for each worker: who fails again and again gets nothing for a while, then one try at a time.

After Nygard, "Release It!", with a window counted in outcomes, as resilience4j has it. Pure: `now` is passed in.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from router.candidate import WorkerId


class BreakerState(enum.Enum):
    CLOSED = 0
    HALF_OPEN = 1  # one request at a time may try
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Opens when of the last `window` outcomes, none older than `window_s`, `min_failures` and half are failures. It is
    open for `open_s`, and twice as long each time that a try fails, up to `max_open_s`."""

    window: int = 20
    window_s: float = 30.0
    min_failures: int = 5
    open_s: float = 2.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class _Breaker:
    open_s: float
    outcomes: deque[tuple[float, bool]]  # when, and whether it failed
    opened_at: float | None = None
    tried_at: float | None = None


class Breakers:
    """By worker process: one that is restarted starts anew."""

    def __init__(self, policy: BreakerPolicy = BreakerPolicy()) -> None:
        self._policy = policy
        self._breakers: dict[WorkerId, _Breaker] = {}
        self._tripped: set[WorkerId] = set()

    def avoided(self, now: float) -> set[WorkerId]:
        """Those that should get nothing now."""
        return {worker_id for worker_id in self._tripped if not self._may_try(self._breakers[worker_id], now)}

    def state(self, worker_id: WorkerId, now: float) -> BreakerState:
        breaker = self._breakers.get(worker_id)
        if breaker is None or breaker.opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now - breaker.opened_at >= breaker.open_s else BreakerState.OPEN

    def placed(self, worker_id: WorkerId, now: float) -> None:
        """Something goes there. If that is the try, nobody else goes until it is known how it went, or for `open_s`:
        a client may leave, and then it is never known."""
        if worker_id in self._tripped and self._may_try(breaker := self._breakers[worker_id], now):
            breaker.tried_at = now

    def succeeded(self, worker_id: WorkerId, now: float) -> None:
        breaker = self._breakers.get(worker_id)
        if breaker is None:
            return
        if breaker.opened_at is None:
            breaker.outcomes.append((now, False))
        elif breaker.tried_at is not None:  # not one that was under way when it opened
            del self._breakers[worker_id]
            self._tripped.remove(worker_id)

    def failed(self, worker_id: WorkerId, now: float) -> None:
        policy, breaker = self._policy, self._breakers.get(worker_id)
        if breaker is None:
            self._forget(now)
            breaker = _Breaker(policy.open_s, deque(maxlen=policy.window))
            self._breakers[worker_id] = breaker
        breaker.outcomes.append((now, True))
        if breaker.opened_at is None:
            recent = [is_failure for at, is_failure in breaker.outcomes if now - at <= policy.window_s]
            if sum(recent) >= policy.min_failures and 2 * sum(recent) >= len(recent):
                self._tripped.add(worker_id)
                breaker.opened_at = now
        elif breaker.tried_at is not None:
            breaker.open_s = min(2 * breaker.open_s, policy.max_open_s)
            breaker.opened_at, breaker.tried_at = now, None

    def _may_try(self, breaker: _Breaker, now: float) -> bool:
        since = breaker.opened_at if breaker.tried_at is None else breaker.tried_at
        return since is not None and now - since >= breaker.open_s

    def _forget(self, now: float) -> None:
        """Workers come and go, and only those that failed lately matter."""
        longest_s = self._policy.window_s + self._policy.max_open_s
        kept = {id: each for id, each in self._breakers.items() if now - each.outcomes[-1][0] <= longest_s}
        self._breakers, self._tripped = kept, self._tripped & kept.keys()
