"""The step-time model of one kind of worker: learns from what the workers measure, and begins with what is known before
that, or with nothing.

Prefill and decode are learnt apart, each with a confidence of its own. What it has learnt is a `StepCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.least_squares import LeastSquares
from router.measured_steps import PrefillSteps, Steps
from router.step_costs import CLOCK_FIELDS, Experts, StepCosts

_USUAL_CHUNKS = [[(n, n + before)] for n in (64, 512, 2048) for before in (0, 4096)]
_USUAL_BATCHES = (1, 8, 32, 128)
_USUAL_CONTEXTS = (256, 2048)  # of each sequence
_PREFILL_FIELDS, _DECODE_FIELDS = CLOCK_FIELDS[:3], CLOCK_FIELDS[3:]
_TOKENS_SHARE = 0.05  # of each step in the mean

# Where nothing is known: of the first step that was measured so much is taken to be base, tokens and pairs; base,
# sequences and context, and of a model with experts those.
_PREFILL_SHARES = (0.2, 0.7, 0.1)
_DECODE_SHARES = (0.6, 0.2, 0.2)
_EXPERT_SHARES = (0.2, 0.1, 0.2, 0.5)
_FIRST_STEPS = 1.0  # that the first one counts for, and before it was there
UNKNOWN = StepCosts(0.02, 6e-4, 1e-7, 0.022, 1e-3, 1e-6)  # some machine, before anything was measured at all


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a kind of worker before it has measured anything; it counts for so many steps."""

    costs: StepCosts
    num_steps: float = 10.0


class StepModel:
    """`observe_*` what steps took, `costs` says what they will take."""

    def __init__(
        self, calibration: Calibration | None = None, *, experts: Experts | None = None, memory: float = 300.0
    ) -> None:
        """Without a calibration the first step that is measured takes its place: its time is shared out, which is
        worth one step. `experts` are those of the calibration, if there is one."""
        self._memory = memory
        self._first = replace(UNKNOWN, experts=experts) if calibration is None else calibration.costs
        self._prefill: LeastSquares | None = None
        self._decode: LeastSquares | None = None
        if calibration is not None:
            first, weight = calibration.costs, calibration.num_steps
            prefill = [first.prefill_base_s, first.prefill_token_s, first.prefill_pair_s]
            shapes = [_prefill_features(chunks) for chunks in _USUAL_CHUNKS]
            self._prefill = LeastSquares(prefill, shapes, weight=weight, memory=memory)
            decode = [first.decode_base_s, first.decode_sequence_s, first.decode_context_token_s]
            if first.experts is not None:
                decode.append(first.decode_expert_s)
            usual = [(number, number * context) for number in _USUAL_BATCHES for context in _USUAL_CONTEXTS]
            shapes = [self._decode_features(*batch) for batch in usual]
            self._decode = LeastSquares(decode, shapes, weight=weight, memory=memory)
        self._tokens_per_step = self._first.tokens_per_step

    def observe_prefill(self, chunks: Iterable[tuple[int, int]], step_s: float) -> None:
        """A step that computed these chunks and nothing else: tokens of each, and tokens of context with them."""
        self._observe_prefill(_prefill_features(list(chunks)), step_s)

    def observe_decode(
        self, num_sequences: float, num_context_tokens: float, step_s: float, tokens_per_step: float | None = None
    ) -> None:
        """A step in which every sequence decoded; `tokens_per_step`: how many of its tokens each got, on average."""
        features = self._decode_features(num_sequences, num_context_tokens)
        if self._decode is None:
            self._decode = self._begun(_DECODE_SHARES if len(features) == 3 else _EXPERT_SHARES, features, step_s)
        if self._decode is not None:
            self._decode.observe(features, step_s)
        if tokens_per_step is not None and tokens_per_step >= 1.0:
            self._tokens_per_step += _TOKENS_SHARE * (tokens_per_step - self._tokens_per_step)

    def observe(self, steps: Steps) -> None:
        """Of some that were alike the mean, which counts as one step."""
        if isinstance(steps, PrefillSteps):
            self._observe_prefill([1.0, steps.num_tokens, steps.num_pairs], steps.step_s)
        else:
            self.observe_decode(steps.num_sequences, steps.num_context_tokens, steps.step_s, steps.tokens_per_step)

    def expected_s(self, steps: Steps) -> float | None:
        """What such a step is expected to take; None while nothing is known."""
        if isinstance(steps, PrefillSteps):
            features, model = [1.0, steps.num_tokens, steps.num_pairs], self._prefill
        else:
            features = self._decode_features(steps.num_sequences, steps.num_context_tokens)
            model = self._decode
        return None if model is None else model.predict(features)

    @property
    def costs(self) -> StepCosts:
        """Some machine's, as far as nothing is known."""
        values: dict[str, Any] = {"tokens_per_step": self._tokens_per_step}
        if self._prefill is not None:
            values.update(zip(_PREFILL_FIELDS, self._prefill.coefficients, strict=True))
        if self._decode is not None:
            values.update(zip(_DECODE_FIELDS, self._decode.coefficients, strict=False))  # the last one is of experts
        return replace(self._first, **values)

    @property
    def prefill_coefficients(self) -> Sequence[float]:
        """Of the base, a token and a pair: what `costs` has of them."""
        first = self._first
        if self._prefill is None:
            return first.prefill_base_s, first.prefill_token_s, first.prefill_pair_s
        return self._prefill.coefficients

    @property
    def prefill_confidence(self) -> float:
        return 0.0 if self._prefill is None else self._prefill.confidence

    @property
    def decode_confidence(self) -> float:
        return 0.0 if self._decode is None else self._decode.confidence

    @property
    def prefill_miss(self) -> float:
        """How far off predictions are lately, relative."""
        return 0.0 if self._prefill is None else self._prefill.miss

    @property
    def decode_miss(self) -> float:
        return 0.0 if self._decode is None else self._decode.miss

    def _observe_prefill(self, features: list[float], step_s: float) -> None:
        if self._prefill is None:
            self._prefill = self._begun(_PREFILL_SHARES, features, step_s)
        if self._prefill is not None:
            self._prefill.observe(features, step_s)

    def _begun(self, shares: Sequence[float], features: Sequence[float], step_s: float) -> LeastSquares | None:
        """From the first step; None if it is no measurement."""
        if not 0.0 < step_s < math.inf or not all(0.0 < feature < math.inf for feature in features):
            return None
        prior = [share * step_s / feature for share, feature in zip(shares, features, strict=True)]
        return LeastSquares(prior, [features], weight=_FIRST_STEPS, memory=self._memory)

    def _decode_features(self, num_sequences: float, num_context_tokens: float) -> list[float]:
        features = [1.0, num_sequences, num_context_tokens]
        return features if self._first.experts is None else [*features, self._first.experts.touched(num_sequences)]


def _prefill_features(chunks: Sequence[tuple[int, int]]) -> list[float]:
    return [1.0, sum(n for n, _ in chunks), sum(n * context for n, context in chunks)]
