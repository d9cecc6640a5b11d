"""How many workers are to prefill and how many to decode: asked again and again, with what was observed since. Pure.

Every ratio is tried on the requests that are expected (`router.replay`), from the queues as they are now, and under
more load than is expected: it is worth the share of requests that meet both SLOs (where there are classes of
them, as `router.class_weights` has it). Rate matching with queueing, bursts and long tails follows from that by itself.
Roles change only where the same requests tell two ratios apart beyond chance, and by more than the change costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.candidate import Candidate, Role
from router.class_weights import ClassWeights
from router.load_watch import LoadWatch
from router.mean_worths import MeanWorths
from router.observation import LearntTimes, Observation
from router.outcomes import Slo
from router.outlook import Outlook
from router.pool_plan import PoolPlan, Proposal, RatioForecast
from router.replay import replay
from router.role_choice import choose_roles
from router.slo_classes import DEFAULT

_LOADS = ((1.0, 0.6), (1.3, 0.25), (1.8, 0.15))  # times what is expected, and how much that counts
_HOPELESS = 0.2  # so much less attainment than another ratio under the first load: the others are not tried
_MOST_RATIOS = 24  # that are tried each time
_HARDLY = 0.01  # a gain under the load that is expected
_LEAST_ANSWERS = 8  # to plan for
_AGAIN = 2.5  # times the gain, to change roles again
_EARLY_S = 30.0  # from the first request on: long answers are not known, and only what is clear is changed
_LEAST_CONFIDENCE = 0.2  # in the step times, to plan with them
_STEP_TOKENS = 2048  # where no worker says
_SHARE = 0.9  # of the times that a ratio is said to give


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """`flip_s`: how long a worker does nothing while its role changes. `ahead_s`: how far ahead the load is forecast.

    A change is made at once where it gains `clear_gain` of what is to come, and with `least_gain` only after it
    has been proposed `num_confirmations` times in a row, or with `reserve_gain` if it pays only under more load than is
    expected; `least_sigmas` is how far beyond chance it has to be. After a change the next one waits for `cool_down_s`,
    and for `settle_s` where it is urgent. `slo` is the default class's; `classes` has the others', by name.
    """

    slo: Slo
    flip_s: float = 0.5
    ahead_s: float = 10.0
    settle_s: float = 5.0
    cool_down_s: float = 60.0
    least_gain: float = 0.03
    reserve_gain: float = 0.1
    clear_gain: float = 0.1
    least_sigmas: float = 3.0
    num_confirmations: int = 3
    most_wait_s: float = math.inf  # at the router: who would wait longer is refused
    classes: Mapping[str, Slo] = field(default_factory=dict)


@dataclass(slots=True)
class _Option:
    """A way to share the workers: the roles that would change. `scores`: by load and request, as `Played` has them.
    `worth`: what `weights` make of them, as the mean over all loads."""

    roles: Mapping[str, Role]
    forecast: RatioForecast
    scores: list[list[float]]
    weights: ClassWeights

    @property
    def worth(self) -> float:
        worth = self.weights.worth
        return sum(weight * worth(scores) for (_, weight), scores in zip(_LOADS, self.scores, strict=False))

    @property
    def kept(self) -> float:
        """How well promises are kept under the load that is expected: by all requests, and by classes."""
        return self.forecast.attainment + self.weights.kept(self.scores[0])

    @property
    def told(self) -> str:
        """By class, where there are several."""
        of_each = [f"{name or DEFAULT} {share:.0%}" for name, share in self.forecast.classes.items()]
        return f"{self.forecast.attainment:.0%}" + (f" ({', '.join(of_each)})" if of_each else "")


class Planner:
    """`propose` remembers what it has seen."""

    def __init__(self, policy: PlanPolicy, seed: int = 0) -> None:
        self._policy = policy
        self._watch = LoadWatch(seed)
        self._plan: PoolPlan | None = None
        self._flipped_at_s = -math.inf
        self._wanted: tuple[int, int] | None = None  # sizes that were proposed last, and how often in a row
        self._num_wanted = 0
        self._confidence = 0.0
        self._worths = MeanWorths()

    def propose(self, observation: Observation) -> Proposal:
        self._watch.observe(observation)
        workers = [worker for worker in observation.workers if worker.is_ready and worker.role is not Role.BOTH]
        num_prefill = sum(worker.role is Role.PREFILL for worker in workers)
        if not 0 < num_prefill < len(workers):
            return self._keep(num_prefill, len(workers), "as it is: a role has no worker that is ready")
        if self._watch.is_idle or self._watch.num_answers < _LEAST_ANSWERS:
            return self._keep(num_prefill, len(workers), "as it is: too little has come lately to plan for")
        models = observation.models
        self._confidence = 0.0 if models is None else min(_confidence(models, worker) for worker in workers)
        if models is None or self._confidence < _LEAST_CONFIDENCE:
            return self._keep(num_prefill, len(workers), "as it is: it is not known yet how long steps take")
        outlook = self._outlook(workers, observation, models)
        options = self._options(outlook)
        as_is = next(option for option in options if not option.roles)
        best, gain = self._best(as_is, options, observation.now_s)
        chosen, reason = self._chosen(as_is, best, gain, observation.now_s)
        if chosen.roles:
            self._flipped_at_s = observation.now_s
        plan = self._planned(chosen.forecast, reason)
        gain = best.forecast.goodput - as_is.forecast.goodput
        return Proposal(plan, chosen.roles, outlook.forecast, tuple(option.forecast for option in options), gain)

    def _keep(self, num_prefill: int, num_workers: int, reason: str) -> Proposal:
        sizes = RatioForecast(num_prefill, num_workers - num_prefill, 0.0, 0.0, 0.0, 1.0)
        return Proposal(self._planned(sizes, reason))

    def _planned(self, ratio: RatioForecast, reason: str) -> PoolPlan:
        """With a new epoch only where the sizes are others."""
        sizes, before = (ratio.num_prefill, ratio.num_decode), self._plan
        is_new = before is None or (before.num_prefill, before.num_decode) != sizes
        epoch = (0 if before is None else before.epoch) + is_new
        self._plan = PoolPlan(epoch, *sizes, reason, ratio.goodput, self._confidence)
        return self._plan

    def _outlook(self, workers: Sequence[Candidate], observation: Observation, models: LearntTimes) -> Outlook:
        policy, watch = self._policy, self._watch
        per_s = watch.requests_per_s(policy.ahead_s)
        expected = watch.expected(per_s)
        return Outlook(
            workers=workers,
            costs={worker.id.name: models.costs_of(worker.id) for worker in workers},
            expected=expected,
            forecast=watch.forecast(per_s, expected),
            running=watch.running(),
            num_waiting=observation.num_waiting,
            fixed=observation.fixed,
            flip_s=policy.flip_s,
            max_step_tokens=_step_tokens(workers),
            block_size=observation.block_size,
        )

    def _options(self, outlook: Outlook) -> list[_Option]:
        """By number of prefill workers, the one without changes among them."""
        choices: list[Mapping[str, Role]] = []
        for num_prefill in _ratios(len(outlook.workers), outlook.num_prefill):
            if num_prefill == outlook.num_prefill:
                choices.append({})
            roles = choose_roles(outlook, num_prefill)
            if roles:
                choices.append(roles)
        weights = ClassWeights(self._policy.slo, self._policy.classes, outlook.expected)
        options = [self._option(outlook, roles, weights) for roles in choices]
        as_is = next(option for option in options if not option.roles)
        least = max(option.kept for option in options) - _HOPELESS * weights.scale(as_is.scores[0])
        for option in options:
            if option.kept >= least:
                self._load_more(outlook, option)
        return options

    def _option(self, outlook: Outlook, roles: Mapping[str, Role], weights: ClassWeights) -> _Option:
        """Under the load that is expected."""
        prefill, decode = outlook.pools(roles)
        played = replay(outlook.expected, prefill, decode, self._policy.most_wait_s)
        scores = played.scores(weights.slos)
        attainment = scores.count(1.0) / len(scores)
        ratio = RatioForecast(
            num_prefill=len(prefill.free_at_s),
            num_decode=decode.num_workers,
            ttft_s=_at(_SHARE, played.ttfts_s),
            tpot_s=_at(_SHARE, played.tpots_s),
            goodput=attainment * outlook.forecast.requests_per_s,
            attainment=attainment,
            classes=weights.attainments(scores) if weights.has_several else {},
        )
        return _Option(roles, ratio, [scores], weights)

    def _load_more(self, outlook: Outlook, option: _Option) -> None:
        prefill, decode = outlook.pools(option.roles)
        for load, _ in _LOADS[1:]:
            closer = [replace(request, at_s=request.at_s / load) for request in outlook.expected]
            played = replay(closer, prefill, decode, self._policy.most_wait_s)
            option.scores.append(played.scores(option.weights.slos))

    def _best(self, as_is: _Option, options: Sequence[_Option], now: float) -> tuple[_Option, float]:
        """The one that is best now if it is clearly so, or else the one that has been best of late; and its gain."""
        worths = self._worths.add(
            now, self._watch.steady_s, {option.forecast.num_prefill: option.worth for option in options}
        )
        best = max(options, key=lambda option: (option.worth, -len(option.roles)))
        scale = as_is.weights.scale(as_is.scores[0])
        if self._is_clear(as_is, best, now):
            return best, (best.worth - as_is.worth) / scale
        best = max(options, key=lambda option: (worths[option.forecast.num_prefill], -len(option.roles)))
        return best, (worths[best.forecast.num_prefill] - worths[as_is.forecast.num_prefill]) / scale

    def _is_clear(self, as_is: _Option, best: _Option, now: float) -> bool:
        """Much better already under the load that is expected. Where nothing has changed since roles last did, what
        seems so is mostly chance."""
        has_changed = min(self._watch.steady_s, self._watch.past_s) < now - self._flipped_at_s
        least = self._policy.clear_gain * (1.0 if has_changed else _AGAIN)
        return _gain_now(as_is, best) >= least

    def _chosen(self, as_is: _Option, best: _Option, gain: float, now: float) -> tuple[_Option, str]:
        """Whether to change, and why (not)."""
        policy, gain_now, is_clear = self._policy, _gain_now(as_is, best), self._is_clear(as_is, best, now)
        least_gain = policy.least_gain if gain_now >= _HARDLY else policy.reserve_gain
        sizes = best.forecast.num_prefill, best.forecast.num_decode
        self._num_wanted = self._num_wanted + 1 if sizes == self._wanted else 1
        self._wanted = sizes
        told = f"{best.told} within the SLOs, {as_is.told} as it is"
        to = f"{sizes[0]} prefill and {sizes[1]} decode"
        if not best.roles or gain <= 0:
            return as_is, f"as it is: no other ratio is better; {as_is.told} within the SLOs"
        if not _is_beyond_chance(as_is, best, policy.least_sigmas) or gain < least_gain:
            return as_is, f"as it is: {to} would hardly be better; {told}"
        if now - self._flipped_at_s < (policy.settle_s if is_clear else policy.cool_down_s):
            return as_is, f"as it is: roles changed {now - self._flipped_at_s:.0f} s ago; {to} would be better: {told}"
        is_early = self._watch.past_s < _EARLY_S
        if not is_clear and (is_early or self._num_wanted < policy.num_confirmations):
            return as_is, f"as it is, until {to} has been found better {policy.num_confirmations} times; {told}"
        return best, f"{to}: {told}"


def _gain_now(as_is: _Option, best: _Option) -> float:
    """Under the load that is expected."""
    weights, before, after = as_is.weights, as_is.scores[0], best.scores[0]
    return (weights.worth(after) - weights.worth(before)) / weights.scale(before)


def _step_tokens(workers: Sequence[Candidate]) -> int:
    """Of the least that one of them computes in a step."""
    told = [worker.prefill_times.max_step_tokens for worker in workers if worker.prefill_times is not None]
    return min(told, default=_STEP_TOKENS)


def _confidence(models: LearntTimes, worker: Candidate) -> float:
    """In what it would do after a change as well."""
    return min(models.confidences_of(worker.id))


def _is_beyond_chance(as_is: _Option, best: _Option, least_sigmas: float) -> bool:
    """A paired test: how differently the same requests fare, against how much that varies among them."""
    pairs = zip(as_is.scores, best.scores, strict=False)
    gains = [gain for old, new in pairs for gain in as_is.weights.gains(old, new)]
    return sum(gains) > least_sigmas * math.sqrt(sum(gain * gain for gain in gains))


def _ratios(num_workers: int, num_now: int) -> list[int]:
    """Numbers of prefill workers: all, or of many about so many, more closely around the one there is."""
    every = range(1, num_workers)
    if len(every) <= _MOST_RATIOS:
        return list(every)
    stride = math.ceil(2 * num_workers / _MOST_RATIOS)
    near = range(max(1, num_now - _MOST_RATIOS // 4), min(num_workers, num_now + _MOST_RATIOS // 4 + 1))
    return sorted({*every[::stride], *near})


def _at(share: float, values: Sequence[float]) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
