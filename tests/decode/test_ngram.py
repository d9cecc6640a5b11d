"""Prompt look-up: what is proposed, what is told of it before, and that the two agree."""

from __future__ import annotations

import random
from typing import cast

import pytest

from decode.drafter import Observed
from decode.ngram import GRADES_FROM, INDEXED_AT_A_QUESTION, INDEXED_AT_ONCE, NgramDrafter, NgramIndex
from decode.outlook import NOTHING, NUM_GRADES
from model.runner import Chunk, DraftingState
from model.sampling_params import SamplingParams
from model.transformer import ForwardOutput


def chunk(token_ids: list[int], drafting: DraftingState, num_drafts: int = 3) -> Chunk:
    sampling = SamplingParams(max_tokens=100, temperature=0.0)
    return Chunk(token_ids[-1:], len(token_ids) - 1, [0], sampling, token_ids, 1, num_drafts, drafting)


def longest_repeat(token_ids: list[int]) -> int:
    """Tokens at the end that have stood somewhere before, found by trying all places."""
    return max(
        next(
            (n for n in range(end) if token_ids[end - 1 - n] != token_ids[len(token_ids) - 1 - n]),
            end,
        )
        for end in range(1, len(token_ids))
    )


def test_grades_are_as_many_as_there_are() -> None:
    assert len(GRADES_FROM) + 1 == NUM_GRADES


@pytest.mark.parametrize(("num_repeated", "grade"), [(2, 0), (3, 0), (4, 1), (6, 1), (7, 2), (9, 2), (10, 3), (40, 3)])
def test_longer_matches_have_higher_grades(num_repeated: int, grade: int) -> None:
    first = list(range(100, 150))
    token_ids = [*first, 7, *first[:num_repeated]]
    assert longest_repeat(token_ids) == num_repeated
    outlook = NgramDrafter().outlook(DraftingState(), token_ids)
    assert outlook.grade == grade and outlook.num_tokens >= 7


@pytest.mark.parametrize("token_ids", [[], [5], [5, 5], [1, 2, 3, 4], [1, 2, 3, 1]])
def test_without_a_match_there_is_nothing(token_ids: list[int]) -> None:
    """One token alone that was seen before is followed by anything; of two alike the second is the end itself."""
    assert NgramDrafter().outlook(DraftingState(), token_ids) == NOTHING


def test_there_is_a_proposal_where_one_was_announced_and_nowhere_else() -> None:
    """Token after token, of one sequence, so that the index has to see each before it is asked."""
    draws, drafter, drafting = random.Random(3), NgramDrafter(), DraftingState()
    token_ids = [draws.randrange(4) for _ in range(3)]
    seen = set()
    for _ in range(300):
        outlook = drafter.outlook(drafting, token_ids)
        (draft,) = drafter.propose([chunk(token_ids, drafting)])
        assert len(draft.token_ids) == min(3, outlook.num_tokens)
        assert (outlook == NOTHING) == (longest_repeat(token_ids) < 2)
        seen.add(outlook.num_tokens > 0)
        token_ids.append(draws.randrange(4))
    assert seen == {True, False}


def test_what_followed_last_is_proposed_and_repeats() -> None:
    drafting = DraftingState()
    (draft,) = NgramDrafter().propose([chunk([1, 2, 9, 1, 2, 8, 1, 2], drafting, 5)])
    assert draft.token_ids == (8, 1, 2, 8, 1)  # behind the end the text is taken to go on as it did


def test_a_long_prompt_is_indexed_bit_by_bit() -> None:
    """So that a question never takes long; what was not reached yet is not found yet."""
    first = list(range(10 * INDEXED_AT_ONCE // 4))
    token_ids = [*first, first[-3], first[-2]]
    index = NgramIndex()
    found = []
    for _ in range(4):
        index.extend(token_ids)
        found.append(index.match(token_ids) is not None)
    assert found == [False, False, True, True]


def test_large_parts_are_indexed_in_steps_and_small_ones_when_asked() -> None:
    """A question is asked on the event loop, of all sequences."""
    token_ids = [*range(INDEXED_AT_ONCE + INDEXED_AT_A_QUESTION + 100), 0, 1]
    drafting, drafter = DraftingState(), NgramDrafter()
    assert drafter.outlook(drafting, token_ids) != NOTHING  # 0 and 1 are among the first
    assert drafting.value.num_tokens == INDEXED_AT_A_QUESTION
    drafter.observe([Observed(chunk([], drafting, 0), range(1), None, ())], cast(ForwardOutput, None))  # of a prompt
    assert drafting.value.num_tokens == INDEXED_AT_A_QUESTION
    drafter.observe([Observed(chunk(token_ids, drafting, 0), range(1), 0, (7,))], cast(ForwardOutput, None))
    assert drafting.value.num_tokens == INDEXED_AT_A_QUESTION + INDEXED_AT_ONCE


def test_look_ups_are_free() -> None:
    assert NgramDrafter().outlook(DraftingState(), [1, 2, 3, 1, 2]).is_free
