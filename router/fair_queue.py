"""Who goes next among requests that wait, and how many may wait. Pure: `now` is passed in, nothing is awaited.

By level first, which is a request's priority and rises while it waits; then by tenant, so that all get equal shares of
tokens; then by what is due first. docs/admission.md says why in this order.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

NUM_LEVELS = 10
_GREED = 4  # a flow takes at most so many times the room that it leaves free


@dataclass(slots=True, eq=False)
class Waiting:
    """One request that waits; times are in seconds of one clock. `num_tokens`: what it is expected to take, in all."""

    tenant: str
    priority: int
    num_tokens: int
    entered_at: float
    deadline_at: float | None = None
    num_passed: int = 0  # times that others went first because it did not fit
    level: int = 0
    rank: tuple[float, int] = (0.0, 0)  # among its tenant's on its level: when it is due, and which came first

    @property
    def flow(self) -> tuple[str, int]:
        return self.tenant, self.priority


@dataclass(frozen=True, slots=True)
class Charge:
    """What a tenant was charged for one that was served."""

    tenant: str
    level: int
    num_tokens: int


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`age_s`: after so long a request rises by a level. `patience_s`: what has no deadline is due after so long, and
    what has a later one as well, so that whoever comes later than that goes after it."""

    max_requests: int = 1024
    max_tokens: int = 2_000_000
    age_s: float = 4.0
    patience_s: float = 20.0


