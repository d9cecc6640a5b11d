"""What planners are compared with: the rules of two others, as published, on the simulator's seam.

Both are told the true step times of the workers, and requests are placed as ours are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from router.candidate import Candidate, Role
from router.observation import Answered, Arrival, Observation
from router.outcomes import Slo
from router.step_costs import StepCosts


class ThroughputPlanner:
    """NVIDIA Dynamo's planner in throughput mode: each interval so many workers as the mean request of the last one
    needs, prefill by its time alone, decode by the largest batch within the SLO; scaled to the workers that there are.
    """

    def __init__(self, costs: StepCosts, slo: Slo, max_step_tokens: int, most_tokens: int, max_running: int) -> None:
        self._costs = costs
        self._slo = slo
        self._max_step_tokens = max_step_tokens
        self._most_tokens = most_tokens
        self._max_running = max_running
        self._last_s = 0.0

    def __call__(self, observation: Observation) -> Mapping[str, Role]:
        past_s, self._last_s = observation.now_s - self._last_s, observation.now_s
        if not observation.arrived or not observation.answered:
            return {}
        per_s = len(observation.arrived) / past_s
        need_prefill, need_decode = self._needs(per_s, observation.arrived, observation.answered)
        number = len(observation.workers)
        if need_prefill + need_decode > number:
            share = need_prefill * number / (need_prefill + need_decode)
            num_prefill = max(1, min(number - 1, math.floor(share)))
        else:  # what is left over goes where it is needed most, as there is nowhere else for it
            num_prefill = max(1, min(number - 1, round(need_prefill * number / (need_prefill + need_decode))))
        return resized(observation.workers, num_prefill)

    def _needs(self, per_s: float, arrived: Sequence[Arrival], answered: Sequence[Answered]) -> tuple[int, int]:
        num_prompt = fmean(arrival.num_prompt_tokens for arrival in arrived)
        num_output = fmean(answer.num_output_tokens for answer in answered)
        hit_rate = sum(a.num_cached_tokens for a in answered) / sum(a.num_prompt_tokens for a in answered)
        prompt_s = self._costs.prompt_s(max(1, round(num_prompt * (1 - hit_rate))), self._max_step_tokens)
        context = num_prompt + num_output / 2
        most = max(1, min(int(self._most_tokens / context), self._max_running))
        within = [n for n in range(1, most + 1) if self._costs.decode_s(n, n * context) <= self._slo.tpot_s]
        batch = max(within, default=1)
        decode_per_s = batch / (num_output * self._costs.decode_s(batch, batch * context))
        return max(1, math.ceil(per_s * prompt_s)), max(1, math.ceil(per_s / decode_per_s))


class FlipRule:
    """Arrow's rule, asked many times a second rather than with each request: a worker prefills too while prompts wait
    longer than the SLO allows and decode has slack; one that prefills goes over when no decode worker meets the SLO;
    one that has nothing to decode goes back.
    """

    def __init__(self, costs: StepCosts, slo: Slo, max_step_tokens: int) -> None:
        self._costs = costs
        self._slo = slo
        self._token_s = costs.prompt_s(max_step_tokens, max_step_tokens) / max_step_tokens
        self._context = 1000.0

    def __call__(self, observation: Observation) -> Mapping[str, Role]:
        if observation.running:
            self._context = fmean(each.num_prompt_tokens + each.num_output_tokens for each in observation.running)
        prefill = [worker for worker in observation.workers if Role.PREFILL in worker.role]
        decode = [worker for worker in observation.workers if Role.DECODE in worker.role]
        slo, num_prefill, num_decode = self._slo, len(prefill), len(decode)
        back = {w.id.name: Role.DECODE for w in decode if w.role is Role.BOTH and not w.num_queued_tokens}
        waits_s = [self._token_s * worker.num_queued_tokens for worker in prefill]
        wait_s = min(waits_s) + self._token_s * observation.num_waiting * self._context
        least = min(decode, key=lambda worker: worker.num_active)
        if wait_s > slo.ttft_s and self._tpot_s(least) < slo.tpot_s * (num_decode - 1) / num_decode:
            if least.role is Role.DECODE:
                return {**back, least.id.name: Role.BOTH}
            return {}
        has_slack = fmean(waits_s) < slo.ttft_s * (num_prefill - 1) / num_prefill or num_decode < num_prefill
        pure = [worker for worker in prefill if worker.role is Role.PREFILL]
        if all(self._tpot_s(worker) > slo.tpot_s for worker in decode) and has_slack and len(pure) > 1:
            return {**back, min(pure, key=lambda worker: worker.num_queued_tokens).id.name: Role.DECODE}
        idle = [worker for worker in decode if worker.role is Role.DECODE and not worker.num_active]
        if idle and num_decode > 1:
            return {**back, idle[0].id.name: Role.PREFILL}
        return back

    def _tpot_s(self, worker: Candidate) -> float:
        number = worker.num_active + 1
        return self._costs.decode_s(number, number * self._context)


def resized(workers: Sequence[Candidate], num_prefill: int) -> dict[str, Role]:
    """The roles that change for so many prefill workers; those with least to do."""
    prefill = sorted((w for w in workers if w.role is Role.PREFILL), key=lambda w: w.num_queued_tokens)
    decode = sorted((w for w in workers if w.role is Role.DECODE), key=lambda w: w.num_active)
    if num_prefill > len(prefill):
        return {worker.id.name: Role.PREFILL for worker in decode[: num_prefill - len(prefill)]}
    return {worker.id.name: Role.DECODE for worker in prefill[: len(prefill) - num_prefill]}
