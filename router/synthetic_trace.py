"""Traces of the project's own: rates that step and ramp, lengths as people's are, prompts that begin alike. By seed.

A trace is one phase after another; several traces may be laid over each other, a burst over what comes anyway.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from router.traced_request import PREFIX_BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal: `mean` tokens, `spread` the standard deviation of the logarithm, cut off at both ends."""

    mean: float
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.spread >= 0 and 1 <= self.least <= self.most):
            raise ValueError(f"{self}: mean must be above 0, spread 0 or more, and 1 <= least <= most")

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.spread**2 / 2
        length = rng.lognormvariate(mu, self.spread) if self.spread else self.mean
        return min(max(round(length), self.least), self.most)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A `share` of the prompts begins with one of `number` texts of `num_blocks` blocks, all as likely. The prompt is
    that much longer than its drawn length."""

    share: float = 0.0
    number: int = 1
    num_blocks: int = 1
    first_id: int = 0

    def __post_init__(self) -> None:
        if not (0.0 <= self.share <= 1.0 and self.number >= 1 and self.num_blocks >= 1):
            raise ValueError(f"{self}: share must be 0 to 1, number and num_blocks at least 1")


@dataclass(frozen=True, slots=True)
class Phase:
    """`per_s` requests a second, as a Poisson process; with `end_per_s` the rate goes there in a straight line."""

    duration_s: float
    per_s: float
    prompt: Lengths
    output: Lengths
    prefixes: Prefixes = Prefixes()
    end_per_s: float | None = None
    slo_class: str = ""

    def __post_init__(self) -> None:
        rates = (self.per_s, self.per_s if self.end_per_s is None else self.end_per_s)
        if not (0 < self.duration_s < math.inf and all(0 <= rate < math.inf for rate in rates)):
            raise ValueError(f"duration_s is {self.duration_s} and the rates {rates}; they must be numbers from 0 on")

    def rate(self, at_s: float) -> float:
        end = self.per_s if self.end_per_s is None else self.end_per_s
        return self.per_s + (end - self.per_s) * at_s / self.duration_s


def synthetic_trace(phases: Sequence[Phase], seed: int, start_s: float = 0.0) -> Iterator[TracedRequest]:
    """One phase after another, from `start_s` on. Equal seeds give equal traces."""
    rng = random.Random(seed)
    own_ids = count(1 << 32)
    for phase in phases:
        most = max(phase.rate(0.0), phase.rate(phase.duration_s))
        at_s = rng.expovariate(most) if most else math.inf
        while at_s < phase.duration_s:
            if rng.random() * most < phase.rate(at_s):  # thinning
                yield _request(phase, start_s + at_s, rng, own_ids)
            at_s += rng.expovariate(most)
        start_s += phase.duration_s


def overlaid(*traces: Iterator[TracedRequest]) -> Iterator[TracedRequest]:
    """All of them together, in the order of time."""
    return heapq.merge(*traces, key=lambda request: request.at_s)


def _request(phase: Phase, at_s: float, rng: random.Random, own_ids: Iterator[int]) -> TracedRequest:
    num_prompt, num_output = phase.prompt.draw(rng), phase.output.draw(rng)
    prefixes = phase.prefixes
    if rng.random() >= prefixes.share:
        return TracedRequest(at_s, num_prompt, num_output, slo_class=phase.slo_class)
    first = prefixes.first_id + rng.randrange(prefixes.number) * prefixes.num_blocks
    shared = tuple(range(first, first + prefixes.num_blocks))
    own = tuple(next(own_ids) for _ in range(num_prompt // PREFIX_BLOCK_TOKENS))
    num_prompt += PREFIX_BLOCK_TOKENS * prefixes.num_blocks
    return TracedRequest(at_s, num_prompt, num_output, shared + own, phase.slo_class)
