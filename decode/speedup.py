"""The arithmetic of drafting: how many tokens a step emits, and how much faster that makes decoding."""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens a step emits on average if every draft stands with the same chance: (1 - a^(K+1)) / (1 - a)."""
    return sum(acceptance**accepted for accepted in range(num_draft_tokens + 1))


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """The same if draft j stands with chance `acceptances[j]`, given that all before it do."""
    total = survival = 1.0
    for acceptance in acceptances:
        survival *= acceptance
        total += survival
    return total


def speedup(num_emitted_tokens: float, num_draft_tokens: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Against plain decoding. Costs in plain steps: `draft_cost` of one draft, `verify_cost` of the step that verifies.

    With a `verify_cost` of 1 it is the textbook's E / (K c + 1). A step with more rows costs more than that, in a
    Mixture of Experts above all, and the ratio plain / verify is what MoESD calls target efficiency.
    """
    return num_emitted_tokens / (num_draft_tokens * draft_cost + verify_cost)


def acceptance_of(num_emitted_tokens: float, num_draft_tokens: int) -> float:
    """The uniform acceptance under which `expected_tokens` is what was measured: its inverse, within [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < num_emitted_tokens:
            low = middle
        else:
            high = middle
    return (low + high) / 2
