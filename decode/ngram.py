"""Prompt look-up: what followed the last few tokens when they stood in this sequence before (Saxena, 2023).

It costs no forward and holds no KV. An index from each n-gram to the token behind its latest occurrence grows with the
sequence, so that a step costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decode.draft import Draft
from decode.drafter import Observed
from model.runner import Chunk, DraftingState
from model.transformer import ForwardOutput

LONGEST, SHORTEST = 4, 2  # tokens of an n-gram: one alone is followed by anything


@dataclass(slots=True)
class NgramIndex:
    """Of the first `num_tokens` tokens: where the token behind an n-gram stands, for those it has been seen of."""

    num_tokens: int = 0
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """`token_ids` are all tokens so far."""
        for position in range(max(self.num_tokens, SHORTEST), len(token_ids)):
            for length in range(SHORTEST, min(LONGEST, position) + 1):
                self.followers[tuple(token_ids[position - length : position])] = position
        self.num_tokens = len(token_ids)

    def continuation(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens: those behind the longest n-gram at the end that has stood there before."""
        for length in range(min(LONGEST, len(token_ids)), SHORTEST - 1, -1):
            position = self.followers.get(tuple(token_ids[-length:]))
            if position is not None:
                period = len(token_ids) - position  # what stands behind the end is taken to repeat
                return tuple(token_ids[position + place % period] for place in range(count))
        return ()


class NgramDrafter:
    """Implements `Drafter`."""

    name = ""  # nothing of it is in the cache: workers with and without it exchange KV
    num_layers = 0
    taps = ()

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        return [Draft(self._index(chunk).continuation(chunk.history, chunk.num_draft_tokens)) for chunk in chunks]

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """Nothing to keep: the index is brought up to date when it is asked."""

    def export(self, drafting: DraftingState) -> Tensor | None:
        return None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        raise ValueError("prompt look-up hands nothing over")

    def _index(self, chunk: Chunk) -> NgramIndex:
        index = chunk.drafting.value
        if index is None:
            index = chunk.drafting.value = NgramIndex()
        assert isinstance(index, NgramIndex)
        index.extend(chunk.history)
        return index
