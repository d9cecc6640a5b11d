"""How many tokens each running sequence drafts in the next step: what is expected to emit most tokens per second.

Acceptance is followed by sequence and position, time by the shape of the step; no drafts at all is one of the choices.
What is uncertain is tried now and then, within a budget: a shape of step that may turn out faster than forecast, the
plain step while drafting goes well, and sequences that stopped drafting. A choice depends on earlier steps only, never
on what the target says in this one, so the output keeps its law.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.acceptance import AcceptanceBook, DraftOutcome
from decode.coverage import ExpertCoverage
from decode.draft_decision import DraftDecision, DraftDemand, DraftReason, StepOutcome
from decode.draft_options import Choice, DraftOptions, weigh
from decode.exploration import ExplorationBudget, ProbeTimetable
from decode.step_time import StepForecast, StepShape, StepTime

_MOST_LOSS = 10.0  # of one trial, in steps: what a stalled machine lost was not lost by trying


@dataclass(frozen=True, slots=True)
class PolicySettings:
    exploration_share: float = 0.01  # of the time
    most_exploration_steps: float = 8.0  # saved up; also what the first steps may lose
    hysteresis: float = 0.01  # what drafting must gain over none, and another cap over the last one, to be chosen
    first_probe_wait: int = 16
    longest_probe_wait: int = 128
    plain_every: int = 256  # steps
    most_probes: int = 2  # per step


class DraftPolicy:
    """Event loop only. `choose` before a step, `observe` after it, `forget` when sequences end."""

    def __init__(
        self, longest_draft: int, coverage: ExpertCoverage | None = None, settings: PolicySettings | None = None
    ) -> None:
        self._settings = settings or PolicySettings()
        self._longest_draft = longest_draft
        self.coverage = coverage
        self.acceptance = AcceptanceBook(longest_draft)
        self.step_time = StepTime(longest_draft, coverage)
        self._budget = ExplorationBudget(self._settings.exploration_share, self._settings.most_exploration_steps)
        self._probes = ProbeTimetable(self._settings.first_probe_wait, self._settings.longest_probe_wait)
        self._step = 0
        self._plain_at = 0
        self._cap = 0

    def choose(self, demands: Sequence[DraftDemand], num_context_tokens: int, num_spare_tokens: int) -> DraftDecision:
        """`num_context_tokens`: of all sequences. `num_spare_tokens`: of the step, beside one token per sequence."""
        limits = np.array([min(demand.most_drafts, self._longest_draft) for demand in demands], dtype=np.intp)
        nothing = (0,) * len(demands)
        if num_spare_tokens < 1 or not (limits > 0).any():
            return DraftDecision(nothing, DraftReason.NO_ROOM)
        if not self.step_time.is_known:
            return DraftDecision(nothing, DraftReason.NO_TIMES)
        chances = self.acceptance.chances([demand.sequence_id for demand in demands])
        forecast = self.step_time.forecast(len(demands), num_context_tokens, int(limits.sum()), int(limits.max()))
        options = weigh(chances, limits, num_spare_tokens, forecast)
        best = self._best(options)
        choice, reason = self._explore(options, best, forecast)
        lengths = options.draft_lengths(choice)
        probed_ids: tuple[str, ...] = ()
        if reason in (DraftReason.FASTEST, DraftReason.PLAIN_FASTEST):
            self._cap = best[0]
            probed_ids = self._probe(demands, lengths, num_spare_tokens, options, best)
        if probed_ids and reason is DraftReason.PLAIN_FASTEST:
            reason = DraftReason.PROBE
        return DraftDecision(
            tuple(lengths),
            reason,
            probed_ids,
            float(options.num_tokens[choice]),
            float(options.seconds[choice]),
            forecast.plain_s,
            float(options.num_tokens[best]),
            float(options.seconds[best]),
            float(options.seconds[choice] - forecast.verify_s[options.num_rows[choice]]),
        )

    def observe(self, decision: DraftDecision, outcome: StepOutcome) -> None:
        """`outcome` may differ from the decision: sequences leave, blocks run out, drafters propose less. A step that
        also ran a prefill belongs here for its drafts only: pass 0 for `verify_s`."""
        self._step += 1
        num_drafted = sum(draft.num_drafted for draft in outcome.drafts)
        asked = [draft.num_asked for draft in outcome.drafts]
        shape = StepShape(
            outcome.num_sequences, outcome.num_context_tokens, num_drafted, sum(asked), max(asked, default=0)
        )
        if self.coverage is not None and outcome.num_distinct_experts is not None:
            num_rows = outcome.num_sequences + num_drafted
            self.coverage.observe(outcome.num_sequences, num_rows, outcome.num_distinct_experts)
        self.step_time.observe(shape, outcome.verify_s, outcome.draft_s)
        self.acceptance.observe(outcome.drafts)
        self._note_drafts(decision, outcome.drafts)
        if not num_drafted and outcome.verify_s > 0:
            self._plain_at = self._step
        self._budget.earn()
        if decision.reason in (DraftReason.TRY_SHAPE, DraftReason.TRY_PLAIN):
            self._budget.spend(_loss(decision, outcome.verify_s + outcome.draft_s))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        sequence_ids = list(sequence_ids)
        self.acceptance.forget(sequence_ids)
        self._probes.forget(sequence_ids)

    def _best(self, options: DraftOptions) -> Choice:
        """The fastest, but what is hardly slower goes first: no drafts, and then the cap of the step before."""
        best = options.best
        enough = options.rates[best] / (1.0 + self._settings.hysteresis)
        if options.rates[0, 0] >= enough:
            return 0, 0
        if self._cap < len(options.rates):
            stay = self._cap, int(options.rates[self._cap].argmax())
            return stay if options.rates[stay] >= enough else best
        return best

    def _explore(self, options: DraftOptions, best: Choice, forecast: StepForecast) -> tuple[Choice, DraftReason]:
        """Another choice than the best if it has to be tried and may be."""
        plain_is_old = self._step - self._plain_at >= self._settings.plain_every
        if plain_is_old and self._budget.allows(0.0):  # loses less than a step, and so may overdraw
            return (0, 0), DraftReason.TRY_PLAIN
        hopeful = options.highest(options.rates * (1.0 + forecast.doubt)[options.num_rows])
        num_seen_hopeful, num_seen_best = forecast.num_seen[[options.num_rows[hopeful], options.num_rows[best]]]
        if num_seen_hopeful < num_seen_best and self._may_lose(options, best, hopeful):
            return hopeful, DraftReason.TRY_SHAPE
        return best, DraftReason.FASTEST if best[1] else DraftReason.PLAIN_FASTEST

    def _may_lose(self, options: DraftOptions, best: Choice, choice: Choice) -> bool:
        loss_s = options.seconds[choice] - options.num_tokens[choice] / options.rates[best]
        return self._budget.allows(max(0.0, float(loss_s / options.seconds[best])))

    def _probe(
        self,
        demands: Sequence[DraftDemand],
        lengths: list[int],
        num_spare_tokens: int,
        options: DraftOptions,
        best: Choice,
    ) -> tuple[str, ...]:
        """Gives one draft to sequences that have none and are due; changes `lengths`."""
        num_spare = min(num_spare_tokens - sum(lengths), self._settings.most_probes)
        probed_ids: list[str] = []
        for index, demand in enumerate(demands):
            if lengths[index] == 0 and demand.most_drafts > 0 and len(probed_ids) < num_spare:
                loss = _row_cost(options, best)
                if self._probes.is_due(demand.sequence_id, self._step) and self._budget.allows(loss):
                    self._budget.spend(loss)
                    lengths[index] = 1
                    probed_ids.append(demand.sequence_id)
        return tuple(probed_ids)

    def _note_drafts(self, decision: DraftDecision, drafts: Sequence[DraftOutcome]) -> None:
        for draft in drafts:
            if draft.sequence_id in decision.probed_ids:
                self._probes.probed(draft.sequence_id, self._step, accepted=draft.num_accepted > 0)
            elif draft.num_asked:
                self._probes.drafted(draft.sequence_id, self._step)


def _row_cost(options: DraftOptions, best: Choice) -> float:
    """What one draft more would cost if it were in vain, in steps."""
    cap = max(best[0], 1)
    column = min(best[1] + 1, options.seconds.shape[1] - 1)
    return max(0.0, float(options.seconds[cap, column] / options.seconds[best]) - 1.0)


def _loss(decision: DraftDecision, seconds: float) -> float:
    """Of a trial, in steps of the fastest choice: what it took beyond the time that choice emits as much in."""
    useful_steps = decision.num_expected_tokens / decision.best_num_tokens
    return min(max(0.0, seconds / decision.best_s - useful_steps), _MOST_LOSS)
