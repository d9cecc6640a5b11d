"""What a request is told that is not let in, or has waited in vain. Each is counted by its reason."""

from __future__ import annotations

import random

from protos.errors import DeadlineExceeded, Overloaded
from router import metrics

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class Refusals:
    """All say when to come again, those of one moment not at the same time: `rng` spreads them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def full(self, num_waiting: int, num_tokens: int, drain_s: float) -> Overloaded:
        """`drain_s`: until all of these have gone."""
        metrics.REFUSALS.labels("full").inc()
        return Overloaded(
            f"{num_waiting} requests wait already, with {num_tokens} tokens: there is no room for more of this "
            "caller's",
            retry_after_s=self._retry_s(drain_s / 2),
        )

    def too_long(self, wait_s: float, max_queue_s: float) -> Overloaded:
        metrics.REFUSALS.labels("wait").inc()
        return Overloaded(
            f"the request would wait about {wait_s:.1f} s for a worker, and {max_queue_s:g} s is the longest that any "
            "may",
            retry_after_s=self._retry_s(wait_s - max_queue_s),
        )

    def cannot_meet(self, remaining_s: float, wait_s: float, ttft_s: float) -> Overloaded:
        """Its time is not over: what has too little of it now may have enough when there is less to do."""
        metrics.REFUSALS.labels("deadline").inc()
        return Overloaded(
            f"the deadline is in {remaining_s:.2f} s, and the first token would come in about {wait_s + ttft_s:.2f} s: "
            f"{wait_s:.2f} s until a worker has room, and {ttft_s:.2f} s there",
            retry_after_s=self._retry_s(wait_s + ttft_s - remaining_s),
        )

    def in_vain(self, waited_s: float, max_queue_s: float) -> Overloaded:
        metrics.REFUSALS.labels("late").inc()
        return Overloaded(
            f"no worker had room in {waited_s:.1f} s, longer than was predicted",
            retry_after_s=self._retry_s(max_queue_s),
        )

    def out_of_time(self, waited_s: float) -> DeadlineExceeded:
        metrics.REFUSALS.labels("late").inc()
        return DeadlineExceeded(f"the deadline passed after {waited_s:.2f} s in the queue; nothing was computed")

    def _retry_s(self, at_least_s: float) -> float:
        return min(max(at_least_s, _MIN_RETRY_S), _MAX_RETRY_S) * self._rng.uniform(1.0, 1.5)
