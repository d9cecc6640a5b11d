"""How long a step of a worker takes, as a formula with known coefficients. Pure; the router, planner and simulator ask.

A step that computes prompts: a + b * tokens + c * pairs of a token and one of its context, which for a whole prompt is
a + b * length + c * length^2. One that decodes: a base, each sequence, the context that is read and the experts that
are touched. One that does both has the base of the first and what each sequence adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

CLOCK_FIELDS = (
    "prefill_base_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_base_s",
    "decode_sequence_s",
    "decode_context_token_s",
    "decode_expert_s",
)


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a layer: how many there are, and how many of them each token chooses."""

    number: int
    chosen: int

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.number:
            raise ValueError(f"{self.chosen} of {self.number} experts cannot be chosen")

    def touched(self, num_tokens: float) -> float:
        """By so many tokens, each choosing by itself."""
        return self.number * (1.0 - math.pow(1.0 - self.chosen / self.number, num_tokens))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds. `decode_expert_s`: for each expert that a step touches in a layer, of all layers together."""

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    decode_expert_s: float = 0.0
    experts: Experts | None = None
    tokens_per_step: float = 1.0  # of a sequence; above 1 where drafts are accepted

    def __post_init__(self) -> None:
        for name in CLOCK_FIELDS:
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 1.0 <= self.tokens_per_step < float("inf"):
            raise ValueError(f"tokens_per_step is {self.tokens_per_step}; it must be at least 1")

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Of a step that computes these chunks: tokens, and tokens of context with them. Nothing takes no time."""
        seconds = sum(n * (self.prefill_token_s + context * self.prefill_pair_s) for n, context in chunks)
        return self.prefill_base_s + seconds if seconds else 0.0

    def prompt_s(self, num_tokens: int, max_step_tokens: int, num_cached_tokens: int = 0) -> float:
        """Of a prompt that is alone, in as many steps as it takes."""
        seconds, done = 0.0, num_cached_tokens
        while done < num_tokens:
            count = min(max_step_tokens, num_tokens - done)
            done += count
            seconds += self.prefill_s([(count, done)])
        return seconds

    def decode_s(self, num_sequences: float, num_context_tokens: float) -> float:
        """Of a step that gives each sequence `tokens_per_step` tokens. The context is that of all together."""
        touched = 0.0 if self.experts is None else self.experts.touched(num_sequences)
        each = num_sequences * self.decode_sequence_s + num_context_tokens * self.decode_context_token_s
        return self.decode_base_s + each + touched * self.decode_expert_s

    def mixed_s(self, chunks: Iterable[tuple[int, int]], num_sequences: int, num_context_tokens: int) -> float:
        """Of a step that computes chunks and decodes: the prompts touch all experts anyway."""
        each = num_sequences * self.decode_sequence_s + num_context_tokens * self.decode_context_token_s
        return self.prefill_s(chunks) + each / self.tokens_per_step

    def scaled(self, factor: float, decode_factor: float | None = None) -> StepCosts:
        """Of a machine that takes `factor` times as long for everything, or for prefill, and another for decode."""
        decode_factor = factor if decode_factor is None else decode_factor
        return StepCosts(
            self.prefill_base_s * factor,
            self.prefill_token_s * factor,
            self.prefill_pair_s * factor,
            self.decode_base_s * decode_factor,
            self.decode_sequence_s * decode_factor,
            self.decode_context_token_s * decode_factor,
            self.decode_expert_s * decode_factor,
            self.experts,
            self.tokens_per_step,
        )
