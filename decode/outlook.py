"""What a drafter has to offer for a sequence, told before it is decided how much to draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.runner import DraftingState
from model.sampling_params import MAX_DRAFT_TOKENS

NUM_GRADES = 4


@dataclass(frozen=True, slots=True)
class Outlook:
    """At most `num_tokens` could be proposed now. `grade`, 0 to NUM_GRADES - 1: how sure the drafter is of them.

    `is_free`: to propose them takes next to no time, as a look-up does. What a grade is worth is learnt from what
    becomes of its drafts, so a drafter may number its kinds of guesses as it likes. It must depend on the text so far
    only.
    """

    num_tokens: int
    grade: int = 0
    is_free: bool = False


NOTHING, ANYTHING = Outlook(0), Outlook(MAX_DRAFT_TOKENS)

OutlookOf = Callable[[DraftingState, Sequence[int]], Outlook]
"""The outlook of a sequence, from its state and all of its tokens. Event loop only, while no step runs."""
