"""What has come and been answered lately, and from it what will come next: how much, how long, how much of it cached.

The rate is forecast by double exponential smoothing (Brown, 1963): two means with different memories, the slower one
lagging further behind a trend, so that their distance is its slope; while it is steady, by a plain mean. Lengths and
gaps are those of the last requests themselves, so that bursts and long tails are forecast as they are; how long answers
become is `router.answer_lengths`, by length of the prompt; how far back it all reaches, `router.steady`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from router.answer_lengths import AnswerLengths
from router.observation import Answered, Arrival, Observation, Running
from router.pool_plan import LoadForecast
from router.replay import Expected
from router.steady import steady_s

_FAST_S, _SLOW_S = 20.0, 120.0  # memories of the two means
_MOST_GROWTH = 1.5  # of the forecast over the faster mean
_STEADY_S = 40.0  # while nothing has changed for so long, the mean of all that time is the forecast
_KEPT = 2000  # requests, and answers
_LEAST_WINDOW, _MOST_WINDOW = 64, 360  # arrivals that stand for those to come
_RUNS = 6  # of these, where more came
_LEAST_EXPECTED = 150  # requests; where fewer came, they are expected several times over
_LEAST_CLASS = 16  # answers: of fewer, those of all lengths of prompts are taken


class LoadWatch:
    """Fed with each observation; deterministic by seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._arrivals: deque[Arrival] = deque(maxlen=_KEPT)
        self._answers: deque[Answered] = deque(maxlen=_KEPT)
        self._running: Sequence[Running] = ()
        self._since = self._steady_s = 0.0
        self._lengths = AnswerClasses((), ())
        self._fast = self._slow = 0.0  # requests a second
        self._began_s: float | None = None
        self._seen_s = 0.0

    def observe(self, observation: Observation) -> None:
        now, arrived = observation.now_s, observation.arrived
        if self._began_s is None:
            self._began_s = self._seen_s = min((arrival.at_s for arrival in arrived), default=now)
        self._count(now, len(arrived))
        self._arrivals.extend(arrived)
        self._answers.extend(observation.answered)
        self._running = observation.running
        if self._arrivals:
            self._look_back()

    def _count(self, now: float, number: int) -> None:
        """Means over what there was so far, while that is less than they remember."""
        past_s, self._seen_s = now - self._seen_s, now
        if past_s <= 0:
            return
        assert self._began_s is not None
        least = min(1.0, past_s / (now - self._began_s))
        fast, slow = (max(-math.expm1(-past_s / memory_s), least) for memory_s in (_FAST_S, _SLOW_S))
        self._fast += fast * (number / past_s - self._fast)
        self._slow += slow * (number / past_s - self._slow)

    @property
    def is_idle(self) -> bool:
        """Nothing has come, or for so long that nothing is to be planned for."""
        return not self._arrivals or self._fast < 1e-3

    @property
    def past_s(self) -> float:
        """Since the first request came."""
        return 0.0 if self._began_s is None else self._seen_s - self._began_s

    @property
    def steady_s(self) -> float:
        """For how long nothing has changed."""
        return self._steady_s

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def requests_per_s(self, ahead_s: float) -> float:
        past_s = min(self._steady_s, self._seen_s - self._arrivals[0].at_s)  # that is known of
        if past_s >= _STEADY_S:
            return sum(arrival.at_s > self._seen_s - past_s for arrival in self._arrivals) / past_s
        slope = (self._fast - self._slow) / (_SLOW_S - _FAST_S)
        forecast = self._fast + (_FAST_S + ahead_s) * slope
        return min(max(forecast, 0.0), _MOST_GROWTH * self._fast)

    def expected(self, requests_per_s: float) -> list[Expected]:
        """As those that came while it was steady, in the same order and with the same gaps, only at this rate."""
        came = _spread_out([arrival for arrival in self._arrivals if arrival.at_s >= self._since], self._seen_s)
        past_s = max(sum(gap_s for gap_s, _ in came), 1e-3)
        shrink = len(came) / past_s / max(requests_per_s, 1e-6)
        expected, at_s = [], 0.0
        for _ in range(math.ceil(_LEAST_EXPECTED / len(came))):
            for gap_s, arrival in came:
                expected.append(self._expected(at_s, arrival, self._lengths))
                at_s += gap_s * shrink
        return expected

    def _expected(self, at_s: float, arrival: Arrival, lengths: AnswerClasses) -> Expected:
        num_prompt = arrival.num_prompt_tokens
        answers, hit_rate = lengths.of(num_prompt, arrival.slo_class)
        num_output = answers.at(self._rng.random())
        num_cached = min(round(hit_rate * num_prompt), num_prompt - 1)
        return Expected(at_s, num_prompt, num_cached, max(1, min(num_output, arrival.max_tokens)), arrival.slo_class)

    def running(self) -> list[tuple[float, float]]:
        """Of each sequence that decodes, its tokens so far, and how many are still to come."""
        lengths, found = self._lengths, []
        for each in self._running:
            if each.num_output_tokens:
                answers, _ = lengths.of(each.num_prompt_tokens, each.slo_class)
                in_all = answers.at(self._rng.random(), each.num_output_tokens)
                so_far = each.num_prompt_tokens + each.num_output_tokens
                found.append((float(so_far), float(max(1, in_all - each.num_output_tokens))))
        return found

    def _look_back(self) -> None:
        """As far as the present reaches."""
        prompts = [(arrival.at_s, math.log(arrival.num_prompt_tokens)) for arrival in self._arrivals]
        outputs = [(answer.ended_at_s, math.log(answer.num_output_tokens)) for answer in self._answers]
        gaps = [(after.at_s, after.at_s - before.at_s) for before, after in pairwise(self._arrivals)]
        self._steady_s = steady_s(self._seen_s, (prompts, outputs, gaps))
        since = self._seen_s - self._steady_s
        self._since = min(since, self._arrivals[max(0, len(self._arrivals) - _LEAST_WINDOW)].at_s)
        self._lengths = AnswerClasses(
            [answer for answer in self._answers if answer.arrived_at_s >= self._since],
            [each for each in self._running if each.arrived_at_s >= self._since],
        )

    def forecast(self, requests_per_s: float, expected: Sequence[Expected]) -> LoadForecast:
        num_prompt = sum(request.num_prompt_tokens for request in expected)
        return LoadForecast(
            requests_per_s,
            num_prompt / len(expected),
            sum(request.num_output_tokens for request in expected) / len(expected),
            sum(request.num_cached_tokens for request in expected) / num_prompt,
        )


