"""What a planner looks at: the workers with their costs, what runs and waits now, and what is expected. From it follow
the two pools that a choice of roles would make. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from router.candidate import Candidate, Role
from router.pool_plan import LoadForecast
from router.replay import DecodePool, Expected, PrefillPool, blended
from router.step_costs import StepCosts

_ROUNDS = 40  # of a fixed point
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Outlook:
    """`costs` by worker's name. `running`: tokens of context and tokens still to come, of each sequence that decodes.
    `fixed` workers keep their roles. `flip_s`: how long a worker does nothing while its role changes."""

    workers: Sequence[Candidate]
    costs: Mapping[str, StepCosts]
    expected: Sequence[Expected]
    forecast: LoadForecast
    running: Sequence[tuple[float, float]]
    num_waiting: int  # at the router
    fixed: Collection[str]
    flip_s: float
    max_step_tokens: int
    block_size: int
    _prompts_s: dict[StepCosts, Sequence[float]] = field(default_factory=dict, init=False)  # once for equal workers

    @property
    def num_prefill(self) -> int:
        return sum(worker.role is Role.PREFILL for worker in self.workers)

    def _others(self, costs: StepCosts, num_workers: int, most: float) -> list[tuple[float, float]]:
        """Sequences that run in the long run, beside those that do now: a replay is too short to gather them.

        By Little's law there are as many as come while one stays, and each stays the longer the more there are.
        """
        forecast = self.forecast
        num_context = forecast.num_prompt_tokens + forecast.num_output_tokens / 2
        number = 1.0
        for _ in range(_ROUNDS):
            step_s = costs.decode_s(max(1.0, number / num_workers), number / num_workers * num_context)
            number = min(most, forecast.requests_per_s * forecast.num_output_tokens * step_s / costs.tokens_per_step)
        lengths = sorted(each.num_output_tokens for each in self.expected)
        return [(num_context, num_left) for num_left in _left(round(number) - len(self.running), lengths)]

    def pools(self, roles: Mapping[str, Role]) -> tuple[PrefillPool, DecodePool]:
        """As they would be right after these workers have got these roles, with what waits and runs now."""
        wanted = {worker: roles.get(worker.id.name, worker.role) for worker in self.workers}
        prefill = [worker for worker, role in wanted.items() if role is Role.PREFILL]
        decode = [worker for worker, role in wanted.items() if role is Role.DECODE]
        return self._prefill_pool(prefill), self._decode_pool(decode)

    def _prefill_pool(self, workers: Sequence[Candidate]) -> PrefillPool:
        forecast = self.forecast
        num_uncached = forecast.num_prompt_tokens * (1 - forecast.hit_rate)
        num_from_router = self.num_waiting * num_uncached / len(workers)
        prompts_s, free_at_s = [], []
        for worker in workers:
            is_new, costs = worker.role is not Role.PREFILL, self.costs[worker.id.name]
            token_s = costs.prompt_s(max(1, round(num_uncached)), self.max_step_tokens) / max(1.0, num_uncached)
            num_queued = num_from_router + (0 if is_new else worker.num_queued_tokens)
            free_at_s.append(num_queued * token_s + is_new * self.flip_s)
            prompts_s.append(self._prompts_of(costs))
        return PrefillPool(prompts_s, free_at_s)

    def _prompts_of(self, costs: StepCosts) -> Sequence[float]:
        known = self._prompts_s.get(costs)
        if known is None:
            known = [
                costs.prompt_s(each.num_prompt_tokens, self.max_step_tokens, each.num_cached_tokens)
                for each in self.expected
            ]
            self._prompts_s[costs] = known
        return known

    def _decode_pool(self, workers: Sequence[Candidate]) -> DecodePool:
        num_context = self.forecast.num_prompt_tokens + self.forecast.num_output_tokens / 2
        costs = blended([self.costs[worker.id.name] for worker in workers], num_context)
        by_blocks = sum(worker.num_blocks * self.block_size / max(1.0, num_context) for worker in workers)
        limits = [worker.max_running for worker in workers]
        most = max(1.0, min(by_blocks, sum(limits) if all(limits) else math.inf))
        return DecodePool(
            costs,
            len(workers),
            most,
            [*self.running, *self._others(costs, len(workers), most)],
            [self.flip_s for worker in workers if worker.role is not Role.DECODE],
        )


def _left(number: int, lengths: Sequence[int]) -> list[float]:
    """Tokens still to come: who is met running is rather a long one, and anywhere in it (the inspection paradox)."""
    total, left, index, passed = sum(lengths), [], 0, 0
    for place in range(number):
        while index + 1 < len(lengths) and passed + lengths[index] < (place + 0.5) / number * total:
            passed += lengths[index]
            index += 1
        left.append(max(1.0, lengths[index] * (1 - place * _GOLDEN % 1.0)))
    return left
