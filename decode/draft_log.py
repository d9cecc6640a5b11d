"""What became of drafts, by who made them: for people, who see acceptance by position, lengths and speed-up.

Event loop only. The last few hundred drafts of a source count for what is said of lately: the weight of each is a
little more than that of the one before, so that a draft costs the same however long drafts can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.acceptance import DraftOutcome
from decode.draft_decision import DraftDecision, StepOutcome
from decode.draft_meter import DraftMeter

_GROWTH = 1 / 0.997  # of the weight, per draft
_MOST_WEIGHT = 1e100
_LOOKUP = "ngram"


@dataclass(frozen=True, slots=True)
class DraftReport:
    """`acceptance`: by position, of drafts that got there, lately; of a tree's node, whatever became of others.
    `lengths[n]`: times that a sequence drafted n tokens in a step. `tokens_per_step`: what a sequence emitted where it
    drafted, lately. `speedup`: of steps in which nobody else drafted, against the forecast plain step; 0: not known.
    """

    source: str
    acceptance: tuple[float, ...]
    lengths: tuple[int, ...]
    tokens_per_step: float
    speedup: float
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class _Source:
    name: str
    lengths: list[int] = field(default_factory=lambda: [0])
    reached: list[float] = field(default_factory=list)  # weights, by position
    stood: list[float] = field(default_factory=list)
    num_tokens: float = 0.0  # weighted, as the next
    num_drafts: float = 0.0
    weight: float = 1.0
    num_drafted: int = 0
    num_accepted: int = 0
    meter: DraftMeter = field(default_factory=DraftMeter)

    def add(self, draft: DraftOutcome) -> None:
        num_drafted = draft.num_drafted
        self._reach(num_drafted)
        self.lengths[num_drafted] += 1
        if not num_drafted:
            return
        self.num_drafted += num_drafted
        self.num_accepted += draft.num_accepted
        self.num_tokens += self.weight * (1 + draft.num_accepted)
        self.num_drafts += self.weight
        for position in range(draft.num_looked_at):
            self.reached[position] += self.weight
        for position in range(draft.num_accepted) if draft.nodes is None else draft.nodes:
            self.stood[position] += self.weight
        self.weight *= _GROWTH
        if self.weight > _MOST_WEIGHT:
            self._lighten()

    def report(self) -> DraftReport:
        speedup = self.meter.speedup(self.meter.measured)
        return DraftReport(
            source=self.name,
            acceptance=tuple(
                stood / reached for stood, reached in zip(self.stood, self.reached, strict=True) if reached
            ),
            lengths=tuple(self.lengths),
            tokens_per_step=self.num_tokens / self.num_drafts if self.num_drafts else 0.0,
            speedup=0.0 if math.isnan(speedup) else speedup,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

    def _reach(self, length: int) -> None:
        missing = length + 1 - len(self.lengths)
        if missing > 0:
            self.lengths += [0] * missing
            self.reached += [0.0] * missing
            self.stood += [0.0] * missing

    def _lighten(self) -> None:
        """All by the same factor, which no ratio notices."""
        self.reached = [each / self.weight for each in self.reached]
        self.stood = [each / self.weight for each in self.stood]
        self.num_tokens /= self.weight
        self.num_drafts /= self.weight
        self.weight = 1.0


class DraftLog:
    """Of a drafter by its name for people: `eagle+ngram` is two sources, and the look-up's drafts are the free ones."""

    def __init__(self, drafter: str) -> None:
        name, _, lookup = drafter.partition("+")
        self._first = _Source(name)
        self._lookup = _Source(_LOOKUP) if lookup else self._first
        self._sources = [self._first, self._lookup] if lookup else [self._first]

    def add(self, drafts: Sequence[DraftOutcome], num_undrafted: int) -> None:
        """Of a step: those that were asked for, and how many sequences were not asked for any. These count with the
        first source."""
        for draft in drafts:
            self._of(draft).add(draft)
        self._first.lengths[0] += num_undrafted

    def timed(self, decision: DraftDecision, step: StepOutcome) -> None:
        """A step with drafts that was as forecast. What several sources share says nothing of one."""
        kinds = {draft.is_free for draft in step.drafts}
        if len(self._sources) == 1 or len(kinds) == 1:
            self._of(step.drafts[0]).meter.observe(decision, step, 0.0)

    def reports(self) -> list[DraftReport]:
        return [source.report() for source in self._sources]

    def _of(self, draft: DraftOutcome) -> _Source:
        return self._lookup if draft.is_free else self._first
