"""Prompt look-up: what followed the last few tokens when they stood in this sequence before (Saxena, 2023).

It costs no forward and holds no KV. An index says where the token behind the latest occurrence of each n-gram stands,
and grows with the sequence, so that a step costs the same however long the text is. How many tokens are the same grades
the guess.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decode.draft import Draft
from decode.drafter import Observed
from decode.outlook import ANYTHING, NOTHING, NUM_GRADES, Outlook
from model.runner import Chunk, DraftingState
from model.transformer import ForwardOutput

LONGEST, SHORTEST = 4, 2  # tokens of an n-gram: one alone is followed by anything
GRADES_FROM = (4, 7, 10)  # tokens that the text repeats already: the more they are, the likelier it goes on to
INDEXED_AT_ONCE = 4096  # tokens of a sequence: several steps share a longer prompt
INDEXED_AT_A_QUESTION = 256  # which is asked of all sequences on the event loop


@dataclass(frozen=True, slots=True)
class Match:
    """The end of a text has stood in it before: `num_tokens` of it, just before `position`. More are not counted."""

    position: int
    num_tokens: int

    @property
    def grade(self) -> int:
        return bisect_right(GRADES_FROM, self.num_tokens)


@dataclass(slots=True)
class NgramIndex:
    """Of the first `num_tokens` tokens: where the token behind an n-gram stands, for those it has been seen of."""

    num_tokens: int = 0
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, token_ids: Sequence[int], most: int = INDEXED_AT_ONCE) -> None:
        """`token_ids` are all tokens so far. Of new ones the first `most` are taken, the others by later calls."""
        end = max(self.num_tokens, min(len(token_ids), self.num_tokens + most))
        for position in range(max(self.num_tokens, SHORTEST), end):
            for length in range(SHORTEST, min(LONGEST, position) + 1):
                self.followers[tuple(token_ids[position - length : position])] = position
        self.num_tokens = end

    def match(self, token_ids: Sequence[int]) -> Match | None:
        """The latest place of the longest n-gram at the end that has stood there before."""
        for length in range(min(LONGEST, len(token_ids)), SHORTEST - 1, -1):
            position = self.followers.get(tuple(token_ids[-length:]))
            if position is not None:
                while length < min(GRADES_FROM[-1], position) and (
                    token_ids[position - length - 1] == token_ids[-length - 1]
                ):
                    length += 1
                return Match(position, length)
        return None

    def continuation(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens, those that followed the match; none without one."""
        match = self.match(token_ids)
        if match is None:
            return ()
        period = len(token_ids) - match.position  # what stands behind the end is taken to repeat
        return tuple(token_ids[match.position + place % period] for place in range(count))


_OUTLOOKS = tuple(Outlook(ANYTHING.num_tokens, grade, is_free=True) for grade in range(NUM_GRADES))


class NgramDrafter:
    """Implements `Drafter`."""

    name = ""  # nothing of it is in the cache: workers with and without it exchange KV
    num_layers = 0
    taps = ()

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        index = _index(drafting)
        index.extend(token_ids, INDEXED_AT_A_QUESTION)
        match = index.match(token_ids)
        return NOTHING if match is None else _OUTLOOKS[match.grade]

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        return [self._draft(chunk) for chunk in chunks]

    def _draft(self, chunk: Chunk) -> Draft:
        index = _index(chunk.drafting)
        index.extend(chunk.history, INDEXED_AT_A_QUESTION)
        return Draft(index.continuation(chunk.history, chunk.num_draft_tokens))

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        """Indexes what is new, but for the last tokens: those when it is asked."""
        for seen in observed:
            self.follow(seen.chunk.drafting, seen.chunk.history)

    def follow(self, drafting: DraftingState, token_ids: Sequence[int]) -> None:
        """Of one sequence, whose tokens before this step's these are."""
        _index(drafting).extend(token_ids)

    def export(self, drafting: DraftingState) -> Tensor | None:
        return None

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        raise ValueError("prompt look-up hands nothing over")


def _index(drafting: DraftingState) -> NgramIndex:
    if drafting.value is None:
        drafting.value = NgramIndex()
    index = drafting.value
    assert isinstance(index, NgramIndex)
    return index
