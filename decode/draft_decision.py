"""The words between those who schedule a step and the policy on its drafts: demand, decision, outcome."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from decode.acceptance import DraftOutcome
from decode.outlook import ANYTHING, Outlook
from decode.step_time import StepShape


class DraftReason(enum.StrEnum):
    FASTEST = "fastest"  # drafts, because that is expected to be fastest
    PLAIN_FASTEST = "plain_fastest"  # no drafts, for the same reason
    NO_ROOM = "no_room"  # the step has no room for more than a token of each sequence
    NOT_WANTED = "not_wanted"  # no sequence may draft: switched off, failed, or about to end
    NO_OFFER = "no_offer"  # for none that may the drafter has anything to propose
    NO_TIMES = "no_times"  # no step was measured yet: a plain one comes first
    TRY_SHAPE = "try_shape"  # a step of this size may be faster than forecast
    TRY_DRAFTS = "try_drafts"  # too little is known of acceptance to say that plain is fastest
    TRY_PLAIN = "try_plain"  # the plain step's time is old
    PROBE = "probe"  # plain would be fastest, but a sequence is tried again


_UNSETTLED = frozenset(
    (DraftReason.NO_TIMES, DraftReason.TRY_SHAPE, DraftReason.TRY_DRAFTS, DraftReason.TRY_PLAIN, DraftReason.PROBE)
)


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """A running sequence, how many drafts it may have at most (see `most_useful_drafts`), and what there is for it."""

    sequence_id: str
    most_drafts: int
    outlook: Outlook = ANYTHING


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """`draft_lengths[i]` belongs to demand i. Forecasts are of all sequences together; NaN where nothing is known."""

    draft_lengths: tuple[int, ...]
    reason: DraftReason
    probed_ids: tuple[str, ...] = ()
    num_expected_tokens: float = math.nan
    expected_s: float = math.nan
    plain_s: float = math.nan
    best_num_tokens: float = math.nan  # of the choice that seemed fastest
    best_s: float = math.nan
    expected_draft_s: float = math.nan  # of `expected_s`, the drafter's part
    draft_cost: float = math.nan  # of one draft more: in tokens that the fastest choice emits in the time it takes
    free_draft_cost: float = math.nan  # the same if the drafter has it for nothing

    @property
    def is_settled(self) -> bool:
        """Nothing was tried: the same again would be as good."""
        return self.reason not in _UNSETTLED and not self.probed_ids

    @property
    def expected_speedup(self) -> float:
        """Against a plain step for the same sequences."""
        return self.num_expected_tokens / len(self.draft_lengths) * self.plain_s / self.expected_s


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did and took. `drafts`: of the sequences that drafted. `num_distinct_experts`: mean over layers."""

    num_sequences: int
    num_context_tokens: int
    drafts: tuple[DraftOutcome, ...]
    verify_s: float
    draft_s: float
    num_distinct_experts: float | None = None

    @property
    def shape(self) -> StepShape:
        """What the step's time is learnt by: what a free draft takes is its verification alone."""
        asked = [draft.num_asked for draft in self.drafts if not draft.is_free]
        num_drafted = sum(draft.num_drafted for draft in self.drafts)
        return StepShape(self.num_sequences, self.num_context_tokens, num_drafted, sum(asked), max(asked, default=0))


def most_useful_drafts(
    num_tokens_left: int, num_context_left: int, longest_draft: int, requested: int | None = None
) -> int:
    """`num_tokens_left`: to max_tokens; a step emits one token beside its drafts, and none may come after the last.

    `num_context_left`: positions the model has behind the sequence's last token. `requested`: 0 is off.
    """
    limits = [num_tokens_left - 1, num_context_left, longest_draft]
    return max(0, min(limits if requested is None else [*limits, requested]))