@dataclass(slots=True)
class Level(Generic[W]):
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants, in tokens: the virtual token counter
    of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

    A tenant's tag is what it was served. Who comes while others wait starts at `time`, the tag of who went last: it has
    nothing to catch up with, and has lost nothing. While two tenants both wait, neither is served more than the other
    by more than one request of each.
    """

    lines: dict[str, list[W]] = field(default_factory=dict)  # by tenant, by rank
    num_tokens: Counter[str] = field(default_factory=Counter)  # of each line
    tags: dict[str, float] = field(default_factory=dict)
    time: float = 0.0

    def push(self, waiting: W) -> None:
        if not self.lines:  # nobody competes with whom was served before
            self.time = max(self.tags.values(), default=self.time)
            self.tags.clear()
        line = self.lines.setdefault(waiting.tenant, [])
        if not line:
            self.tags[waiting.tenant] = self.start_of(waiting.tenant)
        bisect.insort(line, waiting, key=_rank)
        self.num_tokens[waiting.tenant] += waiting.num_tokens

    def remove(self, waiting: W) -> None:
        line = self.lines[waiting.tenant]
        del line[bisect.bisect_left(line, waiting.rank, key=_rank)]
        self.num_tokens[waiting.tenant] -= waiting.num_tokens
        if not line:
            del self.lines[waiting.tenant], self.num_tokens[waiting.tenant]

    def start_of(self, tenant: str) -> float:
        return max(self.time, self.tags.get(tenant, 0.0))

    def charge(self, tenant: str, num_tokens: int) -> None:
        self.tags[tenant] = self.start_of(tenant) + num_tokens

    def correct(self, tenant: str, num_tokens: int) -> None:
        """A tenant was served so much more, or less, than it was charged for."""
        if tenant in self.tags:
            self.tags[tenant] = max(self.time, self.tags[tenant] + num_tokens)

    def in_order(self) -> Iterator[W]:
        """As they would go if every one of them went."""
        order = [(self.tags[tenant], line[0].rank, 0, tenant) for tenant, line in self.lines.items()]
        heapq.heapify(order)
        while order:
            tag, _, index, tenant = order[0]
            line = self.lines[tenant]
            waiting = line[index]
            if index + 1 < len(line):
                heapq.heapreplace(order, (tag + waiting.num_tokens, line[index + 1].rank, index + 1, tenant))
            else:
                heapq.heappop(order)
            yield waiting

    def tokens_before(self, waiting: W) -> int:
        """What goes first of those that wait on this level, to within one request of each tenant."""
        line = self.lines[waiting.tenant]
        after = line[bisect.bisect_left(line, waiting.rank, key=_rank) :]  # it is mostly the last one
        own = self.num_tokens[waiting.tenant] - sum(each.num_tokens for each in after)
        start = self.tags[waiting.tenant] + own
        others = [(self.tags[tenant], tokens) for tenant, tokens in self.num_tokens.items() if tenant != waiting.tenant]
        return own + sum(min(tokens, max(0, round(start - tag))) for tag, tokens in others)


class FairQueue(Generic[W]):
    """Holds `Waiting`s of one kind. `push` them if there is room; each leaves once, by `serve` or by `remove`."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._levels: list[Level[W]] = [Level() for _ in range(NUM_LEVELS)]
        self._rising: list[tuple[float, int, W]] = []  # by when; those that have left are passed over
        self._waiting: set[W] = set()
        self._numbers = count()
        self._flow_requests: Counter[tuple[str, int]] = Counter()
        self._flow_tokens: Counter[tuple[str, int]] = Counter()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: object) -> bool:
        return waiting in self._waiting

    def has_room(self, tenant: str, priority: int, num_tokens: int = 0) -> bool:
        """Whether one more may wait. No flow, a tenant's requests of one priority, may take all the room: it may have
        `_GREED` times what is left (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 1998).
        A request larger than all the room may wait alone.
        """
        limits, flow = self._limits, (tenant, priority)
        if self._flow_requests[flow] >= _GREED * (limits.max_requests - len(self)):
            return False
        free = limits.max_tokens - self.num_tokens
        return not self._waiting or num_tokens <= min(free, _GREED * free - self._flow_tokens[flow])

    def push(self, waiting: W, now: float) -> None:
        """One that has waited before, and comes back, has its old place."""
        limits = self._limits
        waiting.level = min(NUM_LEVELS - 1, waiting.priority + int((now - waiting.entered_at) / limits.age_s))
        due_at = waiting.entered_at + limits.patience_s
        if waiting.deadline_at is not None:
            due_at = min(due_at, waiting.deadline_at)
        waiting.rank = (due_at, next(self._numbers))
        self._waiting.add(waiting)
        self._count(waiting, 1)
        self._levels[waiting.level].push(waiting)
        self._note_rise(waiting)

    def remove(self, waiting: W) -> None:
        """It leaves without having been served."""
        self._waiting.remove(waiting)
        self._count(waiting, -1)
        self._levels[waiting.level].remove(waiting)
        if not self._waiting:
            self._rising.clear()

    def serve(self, waiting: W) -> Charge:
        """It goes."""
        level = self._levels[waiting.level]
        level.time = max(level.time, level.tags[waiting.tenant])
        level.charge(waiting.tenant, waiting.num_tokens)
        self.remove(waiting)
        return Charge(waiting.tenant, waiting.level, waiting.num_tokens)

    def correct(self, charge: Charge, num_tokens: int) -> None:
        """One that was served took `num_tokens` in all, rather than what was expected."""
        self._levels[charge.level].correct(charge.tenant, num_tokens - charge.num_tokens)

    def in_order(self, now: float) -> Iterator[W]:
        """As they would go if every one of them went; ends where the queue is changed."""
        self._rise(now)
        for level in reversed(self._levels):
            yield from level.in_order()

    def tokens_before(self, waiting: W, now: float) -> int:
        """What goes before it if nothing else comes, to within one request of each tenant."""
        self._rise(now)
        higher = (level.num_tokens.total() for level in self._levels[waiting.level + 1 :])
        return sum(higher) + self._levels[waiting.level].tokens_before(waiting)

    def counts(self) -> list[tuple[int, int]]:
        """Requests and tokens that wait, by priority."""
        requests, tokens = [0] * NUM_LEVELS, [0] * NUM_LEVELS
        for (_, priority), number in list(self._flow_requests.items()):
            requests[priority] += number
        for (_, priority), number in list(self._flow_tokens.items()):
            tokens[priority] += number
        return list(zip(requests, tokens, strict=True))

    def _count(self, waiting: W, sign: int) -> None:
        flow, num_tokens = waiting.flow, sign * waiting.num_tokens
        self.num_tokens += num_tokens
        self._flow_requests[flow] += sign
        self._flow_tokens[flow] += num_tokens
        if self._flow_requests[flow] == 0:
            del self._flow_requests[flow], self._flow_tokens[flow]

    def _note_rise(self, waiting: W) -> None:
        if waiting.level < NUM_LEVELS - 1:
            at = waiting.entered_at + self._limits.age_s * (waiting.level + 1 - waiting.priority)
            heapq.heappush(self._rising, (at, waiting.rank[1], waiting))

    def _rise(self, now: float) -> None:
        while self._rising and self._rising[0][0] <= now:
            _, number, waiting = heapq.heappop(self._rising)
            if waiting in self._waiting and waiting.rank[1] == number:
                self._levels[waiting.level].remove(waiting)
                waiting.level += 1
                self._levels[waiting.level].push(waiting)
                self._note_rise(waiting)


def _rank(waiting: Waiting) -> tuple[float, int]:
    return waiting.rank
