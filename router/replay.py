"""What two pools would make of requests that are expected: their queues, played in a millisecond or two. Pure.

Coarser than `router.simulator`, so that a planner can try every ratio each time it is asked: prompts go where they are
done first, one by one; sequences that decode share all decode workers evenly, and each gets its tokens at the pace that
a batch of that size has (processor sharing); a prompt begins when a sequence has ended, where as many decode as can.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from router.outcomes import Slo
from router.step_costs import StepCosts

MISSED = 0.2  # what a request that misses an SLO is worth at most
_NEVER = float("inf")
_LEAST_STEP_S = 1e-9


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that is expected, and how it is expected to turn out."""

    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    slo_class: str = ""


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """By worker: how long it takes for each request's prompt, and when it is free."""

    prompts_s: Sequence[Sequence[float]]
    free_at_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class DecodePool:
    """`costs` of each, or what stands for all (`blended`). `most_sequences` of all together, by blocks and by what they
    may run. `running`: tokens of context and tokens that are still to come, of each sequence that is there already."""

    costs: StepCosts
    num_workers: int
    most_sequences: float
    running: Sequence[tuple[float, float]] = ()
    joins_at_s: Sequence[float] = ()  # of those among the workers that are not there yet


@dataclass(frozen=True, slots=True)
class Played:
    """By request, in the order given; infinite for one that was refused. `tpots_s` is 0 where there was one token."""

    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]

    def scores(self, slos: Iterable[Slo]) -> list[float]:
        """`slos` by request. 1 for one that meets both of its own; another has the more of `MISSED` the less it misses
        them by: where all do, a ratio that makes up for it sooner is still the better one."""
        rows = zip(self.ttfts_s, self.tpots_s, slos, strict=True)
        return [
            1.0
            if ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s
            else MISSED * min(1.0, slo.ttft_s / ttft_s) * min(1.0, slo.tpot_s / max(tpot_s, slo.tpot_s))
            for ttft_s, tpot_s, slo in rows
        ]


def blended(costs: Sequence[StepCosts], num_context_tokens: float) -> StepCosts:
    """One that stands for each of several decode workers, with so much context a sequence.

    Placement evens their paces out: a step takes T everywhere, with (T - base) / slope sequences on each. So together
    they are as many workers with the harmonic mean of the slopes, and the mean of the bases weighted by 1 / slope.
    """
    first = costs[0]
    if all(each == first for each in costs):
        return first
    slopes = [_slope(each, num_context_tokens) for each in costs]
    total = sum(1 / slope for slope in slopes)
    slope = len(costs) / total

    def mean(of: Callable[[StepCosts], float]) -> float:
        return sum(of(each) / each_slope for each, each_slope in zip(costs, slopes, strict=True)) / total

    sequence_share = mean(lambda each: each.decode_sequence_s / _slope(each, num_context_tokens))
    return replace(
        first,
        decode_base_s=mean(lambda each: each.decode_base_s),
        decode_sequence_s=slope * sequence_share,
        decode_context_token_s=slope * (1 - sequence_share) / max(num_context_tokens, 1.0),
        decode_expert_s=mean(lambda each: each.decode_expert_s),
        tokens_per_step=mean(lambda each: each.tokens_per_step),
    )


def _slope(costs: StepCosts, num_context_tokens: float) -> float:
    """Seconds that a further sequence adds to a step."""
    return max(costs.decode_sequence_s + num_context_tokens * costs.decode_context_token_s, _LEAST_STEP_S)


def replay(
    requests: Sequence[Expected], prefill: PrefillPool, decode: DecodePool, most_wait_s: float = _NEVER
) -> Played:
    """`requests` in the order of their times, from 0 on. One that would wait longer than `most_wait_s` is refused."""
    return _Replay(requests, prefill, decode, most_wait_s).run()


