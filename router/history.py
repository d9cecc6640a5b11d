"""The requests that this router serves, and those that ended lately: for people, and for whoever learns from them.

Every request of every door is followed here from when it is known to be one until it has ended. What ended is kept as
a message of a few hundred bytes, up to a number; those that were refused apart, or a wave of them would sweep away the
rest. Event loop only.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from protos.errors import DeadlineExceeded, LimitExceeded, Overloaded, ServiceError
from router.followed import Followed
from router.observation import Answered, Arrival, Running
from router.request import Request
from router.request_summary import answered_of, summary_of
from router.timeline import RequestClock

_KEPT, _KEPT_REFUSED = 2000, 200


class Observer(Protocol):
    """Hears of every request, on its way: it has to be quick, and must not raise."""

    def arrived(self, arrival: Arrival) -> None: ...

    def answered(self, answered: Answered) -> None: ...

    def failed(self) -> None: ...

    def refused(self, *, had_arrived: bool, slo_class: str) -> None:
        """It was not admitted. Without `had_arrived`, before its tokens were known."""
        ...


@dataclass(frozen=True, slots=True)
class _Ended:
    received_at: float
    total_s: float
    message: bytes  # a RequestSummary


class History:
    def __init__(self, observers: Sequence[Observer] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._observers = observers
        self._clock = clock
        self._running: dict[str, Followed] = {}
        self._ended: deque[_Ended] = deque(maxlen=_KEPT)
        self._refused: deque[_Ended] = deque(maxlen=_KEPT_REFUSED)

    @contextmanager
    def follow(self, request_id: str, tenant: str, clock: RequestClock, slo_class: str = "") -> Iterator[Followed]:
        """While one is served. `request_id` is that of no other that runs."""
        followed = self._running[request_id] = Followed(request_id, tenant, clock, slo_class)
        try:
            yield followed
        except ServiceError as error:
            self._end_without_answer(followed, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._end_cancelled(followed)
            raise
        except BaseException:
            self._tell_failed(followed, "INTERNAL")
            raise
        else:
            self._end_answered(followed, answered_of(followed))
        finally:
            del self._running[request_id]

    def arrived(self, followed: Followed, request: Request) -> None:
        """It is valid, and is about to be admitted."""
        followed.num_prompt_tokens, followed.has_arrived = len(request.token_ids), True
        arrival = Arrival(self._clock(), request.num_known_tokens, request.max_new_tokens, followed.slo_class)
        for observer in self._observers:
            observer.arrived(arrival)

    def running(self) -> list[Running]:
        """Those that workers have."""
        return [
            Running(
                followed.clock.received_at,
                followed.num_prompt_tokens,
                sum(answer.num_relayed - len(answer.known) for answer in followed.answers),
                followed.slo_class,
            )
            for followed in self._running.values()
            if followed.was_admitted
        ]

    def newest(self, limit: int, *, running_only: bool = False) -> list[bytes]:
        """Serialized RequestSummary messages, those that came last first."""
        chosen = heapq.nlargest(limit, self._known(running_only), key=_received_at)
        return [self._message(each) for each in chosen]

    def slowest(self, limit: int, *, running_only: bool = False) -> list[bytes]:
        """The same, of all that are kept those that took or take longest first."""
        now = self._clock()
        chosen = heapq.nlargest(limit, self._known(running_only), key=lambda each: _total_s(each, now))
        return [self._message(each) for each in chosen]

    def _known(self, running_only: bool) -> Iterable[Followed | _Ended]:
        running = list(self._running.values())
        return running if running_only else chain(running, self._ended, self._refused)

    def _message(self, each: Followed | _Ended) -> bytes:
        return each.message if isinstance(each, _Ended) else summary_of(each)[1]

    def _end_answered(self, followed: Followed, answered: Answered | None) -> None:
        if answered is not None:
            for observer in self._observers:
                observer.answered(answered)
        self._keep(self._ended, followed, "done")

    def _end_cancelled(self, followed: Followed) -> None:
        """Who leaves with the whole answer has it."""
        if (answered := answered_of(followed)) is not None:
            self._end_answered(followed, answered)
        else:
            self._keep(self._ended, followed, "cancelled")

    def _end_without_answer(self, followed: Followed, error: ServiceError) -> None:
        if _is_refusal(followed, error):
            for observer in self._observers:
                observer.refused(had_arrived=followed.has_arrived, slo_class=followed.slo_class)
            self._keep(self._refused, followed, "failed", error.reason)
        elif followed.has_arrived:
            self._tell_failed(followed, error.reason)
        # Else it was none: something in it was wrong, and it was told so.

    def _tell_failed(self, followed: Followed, reason: str) -> None:
        for observer in self._observers:
            observer.failed()
        self._keep(self._ended, followed, "failed", reason)

    def _keep(self, kept: deque[_Ended], followed: Followed, state: str, reason: str = "") -> None:
        kept.append(_Ended(followed.clock.received_at, *summary_of(followed, state, reason)))


def _is_refusal(followed: Followed, error: ServiceError) -> bool:
    """Whether nothing was done for it."""
    return not followed.was_admitted and isinstance(error, Overloaded | LimitExceeded | DeadlineExceeded)


def _received_at(each: Followed | _Ended) -> float:
    return each.received_at if isinstance(each, _Ended) else each.clock.received_at


def _total_s(each: Followed | _Ended, now: float) -> float:
    return each.total_s if isinstance(each, _Ended) else now - each.clock.received_at
