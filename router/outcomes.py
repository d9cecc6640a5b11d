"""What became of simulated requests: each by itself, and all together against what was promised."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one request. `ttft_s` and `tpot_s` are None where there was no first, or no second token; `error` is the
    reason it was refused or failed, empty if it has its whole answer."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ended_at_s: float
    ttft_s: float | None
    tpot_s: float | None
    worst_gap_s: float
    wait_s: float  # at the router
    prefill: str
    decode: str
    num_cached_tokens: int
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    num_preemptions: int = 0
    error: str = ""
    slo_class: str = ""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is to have: its first token in time, and the others in time on average. `share`: how many of all
    are to have it; it counts where there are several classes."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ValueError(f"ttft_s is {self.ttft_s} and tpot_s {self.tpot_s}; both must be above 0")
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and below 1")


@dataclass(slots=True)
class Totals:
    """Of a whole simulation. Times are kept as numbers, not as objects: of a million requests they take 16 MB."""

    ttfts_s: array[float] = field(default_factory=lambda: array("d"))  # of those that have their answer
    tpots_s: array[float] = field(default_factory=lambda: array("d"))  # of the same; 0 of one token
    errors: Counter[str] = field(default_factory=Counter)
    num_output_tokens: int = 0
    num_retries: int = 0
    num_resumes: int = 0
    num_moves: int = 0
    num_preemptions: int = 0
    duration_s: float = 0.0  # until the last request ended
    num_workers: int = 0
    prefill_busy_s: float = 0.0  # of all workers: steps that compute prompts
    decode_busy_s: float = 0.0  # steps that only decode

    def add(self, outcome: Outcome) -> None:
        self.duration_s = max(self.duration_s, outcome.ended_at_s)
        self.num_output_tokens += outcome.num_output_tokens
        self.num_retries += outcome.num_retries
        self.num_resumes += outcome.num_resumes
        self.num_moves += outcome.num_moves
        self.num_preemptions += outcome.num_preemptions
        if outcome.error:
            self.errors[outcome.error] += 1
        else:
            assert outcome.ttft_s is not None
            self.ttfts_s.append(outcome.ttft_s)
            self.tpots_s.append(outcome.tpot_s or 0.0)

    @property
    def num_requests(self) -> int:
        return len(self.ttfts_s) + self.errors.total()

    def num_within(self, slo: Slo) -> int:
        """Requests that had both times met. One that failed had none."""
        pairs = zip(self.ttfts_s, self.tpots_s, strict=True)
        return sum(ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s for ttft_s, tpot_s in pairs)

    def attainment(self, slo: Slo) -> float:
        return self.num_within(slo) / self.num_requests if self.num_requests else 1.0

    def goodput(self, slo: Slo) -> float:
        """Requests within it, per second and worker."""
        worker_s = self.duration_s * self.num_workers
        return self.num_within(slo) / worker_s if worker_s else 0.0

    @property
    def prefill_utilisation(self) -> float:
        """The share of all workers' time."""
        return self._share(self.prefill_busy_s)

    @property
    def decode_utilisation(self) -> float:
        return self._share(self.decode_busy_s)

    def _share(self, busy_s: float) -> float:
        worker_s = self.duration_s * self.num_workers
        return busy_s / worker_s if worker_s else 0.0


def percentile(values: array[float], share: float) -> float:
    """By nearest rank; 0 if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0