class _Replay:
    def __init__(
        self, requests: Sequence[Expected], prefill: PrefillPool, decode: DecodePool, most_wait_s: float
    ) -> None:
        self._requests = requests
        self._prompts_s = prefill.prompts_s
        self._most_wait_s = most_wait_s
        self._free = [(at_s, index) for index, at_s in enumerate(prefill.free_at_s)]
        heapq.heapify(self._free)
        self._is_uniform = all(each is prefill.prompts_s[0] for each in prefill.prompts_s)
        self._waiting: deque[int] = deque()  # for a place among those that decode
        self._ready: list[tuple[float, int]] = []  # prompts that are computed then
        self._sharing = _Sharing(decode)
        self._num_coming = 0
        self._ttfts_s, self._tpots_s = [_NEVER] * len(requests), [_NEVER] * len(requests)

    def run(self) -> Played:
        """What happens next is an arrival, a prompt that is computed, or a sequence that ends."""
        sharing, ready, requests, index = self._sharing, self._ready, self._requests, 0
        while True:
            arrives_at = requests[index].at_s if index < len(requests) else _NEVER
            ready_at = ready[0][0] if ready else _NEVER
            ends_at = sharing.next_end_s
            if ends_at <= arrives_at and ends_at <= ready_at:
                if ends_at == _NEVER:
                    return Played(self._ttfts_s, self._tpots_s)
                self._ended(*sharing.end())
            elif ready_at <= arrives_at:
                self._decode(*heapq.heappop(ready))
            else:
                self._arrived(index, arrives_at)
                index += 1

    def _arrived(self, index: int, now: float) -> None:
        if self._has_place():
            self._compute(index, now)
        else:
            self._waiting.append(index)

    def _has_place(self) -> bool:
        return len(self._sharing) + self._num_coming < self._sharing.most_sequences

    def _compute(self, index: int, now: float) -> None:
        """Where it is done first; where all are alike that is who is free first."""
        at_s, free, prompts_s = self._requests[index].at_s, self._free, self._prompts_s
        if self._is_uniform:
            at, worker = free[0]
        else:
            _, at, worker = min((max(at, now) + prompts_s[worker][index], at, worker) for at, worker in free)
        begins_at = max(at, now)
        if begins_at - at_s > self._most_wait_s:
            return
        ready_at = begins_at + prompts_s[worker][index]
        if self._is_uniform:
            heapq.heapreplace(free, (ready_at, worker))
        else:
            free.remove((at, worker))
            heapq.heappush(free, (ready_at, worker))
        self._ttfts_s[index] = ready_at - at_s
        self._num_coming += 1
        heapq.heappush(self._ready, (ready_at, index))

    def _decode(self, now: float, index: int) -> None:
        request = self._requests[index]
        self._num_coming -= 1
        if request.num_output_tokens < 2:
            self._tpots_s[index] = 0.0
            self._next_one(now)
        else:
            self._sharing.begin(now, index, request.num_prompt_tokens, request.num_output_tokens - 1)

    def _ended(self, now: float, index: int, began_at: float) -> None:
        if index >= 0:
            self._tpots_s[index] = (now - began_at) / (self._requests[index].num_output_tokens - 1)
        self._next_one(now)

    def _next_one(self, now: float) -> None:
        while self._waiting and self._has_place():
            self._compute(self._waiting.popleft(), now)


class _Sharing:
    """Sequences that decode: in a second each gets so many tokens, the fewer the more there are.

    `_tokens` counts what each of them has got since the beginning, if it was there all the time.
    """

    def __init__(self, pool: DecodePool) -> None:
        self._pool = pool
        self.most_sequences = pool.most_sequences
        self._ends: list[tuple[float, int, float, float]] = []  # at how many tokens; which; since when; its context
        self._now = self._tokens = self._context = 0.0
        for context, num_left in pool.running:
            self._ends.append((max(1.0, num_left), -1, 0.0, context))
            self._context += context
        heapq.heapify(self._ends)
        self._find_pace()

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def next_end_s(self) -> float:
        return self._now + (self._ends[0][0] - self._tokens) / self._per_s if self._ends else _NEVER

    def begin(self, now: float, index: int, num_context_tokens: int, num_tokens: int) -> None:
        self._pass(now)
        context = num_context_tokens + num_tokens / 2
        heapq.heappush(self._ends, (self._tokens + num_tokens, index, now, context))
        self._context += context
        self._find_pace()

    def end(self) -> tuple[float, int, float]:
        """When the next one ends, which it is, and since when it was there."""
        now = self.next_end_s
        tokens, index, since, context = heapq.heappop(self._ends)
        self._now, self._tokens = now, tokens
        self._context -= context
        self._find_pace()
        return now, index, since

    def _pass(self, now: float) -> None:
        self._tokens += max(0.0, now - self._now) * self._per_s
        self._now = max(now, self._now)

    def _find_pace(self) -> None:
        pool, costs = self._pool, self._pool.costs
        num_workers = max(1, pool.num_workers - sum(at_s > self._now for at_s in pool.joins_at_s))
        step_s = costs.decode_s(max(1.0, len(self._ends) / num_workers), self._context / num_workers)
        self._per_s = costs.tokens_per_step / max(step_s, _LEAST_STEP_S)
