"""Prompt look-up where the text repeats itself, another drafter where it does not.

A look-up costs nothing and is right nearly always once a few tokens in a row have stood there before, as in code and in
answers that quote their prompt; elsewhere it has nothing to offer, and a head or a small model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decode.draft import Draft
from decode.drafter import Drafter, Observed
from decode.ngram import NgramDrafter
from decode.outlook import Outlook
from model.runner import Chunk, DraftingState
from model.transformer import ForwardOutput

TRUSTED_GRADE = 1  # of a look-up, from which on it goes first: the other drafter's guesses are of grade 0


@dataclass(slots=True)
class LookupFirstState:
    """`repeats`: what was said of the sequence when it had so many tokens. The index may know more of it by now, but
    how much to draft was decided by what it knew then."""

    lookup: DraftingState = field(default_factory=DraftingState)
    other: DraftingState = field(default_factory=DraftingState)
    repeats: tuple[int, bool] = (0, False)


class LookupFirst:
    """Implements `Drafter`, around another one. KV, state and what is handed over are the other's."""

    def __init__(self, other: Drafter) -> None:
        self._lookup = NgramDrafter()
        self._other = other
        self.name = other.name
        self.num_layers = other.num_layers
        self.taps = other.taps

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        state = _state(drafting)
        lookup = self._lookup.outlook(state.lookup, token_ids)
        state.repeats = len(token_ids), _is_trusted(lookup)
        return lookup if _is_trusted(lookup) else self._other.outlook(state.other, token_ids)

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        repeats = [self._repeats(chunk) for chunk in chunks]
        repeating = [_for_lookup(chunk) for chunk, is_so in zip(chunks, repeats, strict=True) if is_so]
        others = [_for_other(chunk) for chunk, is_so in zip(chunks, repeats, strict=True) if not is_so]
        found = iter(self._lookup.propose(repeating))
        made = iter(self._other.propose(others) if others else ())
        for chunk in chunks:
            chunk.drafting.failed = chunk.drafting.failed or _state(chunk.drafting).other.failed
        return [next(found) if is_so else next(made) for is_so in repeats]

    def _repeats(self, chunk: Chunk) -> bool:
        num_tokens, repeats = _state(chunk.drafting).repeats
        if num_tokens != len(chunk.history):  # nobody has asked
            return _is_trusted(self._lookup.outlook(_state(chunk.drafting).lookup, chunk.history))
        return repeats

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        for seen in observed:
            self._lookup.follow(_state(seen.chunk.drafting).lookup, seen.chunk.history)
        self._other.observe(
            [Observed(_for_other(seen.chunk), seen.rows, seen.hidden_row, seen.emitted_ids) for seen in observed],
            output,
        )

    def export(self, drafting: DraftingState) -> Tensor | None:
        return self._other.export(_state(drafting).other)

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        self._other.restore(_state(drafting).other, num_computed_tokens, state)


def _state(drafting: DraftingState) -> LookupFirstState:
    if drafting.value is None:
        drafting.value = LookupFirstState()
    state = drafting.value
    assert isinstance(state, LookupFirstState)
    return state


def _is_trusted(lookup: Outlook) -> bool:
    return lookup.num_tokens > 0 and lookup.grade >= TRUSTED_GRADE


def _for_lookup(chunk: Chunk) -> Chunk:
    return chunk.with_state(_state(chunk.drafting).lookup)


def _for_other(chunk: Chunk) -> Chunk:
    return chunk.with_state(_state(chunk.drafting).other)
