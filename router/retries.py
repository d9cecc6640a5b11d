"""Whether a request whose attempt failed is tried again, and when; and who failed, for those that come after it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import grpc

from protos.errors import AttemptsExhausted, DeadlineExceeded, InvalidArgument
from router import metrics
from router.breaker import Breakers
from router.config import RelayPolicy
from router.leg import AttemptFailed
from router.retry_budget import RetryBudget

_MAX_DELAY_S = 1.0
_MAX_TOLD_DELAY_S = 5.0  # as a worker asks for

# What a worker says of itself. Else the request is wrong, or there is no room, or somebody else has gone: when one
# worker dies, all that it was handing over fails on others, which are well.
_SICK = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


class Retries:
    """One for all requests of a router."""

    def __init__(self, policy: RelayPolicy, rng: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self.breakers = Breakers()
        self._clock = clock
        self._policy = policy
        self._rng = rng
        self._budget = RetryBudget()
        self._num_running = 0

    def begin(self) -> None:
        """A request has come. `end` it in a finally."""
        self._num_running += 1
        self._budget.requested(self._clock())

    def end(self) -> None:
        self._num_running -= 1

    def delay_s(self, failure: AttemptFailed, num_failures: int, num_emitted: int, remaining_s: float | None) -> float:
        """How long to wait before the next attempt. Raises what the client is told if there is none.

        Of what a worker says, only INVALID_ARGUMENT is the client's doing: everything else may go well elsewhere.
        """
        error = failure.error
        metrics.LEG_FAILURES.labels(error.reason).inc()
        if failure.is_connection or error.code in _SICK:
            self.breakers.failed(failure.worker_id, self._clock())
        if isinstance(error, InvalidArgument):
            raise error
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineExceeded(f"the deadline passed after {num_emitted} tokens")
        if num_failures >= self._policy.max_attempts:
            raise AttemptsExhausted(f"{num_failures} attempts failed; the last one: {error}")
        broken = failure.worker_id if failure.is_connection else None
        if not self._budget.take(self._num_running, self._clock(), broken):
            metrics.RETRIES_REFUSED.inc()
            raise AttemptsExhausted(f"too many requests are being tried again for this one to be; it failed: {error}")
        delay_s: float = min(_MAX_DELAY_S, self._policy.retry_delay_s * 2 ** (num_failures - 1))
        delay_s = max(delay_s * self._rng.uniform(0.5, 1), min(error.retry_after_s or 0.0, _MAX_TOLD_DELAY_S))
        return delay_s if remaining_s is None else min(delay_s, remaining_s)
