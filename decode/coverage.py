"""How many experts of a layer a step touches: every one of them is read from memory, whoever asked for it.

Under uniform routing t tokens touch E (1 - (1 - k/E)^t) of E experts, k each. Tokens that follow one another choose
alike, so that B sequences with R rows together count as t = B (R/B)^beta; beta is learnt from what steps touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig

_FIRST_BETA = 0.75  # fits published measurements of a model with 256 experts
_FIRST_INFORMATION = 25.0  # 1 / variance of the guess: +-0.2
_MOST_INFORMATION = 2500.0  # a bound on what is remembered, and so on how slowly beta follows a new kind of text
_NOISE = 0.1  # of a step's count, relative
_CLIP = 3.0  # in noise: one odd step says no more than this


@dataclass(frozen=True, slots=True)
class Routing:
    """A Mixture-of-Experts layer: routed experts, and how many of them each token chooses (shared ones not counted)."""

    num_experts: int
    num_chosen: int

    @classmethod
    def of(cls, config: ModelConfig) -> Routing | None:
        """None for a dense model."""
        return cls(config.num_experts, config.num_experts_per_token) if config.num_experts else None

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(f"{self.num_chosen} of {self.num_experts} experts cannot be chosen")


def distinct_experts(routing: Routing, num_tokens: float) -> float:
    """Expected number of a layer's experts that `num_tokens` tokens touch, each choosing by itself."""
    missed = 1.0 - routing.num_chosen / routing.num_experts
    return routing.num_experts * (1.0 - math.pow(missed, num_tokens))


class ExpertCoverage:
    """Distinct experts per layer as a function of sequences and rows, with beta followed online.

    Each step that verified drafts moves beta by one Gauss-Newton step on the count itself: where all experts are
    touched whatever beta is, the count says nothing and nothing moves.
    """

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._beta = _FIRST_BETA
        self._information = _FIRST_INFORMATION

    @property
    def beta(self) -> float:
        """0: a sequence's rows all choose the same experts; 1: each row chooses by itself."""
        return self._beta

    def predict(self, num_sequences: int, num_rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distinct experts for each number of rows, drafts included."""
        num_tokens = num_sequences * (num_rows / num_sequences) ** self._beta
        num_experts, num_chosen = self.routing.num_experts, self.routing.num_chosen
        experts: NDArray[np.float64] = num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)
        return experts

    def observe(self, num_sequences: int, num_rows: int, num_distinct_experts: float) -> None:
        """What a step touched, as the mean over layers. Counts that no routing could give are left out."""
        num_experts, num_chosen = self.routing.num_experts, self.routing.num_chosen
        possible = math.isfinite(num_distinct_experts) and num_chosen <= num_distinct_experts <= num_experts
        if num_rows <= num_sequences or num_sequences < 1 or not possible or num_chosen == num_experts:
            return
        num_tokens = num_sequences * (num_rows / num_sequences) ** self._beta
        missed = 1.0 - num_chosen / num_experts
        predicted = distinct_experts(self.routing, num_tokens)
        slope = -num_experts * math.log(missed) * missed**num_tokens * num_tokens * math.log(num_rows / num_sequences)
        noise = _NOISE * predicted
        error = max(-_CLIP * noise, min(_CLIP * noise, num_distinct_experts - predicted))
        self._information = min(self._information + (slope / noise) ** 2, _MOST_INFORMATION)
        self._beta = max(0.0, min(1.0, self._beta + slope * error / noise**2 / self._information))
