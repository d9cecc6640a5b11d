"""Between scheduler and policy: asks how much to draft for the batch at hand, and reports what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from decode import metrics
from decode.acceptance import DraftOutcome
from decode.decoding import DecodeSequence
from decode.draft_decision import DraftDecision, DraftDemand, DraftReason, StepOutcome, most_useful_drafts
from decode.draft_log import DraftLog, DraftReport
from decode.draft_meter import DraftMeter
from decode.draft_policy import DraftPolicy
from decode.outlook import NOTHING, Outlook, OutlookOf
from model.runner import Outcome, StepOutput, VerifiedDraft
from model.sequence import Sequence


class DraftPlanner(Protocol):
    """Says how much to draft, and learns from what became of it. Event loop only.

    `reason`: why the last step was to have so many drafts; empty where nothing ever drafts.
    """

    @property
    def reason(self) -> str: ...

    def plan(self, decoding: Items[DecodeSequence], num_tokens: int) -> Items[int]:
        """Drafts for each of these, which all run in the next step, at most `num_tokens` together with their tokens."""
        ...

    def withdraw(self, decoding: DecodeSequence) -> None:
        """Of what was planned this one gets nothing: there are no blocks for it."""
        ...

    def learn(self, results: Items[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        """What became of a step; `was_mixed` if prompts were computed in it, too."""
        ...

    def forget(self, decoding: DecodeSequence) -> None:
        """The sequence has ended."""
        ...

    def reports(self) -> Items[DraftReport]:
        """What became of all drafts, one for each source of them."""
        ...


class NoDrafts:
    """The planner of a worker without a drafter."""

    reason = ""

    def plan(self, decoding: Items[DecodeSequence], num_tokens: int) -> Items[int]:
        return [0] * len(decoding)

    def withdraw(self, decoding: DecodeSequence) -> None:
        """Nothing to take back that is kept."""

    def learn(self, results: Items[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        """There is nothing to learn."""

    def forget(self, decoding: DecodeSequence) -> None:
        """Nothing is known of it."""

    def reports(self) -> Items[DraftReport]:
        return ()


class FixedDrafts(NoDrafts):
    """So many for everybody, where they can be of use and the drafter has as many."""

    reason = "fixed"

    def __init__(self, num_drafts: int, max_context_tokens: int, outlook: OutlookOf, drafter: str = "") -> None:
        """`drafter`: what people call it."""
        self.log = DraftLog(drafter)
        self._num_drafts = num_drafts
        self._max_context_tokens = max_context_tokens
        self._outlook = outlook
        self._asked: dict[DecodeSequence, int] = {}
        self._outlooks: dict[DecodeSequence, Outlook] = {}

    def plan(self, decoding: Items[DecodeSequence], num_tokens: int) -> Items[int]:
        spare = num_tokens - len(decoding)
        self._asked, self._outlooks = {}, {}
        for each in decoding:
            demand = demand_of(each, self._num_drafts, self._max_context_tokens, self._outlook)
            self._asked[each] = min(spare, demand.most_drafts, demand.outlook.num_tokens)
            self._outlooks[each] = demand.outlook
            spare -= self._asked[each]
        return list(self._asked.values())

    def withdraw(self, decoding: DecodeSequence) -> None:
        self._asked[decoding] = 0

    def learn(self, results: Items[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        metrics.DRAFTS.asked(self._asked.values())
        drafts = outcomes(results, self._asked, self._outlooks)
        self.log.add(drafts, len(self._asked) - len(drafts))

    def reports(self) -> Items[DraftReport]:
        return self.log.reports()


class AdaptiveDrafts:
    """By `DraftPolicy`: what is expected to emit most tokens per second."""

    def __init__(
        self,
        policy: DraftPolicy,
        longest_draft: int,
        max_context_tokens: int,
        outlook: OutlookOf,
        drafter: str = "",
    ) -> None:
        """`drafter`: what people call it."""
        self.policy = policy
        self.meter = DraftMeter()
        self.log = DraftLog(drafter)
        self._longest_draft = longest_draft
        self._max_context_tokens = max_context_tokens
        self._outlook = outlook
        self._decision = DraftDecision((), DraftReason.NOT_WANTED)
        self._asked: dict[DecodeSequence, int] = {}
        self._outlooks: dict[DecodeSequence, Outlook] = {}
        self._num_context_tokens = 0

    @property
    def reason(self) -> str:
        return self._decision.reason

    def reports(self) -> Items[DraftReport]:
        return self.log.reports()

    def plan(self, decoding: Items[DecodeSequence], num_tokens: int) -> Items[int]:
        if not decoding:
            self._asked = {}  # of a step that failed nothing is learnt
            return []
        self._num_context_tokens = sum(each.sequence.num_tokens for each in decoding)
        decision = self.policy.choose_unasked(len(decoding))
        if decision is not None:  # nobody need be asked
            return self._decided(decoding, decision)
        demands = [demand_of(each, self._longest_draft, self._max_context_tokens, self._outlook) for each in decoding]
        self._outlooks = {each: demand.outlook for each, demand in zip(decoding, demands, strict=True)}
        return self._decided(
            decoding, self.policy.choose(demands, self._num_context_tokens, num_tokens - len(decoding))
        )

    def _decided(self, decoding: Items[DecodeSequence], decision: DraftDecision) -> Items[int]:
        self._decision = decision
        self._asked = dict(zip(decoding, decision.draft_lengths, strict=True))
        metrics.DECISIONS.labels(decision.reason).inc()
        return decision.draft_lengths

    def withdraw(self, decoding: DecodeSequence) -> None:
        self._asked[decoding] = 0

    def learn(self, results: Items[tuple[DecodeSequence, Outcome]], output: StepOutput, *, was_mixed: bool) -> None:
        if not self._asked:
            return
        metrics.DRAFTS.asked(self._asked.values())
        drafts = outcomes(results, self._asked, self._outlooks)
        self.log.add(drafts, len(self._asked) - len(drafts))
        step = StepOutcome(
            num_sequences=len(self._asked),
            num_context_tokens=self._num_context_tokens,
            drafts=drafts,
            verify_s=0.0 if was_mixed else output.compute_s - output.draft_s,
            draft_s=output.draft_s,
            num_distinct_experts=None if was_mixed else output.num_distinct_experts,
        )
        self._measure(step)
        self.policy.observe(self._decision, step)
        self._asked = {}

    def _measure(self, step: StepOutcome) -> None:
        num_drafted = sum(draft.num_drafted for draft in step.drafts)
        num_experts = 0.0
        if self.policy.coverage is not None and step.num_distinct_experts is not None:
            num_rows = np.array([float(step.num_sequences + num_drafted)])
            num_experts = float(self.policy.coverage.predict(step.num_sequences, num_rows)[0])
            if num_drafted:
                metrics.EXPERTS.observe(step.num_distinct_experts)
        if tuple(self._asked.values()) == self._decision.draft_lengths:  # or it was another step that was forecast
            self.meter.observe(self._decision, step, num_experts)
            if step.drafts:
                self.log.timed(self._decision, step)

    def forget(self, decoding: DecodeSequence) -> None:
        self.policy.forget([decoding.sequence.sequence_id])


def outcomes(
    results: Items[tuple[DecodeSequence, Outcome]],
    asked: Mapping[DecodeSequence, int],
    outlooks: Mapping[DecodeSequence, Outlook],
) -> tuple[DraftOutcome, ...]:
    """Of the sequences that were asked for drafts, but for those whose drafter has failed."""
    drafts = (
        draft_outcome(decoding.sequence, asked[decoding], outlooks[decoding], outcome)
        for decoding, outcome in results
        if asked.get(decoding)
    )
    return tuple(draft for draft in drafts if draft is not None)


def draft_outcome(sequence: Sequence, num_asked: int, outlook: Outlook, outcome: Outcome) -> DraftOutcome | None:
    """What became of a draft that was asked for after this outlook. None if the drafter has failed."""
    if isinstance(outcome, VerifiedDraft):
        num_drafted, num_accepted, nodes = outcome.num_drafted, len(outcome.tokens) - 1, outcome.nodes
    elif sequence.drafting.failed:
        return None
    else:
        num_drafted, num_accepted, nodes = 0, 0, None
    return DraftOutcome(
        sequence.sequence_id, num_asked, num_drafted, num_accepted, outlook.grade, nodes, outlook.is_free
    )


def most_drafts(decoding: DecodeSequence, longest_draft: int, max_context_tokens: int) -> int:
    """Beyond which no draft of this sequence can be of use, or is allowed."""
    sequence = decoding.sequence
    if sequence.drafting.failed:
        return 0
    return most_useful_drafts(
        sequence.sampling.max_tokens - sequence.num_output_tokens,
        max_context_tokens - sequence.num_tokens,
        longest_draft,
        sequence.sampling.max_draft_tokens,
    )


def demand_of(decoding: DecodeSequence, longest_draft: int, max_context_tokens: int, outlook: OutlookOf) -> DraftDemand:
    """The drafter is asked only where a draft may be of use."""
    sequence = decoding.sequence
    most = most_drafts(decoding, longest_draft, max_context_tokens)
    offered = outlook(sequence.drafting, sequence.token_ids) if most else NOTHING
    return DraftDemand(sequence.sequence_id, most, offered)