class AnswerClasses:
    """Answers by the bit length of the number of tokens of their prompts and, where enough are known, by SLO class."""

    def __init__(self, ended: Sequence[Answered], running: Sequence[Running]) -> None:
        self._ended, self._running = ended, running
        self._known: dict[tuple[int, str], tuple[AnswerLengths, float]] = {}

    def of(self, num_prompt_tokens: int, slo_class: str = "") -> tuple[AnswerLengths, float]:
        """And the share of the prompts' tokens that caches held."""
        key = num_prompt_tokens.bit_length(), slo_class
        if key not in self._known:
            ended, running = self._alike(*key)
            num_prompt = sum(answer.num_prompt_tokens for answer in ended)
            hit_rate = sum(answer.num_cached_tokens for answer in ended) / max(1, num_prompt)
            lengths = AnswerLengths.of(
                [answer.num_output_tokens for answer in ended], [each.num_output_tokens for each in running]
            )
            self._known[key] = lengths, hit_rate
        return self._known[key]

    def _alike(self, bits: int, slo_class: str) -> tuple[Sequence[Answered], Sequence[Running]]:
        """Those of the class, or else of all of that length, or else all."""
        ended = [answer for answer in self._ended if answer.num_prompt_tokens.bit_length() == bits]
        running = [each for each in self._running if each.num_prompt_tokens.bit_length() == bits]
        of_class = [answer for answer in ended if answer.slo_class == slo_class]
        if len(of_class) >= _LEAST_CLASS:
            return of_class, [each for each in running if each.slo_class == slo_class]
        return (ended, running) if len(ended) >= _LEAST_CLASS else (self._ended, self._running)


def _spread_out(arrivals: Sequence[Arrival], now: float) -> list[tuple[float, Arrival]]:
    """Each with the time until the next one. Of very many, runs of them from all the time, so that bursts stay."""
    moments = [arrival.at_s for arrival in arrivals[1:]] + [now]
    gaps = [(max(0.0, moment - arrival.at_s), arrival) for arrival, moment in zip(arrivals, moments, strict=True)]
    if len(gaps) <= _MOST_WINDOW:
        return gaps
    length, step = _MOST_WINDOW // _RUNS, (len(gaps) - _MOST_WINDOW // _RUNS) / (_RUNS - 1)
    return [each for run in range(_RUNS) for each in gaps[round(run * step) : round(run * step) + length]]
