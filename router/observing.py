"""What has come and what has been answered since the planner last looked: of very many the newest. Event loop only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from router.observation import Answered, Arrival

_MOST = 50_000  # of each, between two looks: twice as many as a router serves in ten seconds
_SHARE = 0.05  # of each request in the means


class Observing:
    """An observer of `router.history`. Means stand for what is not known of one that is refused before it was read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = _MOST) -> None:
        self._clock = clock
        self._arrived: deque[Arrival] = deque(maxlen=most)
        self._answered: deque[Answered] = deque(maxlen=most)
        self._mean: tuple[float, float] | None = None  # tokens of the prompt, and at most of the answer

    def arrived(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)
        prompt, answer = self._mean or (arrival.num_prompt_tokens, arrival.max_tokens)
        self._mean = (
            prompt + _SHARE * (arrival.num_prompt_tokens - prompt),
            answer + _SHARE * (arrival.max_tokens - answer),
        )

    def refused(self, *, had_arrived: bool, slo_class: str = "") -> None:
        """One that had not is taken to be like those that came lately."""
        if self._mean is not None and not had_arrived:
            self._arrived.append(Arrival(self._clock(), round(self._mean[0]), round(self._mean[1]), slo_class))

    def answered(self, answered: Answered) -> None:
        self._answered.append(answered)

    def failed(self) -> None:
        """There is nothing to be learnt of it."""

    def merge(self, arrived: Sequence[Arrival], answered: Sequence[Answered]) -> None:
        """What came to another router."""
        self._arrived.extend(arrived)
        self._answered.extend(answered)

    def take(self) -> tuple[list[Arrival], list[Answered]]:
        """What there is since the last time, in order of arrival."""
        arrived, answered = sorted(self._arrived, key=lambda arrival: arrival.at_s), list(self._answered)
        self._arrived.clear()
        self._answered.clear()
        return arrived, answered
