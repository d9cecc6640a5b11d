"""How likely each token of a prompt is after those before it: gathered step by step, as the prompt is computed.

Kept as numbers in arrays: a long prompt with many alternatives would take a hundred times as much as objects. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.runner import Logprobs


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Of P consecutive tokens, each with C alternatives, the most likely first."""

    chosen: NDArray[np.float32]  # [P]
    top_ids: NDArray[np.int32]  # [P, C]
    top_logprobs: NDArray[np.float32]  # [P, C]

    def __iter__(self) -> Iterator[Logprobs]:
        rows = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        for chosen, ids, logprobs in rows:
            yield Logprobs(chosen, tuple(zip(ids, logprobs, strict=True)))


@dataclass(slots=True, eq=False)
class PromptScores:
    """Goes with a sequence, and is added to by the runner alone, during a step. A step that is run again adds nothing.

    The first token is not scored: nothing is before it.
    """

    num_alternatives: int
    num_prompt_tokens: int
    num_scored: int = 0
    _parts: list[ScoredTokens] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.num_scored >= self.num_prompt_tokens - 1

    def wanted(self, end: int) -> range:
        """The positions before `end` whose next token is still to be scored. All before them have been."""
        return range(self.num_scored, min(end, self.num_prompt_tokens - 1))

    def add(self, part: ScoredTokens) -> None:
        self._parts.append(part)
        self.num_scored += len(part.chosen)

    def __iter__(self) -> Iterator[Logprobs]:
        """Of the second token of the prompt and of those behind it."""
        for part in self._parts:
            yield from part
