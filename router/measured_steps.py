"""Steps as a worker has measured them: each value stands for some that were alike, with the means of them. This is what
step-time models learn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeAlias

MOST_AT_ONCE = 16  # that are told in one report
MOST_STEP_S = 3600.0
_MOST = 1e12  # tokens, or pairs of them
_MOST_TOKENS_PER_STEP = 1024.0


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    """That computed prompts and nothing else. `num_pairs`: of a token and one of the context it is computed with."""

    num_tokens: float
    num_pairs: float
    step_s: float

    def slowed(self, factor: float) -> PrefillSteps:
        """As they would have been measured by a worker that takes so many times as long."""
        return PrefillSteps(self.num_tokens, self.num_pairs, self.step_s * factor)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """In which every sequence decoded, and nothing else happened."""

    num_sequences: float
    num_context_tokens: float  # of all sequences together
    step_s: float
    tokens_per_step: float = 1.0  # that a sequence got; above 1 where drafts are accepted

    def slowed(self, factor: float) -> DecodeSteps:
        return DecodeSteps(self.num_sequences, self.num_context_tokens, self.step_s * factor, self.tokens_per_step)


Steps: TypeAlias = PrefillSteps | DecodeSteps


def why_not(steps: Steps) -> str:
    """What is wrong with them, as `field is value; what it must be`; empty if nothing is."""
    for field in fields(steps):
        value = getattr(steps, field.name)
        least = 0.0 if field.name in ("num_pairs", "num_context_tokens") else math.ulp(0.0)
        most = {"step_s": MOST_STEP_S, "tokens_per_step": _MOST_TOKENS_PER_STEP}.get(field.name, _MOST)
        if not least <= value <= most:
            bounds = "from 0" if least == 0.0 else "above 0 and"
            return f"{field.name} is {value}; it must be {bounds} up to {most:g}"
    return ""
