"""Which tokens stand in a text and how often in its output: what penalties are worked out from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The N tokens of a text, each once, and how often each stands in the output: 0 if only before."""


@dataclass(frozen=True, slots=True)
class CountedText:
    """A text whose tokens are ascending, so that further output can be counted in."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, history: Sequence[int], num_prompt_tokens: int) -> CountedText:
        """`history` has at least one token."""
        text = np.asarray(history, np.int64)
        token_ids = np.unique(text)
        written = np.searchsorted(token_ids, text[num_prompt_tokens:])
        return cls(token_ids, np.bincount(written, minlength=len(token_ids)))

    def with_output(self, further: Sequence[int]) -> Counts:
        """Of the text with so much output more."""
        if not further:
            return self.token_ids, self.counts
        more, times = np.unique(np.asarray(further, np.int64), return_counts=True)
        places = np.searchsorted(self.token_ids, more)
        is_known = self.token_ids[np.minimum(places, len(self.token_ids) - 1)] == more
        counts = self.counts.copy()
        counts[places[is_known]] += times[is_known]
        return np.concatenate((self.token_ids, more[~is_known])), np.concatenate((counts, times[~is_known]))
