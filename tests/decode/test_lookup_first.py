"""Prompt look-up goes first where a text repeats itself, and the other drafter knows as much as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from decode.blame import mark_failing
from decode.draft import Draft
from decode.drafter import Observed
from decode.lookup_first import LookupFirst
from decode.ngram import INDEXED_AT_A_QUESTION
from decode.outlook import Outlook
from model.grammar import Matcher
from model.prompt_scores import PromptScores
from model.runner import Chunk, DraftingState
from model.sampling_params import SamplingParams
from model.transformer import ForwardOutput

REPEATING = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4]  # four tokens that stood there before
SHORT = [1, 2, 3, 9, 8, 2, 3]  # only two
NEW = [1, 2, 3, 4, 5]


class Other:
    """Drafts 7, and counts in its state what it was told and asked."""

    name, num_layers, taps = "other", 1, (0, 1)

    def __init__(self) -> None:
        self.broken = False

    def outlook(self, drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        return Outlook(3, 0)

    def propose(self, chunks: Sequence[Chunk]) -> list[Draft]:
        for chunk in chunks:
            chunk.drafting.value = (chunk.drafting.value or 0) + 1
            chunk.drafting.failed = 13 in chunk.history
        if self.broken:
            raise RuntimeError("broken")
        return [Draft((7,) * chunk.num_draft_tokens) for chunk in chunks]

    def observe(self, observed: Sequence[Observed], output: ForwardOutput) -> None:
        for seen in observed:
            seen.chunk.drafting.value = (seen.chunk.drafting.value or 0) + 10

    def export(self, drafting: DraftingState) -> Tensor | None:
        return torch.tensor([drafting.value])

    def restore(self, drafting: DraftingState, num_computed_tokens: int, state: Tensor) -> None:
        drafting.value = int(state)


def chunk(history: list[int], drafting: DraftingState | None = None) -> Chunk:
    return Chunk(
        history[-1:],
        len(history) - 1,
        range(9),
        history=history,
        num_draft_tokens=3,
        drafting=drafting or DraftingState(),
    )


def test_each_sequence_is_drafted_for_by_who_knows_it_best() -> None:
    chunks = [chunk(NEW), chunk(REPEATING), chunk(SHORT), chunk(REPEATING)]
    drafts = LookupFirst(Other()).propose(chunks)
    assert [list(draft.token_ids) for draft in drafts] == [[7, 7, 7], [5, 6, 9], [7, 7, 7], [5, 6, 9]]


@pytest.mark.parametrize(("history", "grades"), [(REPEATING, {1, 2, 3}), (SHORT, {0}), (NEW, {0})])
def test_outlook_tells_who_will_draft(history: list[int], grades: set[int]) -> None:
    outlook = LookupFirst(Other()).outlook(DraftingState(), history)
    assert outlook.grade in grades
    assert outlook.num_tokens >= 3


def test_the_other_is_told_of_every_step_and_hands_over_what_it_knows() -> None:
    drafter, drafting = LookupFirst(Other()), DraftingState()
    for history in (NEW, REPEATING):
        drafter.propose([chunk(history, drafting)])
        seen = Observed(chunk(history, drafting), range(1), None, ())
        drafter.observe([seen], cast(ForwardOutput, None))
    state = drafter.export(drafting)
    assert state is not None and state.tolist() == [21]  # asked once, told twice
    arrived = DraftingState()
    drafter.restore(arrived, 5, state)
    assert drafter.export(arrived) == state
    assert (drafter.name, drafter.num_layers, drafter.taps) == ("other", 1, (0, 1))


def test_chunk_with_another_state_is_the_same_otherwise() -> None:
    """Every field of it, whatever a chunk will have."""
    whole, state = chunk(NEW), DraftingState()
    whole = replace(whole, num_prompt_tokens=3, parents=(-1,), sampling=SamplingParams(4), scores=PromptScores(0, 3))
    whole = replace(whole, matcher=cast(Matcher, object()))
    names = {field.name for field in fields(Chunk)}
    assert all(getattr(whole, name) != getattr(Chunk((), 0, ()), name) for name in names)
    other = whole.with_state(state)
    assert other.drafting is state
    assert other == replace(whole, drafting=state)


def test_failure_of_the_other_ends_drafting_for_its_sequence() -> None:
    chunks = [chunk([*NEW, 13]), chunk(NEW)]
    LookupFirst(Other()).propose(chunks)
    assert [each.drafting.failed for each in chunks] == [True, False]


def test_states_are_as_they_were_where_the_other_raises() -> None:
    other, drafting = Other(), DraftingState()
    drafter: Any = LookupFirst(other)
    drafter.propose([chunk(NEW, drafting)])
    other.broken = True
    assert mark_failing("drafting for", lambda _: drafter.propose([chunk(NEW, drafting)]), [drafting]) == 1
    assert drafter.export(drafting).tolist() == [1]


def test_who_drafts_is_who_was_planned_with() -> None:
    """A long text is indexed bit by bit, whenever it is asked about: between plan and proposal nothing may change."""
    middle = list(range(1000, 1000 + 3 * INDEXED_AT_A_QUESTION))
    history = [*middle, 1, 2, 3, 4, 5, 6, 9, *middle, 1, 2, 3, 4]  # what it repeats is far behind the first bit
    drafter, drafting = LookupFirst(Other()), DraftingState()
    by_turns = []
    for _ in range(20):
        outlook = drafter.outlook(drafting, history)
        (draft,) = drafter.propose([chunk(history, drafting)])
        assert (tuple(draft.token_ids) == (7, 7, 7)) == (not outlook.is_free)
        by_turns.append(outlook.is_free)
    assert not by_turns[0] and by_turns[-1]
