"""Decisions that stand: to decide takes long beside a short step, so that one serves some steps.

Steps of the same situation get it as it was made. Where a few of many sequences have other offers than then, as
look-ups come and go, or are new, those alone draft what is worth its price, as long as that is expected to be faster
than no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.acceptance import Chances, Floats
from decode.draft_decision import DraftDecision, DraftDemand, DraftReason
from decode.step_time import StepForecast

MANY_SEQUENCES = 8  # in a smaller batch each changes too much of the step for prices to hold
_MOST_CHANGED = 0.5  # of the sequences, for the same


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision depends on, beside what was learnt. The context grows too little while a decision stands.

    `limits[i]`: drafts that sequence i may have. `num_spare_tokens`: at most all these together.
    """

    demands: tuple[DraftDemand, ...]
    limits: tuple[int, ...]
    num_spare_tokens: int

    @classmethod
    def of(cls, demands: Sequence[DraftDemand], longest_draft: int, num_spare_tokens: int) -> Situation:
        limits = tuple(min(each.most_drafts, each.outlook.num_tokens, longest_draft) for each in demands)
        return cls(tuple(demands), limits, min(num_spare_tokens, sum(limits)))

    @property
    def most_changed(self) -> int:
        """Sequences that may demand something else for prices to hold: forecasts reach as far as that takes."""
        num_sequences = len(self.demands)
        return int(_MOST_CHANGED * num_sequences) if num_sequences >= MANY_SEQUENCES else 0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a decision is made on, enough to make it anew for other drafts or, at its price, for other offers.

    `cap`: drafts that a sequence has at most, if they take the drafter time. `draft_cost`, `free_draft_cost`: of one
    more than was chosen, in tokens that the fastest choice emits meanwhile. `price`: the chance that drafts must have
    for a step like that: that of the least likely one which is, or such a cost if none is. `none_pays`: no offer
    of any sequence could be worth a draft.
    """

    chances: Chances
    forecast: StepForecast
    best_num_tokens: float
    best_s: float
    cap: int
    draft_cost: float
    free_draft_cost: float
    price: float
    none_pays: bool

    def decision(
        self,
        demands: Sequence[DraftDemand],
        lengths: Sequence[int],
        reason: DraftReason,
        probed_ids: tuple[str, ...] = (),
    ) -> DraftDecision:
        """Other demands than it was made for are fine, of as many sequences."""
        asked = [length for length, demand in zip(lengths, demands, strict=True) if not demand.outlook.is_free]
        draft_s = self.forecast.drafting_s(max(asked, default=0), sum(asked))
        pairs = zip(demands, lengths, strict=True)
        num_accepted = sum(float(self._survival(demand)[:length].sum()) for demand, length in pairs if length)
        return DraftDecision(
            tuple(lengths),
            reason,
            probed_ids,
            num_expected_tokens=len(lengths) + num_accepted,
            expected_s=float(self.forecast.verify_s[sum(lengths)]) + draft_s,
            plain_s=self.forecast.plain_s,
            best_num_tokens=self.best_num_tokens,
            best_s=self.best_s,
            expected_draft_s=draft_s,
            draft_cost=self.draft_cost,
            free_draft_cost=self.free_draft_cost,
        )

    def num_worthwhile(self, demand: DraftDemand, limit: int) -> int:
        """Drafts that a step like this should have for it. What time they take the drafter depends on the cap."""
        most = limit if demand.outlook.is_free else min(limit, self.cap)
        return int((self._survival(demand)[:most] >= self.price).sum())

    def _survival(self, demand: DraftDemand) -> Floats:
        return self.chances.of(demand.sequence_id, demand.outlook.grade)


@dataclass(slots=True)
class _Standing:
    """`num_steps_left` that it is good for, and the number of observed steps at which it ends in any case."""

    situation: Situation
    decision: DraftDecision
    terms: Terms
    num_steps_left: int
    ends_at: int

    def at_its_price(self, situation: Situation) -> DraftDecision | None:
        """Of other demands. None if they are too different, want too much, or would lose by it."""
        if len(self.situation.demands) != len(situation.demands):
            return None
        before = dict(zip(self.situation.demands, self.decision.draft_lengths, strict=True))
        lengths = [before.get(demand, -1) for demand in situation.demands]
        if lengths.count(-1) > situation.most_changed:
            return None
        for index, length in enumerate(lengths):
            if length < 0:
                lengths[index] = self.terms.num_worthwhile(situation.demands[index], situation.limits[index])
        if sum(lengths) > min(situation.num_spare_tokens, self.terms.forecast.most_drafts):
            return None
        reason = DraftReason.FASTEST if any(lengths) else DraftReason.PLAIN_FASTEST
        decision = self.terms.decision(situation.demands, lengths, reason)
        return decision if decision.expected_speedup >= 1.0 or not any(lengths) else None


class StandingDecisions:
    """Each ends after `num_steps` that it serves, or `longest` that were observed."""

    def __init__(self, num_steps: int, longest: int) -> None:
        self._num_steps = num_steps
        self._longest = longest
        self._by_situation: dict[Situation, _Standing] = {}
        self._latest: _Standing | None = None
        self._num_observed = 0

    def add(self, situation: Situation, decision: DraftDecision, terms: Terms) -> None:
        """It serves the step it was made for, and some more."""
        self._by_situation = {
            kind: each for kind, each in self._by_situation.items() if each.ends_at > self._num_observed
        }
        ends_at = self._num_observed + self._longest
        self._latest = _Standing(situation, decision, terms, self._num_steps - 1, ends_at)
        self._by_situation[situation] = self._latest

    def find_unasked(self, num_sequences: int) -> DraftDecision | None:
        """One that serves this step of so many sequences whatever they offer: that nobody drafts."""
        latest = self._latest
        if latest is None or not latest.terms.none_pays or len(latest.situation.demands) != num_sequences:
            return None
        if not self._is_good(latest):
            return None
        latest.num_steps_left -= 1
        return latest.decision

    def find(self, situation: Situation) -> DraftDecision | None:
        """One that serves this step."""
        same = self._by_situation.get(situation)
        standing = same or self._latest
        if standing is None or not self._is_good(standing):
            return None
        decision = same.decision if same else standing.at_its_price(situation)
        standing.num_steps_left -= decision is not None
        return decision

    def _is_good(self, standing: _Standing) -> bool:
        return standing.num_steps_left > 0 and standing.ends_at > self._num_observed

    def observed(self) -> None:
        """A step has ended."""
        self._num_observed += 1

    def clear(self) -> None:
        self._by_situation.clear()
        self._latest = None
