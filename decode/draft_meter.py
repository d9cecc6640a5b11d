"""How drafting fares against its forecast: tokens, time, speed-up and experts, forecast and measured side by side.

Decayed sums over the steps that drafted, so that a ratio is one of sums, not a mean of ratios.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from decode.draft_decision import DraftDecision, StepOutcome

_MEMORY = 0.99  # of a step, at the next one: about the last hundred count


@dataclass(slots=True)
class Sums:
    """Of steps: what all sequences emitted, and what that took."""

    num_tokens: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    num_experts: float = 0.0

    def add(self, num_tokens: float, verify_s: float, draft_s: float, num_experts: float) -> None:
        self.num_tokens = _MEMORY * self.num_tokens + num_tokens
        self.verify_s = _MEMORY * self.verify_s + verify_s
        self.draft_s = _MEMORY * self.draft_s + draft_s
        self.num_experts = _MEMORY * self.num_experts + num_experts


class DraftMeter:
    """Knows only steps that drafted, ran no prefill and had a forecast; ratios are NaN until there was one."""

    def __init__(self) -> None:
        self.forecast = Sums()
        self.measured = Sums()
        self._num_steps = 0.0
        self._num_sequences = 0.0
        self._plain_s = 0.0
        self._drafts_s = 0.0  # plain steps' time, once for each token of the longest draft

    def observe(self, decision: DraftDecision, step: StepOutcome, forecast_experts: float) -> None:
        """`forecast_experts`: distinct ones per layer; 0 where the model has none."""
        if not step.drafts or step.verify_s <= 0.0 or not math.isfinite(decision.expected_s):
            return
        verify_s = decision.expected_s - decision.expected_draft_s
        self.forecast.add(decision.num_expected_tokens, verify_s, decision.expected_draft_s, forecast_experts)
        num_tokens = step.num_sequences + sum(draft.num_accepted for draft in step.drafts)
        self.measured.add(num_tokens, step.verify_s, step.draft_s, step.num_distinct_experts or 0.0)
        self._num_steps = _MEMORY * self._num_steps + 1.0
        self._num_sequences = _MEMORY * self._num_sequences + step.num_sequences
        self._plain_s = _MEMORY * self._plain_s + decision.plain_s
        self._drafts_s = _MEMORY * self._drafts_s + step.shape.longest_draft * decision.plain_s

    def tokens_per_step(self, sums: Sums) -> float:
        """Of one sequence: E of the literature."""
        return _ratio(sums.num_tokens, self._num_sequences)

    def draft_cost(self, sums: Sums) -> float:
        """Of one draft, in plain steps: c of the literature. 0 where all are free."""
        return 0.0 if self._num_steps and not self._drafts_s else _ratio(sums.draft_s, self._drafts_s)

    def verify_cost(self, sums: Sums) -> float:
        """Of the step that verifies, in plain steps."""
        return _ratio(sums.verify_s, self._plain_s)

    def speedup(self, sums: Sums) -> float:
        """Over plain steps, which are forecast in either case."""
        return self.tokens_per_step(sums) * _ratio(self._plain_s, sums.verify_s + sums.draft_s)

    def experts_per_step(self, sums: Sums) -> float:
        """Distinct ones, per layer."""
        return _ratio(sums.num_experts, self._num_steps)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
