"""How many tokens each running sequence drafts in the next step: what is expected to emit most tokens per second.

Acceptance is followed by sequence, grade and position, time by the shape of the step. What is uncertain is tried now
and then, within a budget. A choice depends on the text and on earlier steps only, never on what the target says in this
one, so the output keeps its law. To decide takes long beside a short step: but for the first steps and trials, what
steps taught is taken in a few of them at a time, or when a sequence ends, and a decision stands for as many steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.acceptance import AcceptanceBook, Chances, DraftOutcome
from decode.coverage import ExpertCoverage
from decode.draft_decision import DraftDecision, DraftDemand, DraftReason, StepOutcome
from decode.draft_options import Choice, DraftOptions, weigh
from decode.exploration import ExplorationBudget, ProbeTimetable
from decode.standing import MANY_SEQUENCES, Situation, StandingDecisions, Terms
from decode.step_time import StepForecast, StepTime

_ROWS_AHEAD = 8
_MOST_LOSS = 10.0  # of one trial, in steps: what a stalled machine lost was not lost by trying


@dataclass(frozen=True, slots=True)
class PolicySettings:
    exploration_share: float = 0.008  # of the time
    most_exploration_steps: float = 5.0  # saved up; also what the first steps may lose
    hysteresis: float = 0.01  # what drafting must gain over none, and another cap over the last one, to be chosen
    worth_trying: float = 0.03  # what a trial of another shape must be hoped to gain
    first_probe_wait: int = 16
    longest_probe_wait: int = 128
    plain_share: float = 0.004  # of the time, lost to plain steps that show whether drafting still pays
    most_probes: int = 2  # per step
    first_steps: int = 64  # each of which is learnt from at once
    steps_together: int = 8  # later: learnt from so many at a time; a decision serves as many steps of its kind
    longest_standing: int = 32  # observed steps after which it is made anew in any case


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
        self._unlearnt: list[tuple[DraftDecision, StepOutcome]] = []
        self._standing = StandingDecisions(self._settings.steps_together, self._settings.longest_standing)

    def choose_unasked(self, num_sequences: int) -> DraftDecision | None:
        """What `choose` would say of so many sequences whatever they could draft, if that is known."""
        return self._standing.find_unasked(num_sequences)

    def choose(self, demands: Sequence[DraftDemand], num_context_tokens: int, num_spare_tokens: int) -> DraftDecision:
        """`num_context_tokens`: of all sequences. `num_spare_tokens`: of the step, beside one token per sequence."""
        situation = Situation.of(demands, self._longest_draft, num_spare_tokens)
        reason = self._reason_for_none(situation)
        if reason is not None:
            return DraftDecision((0,) * len(demands), reason)
        decision = self._standing.find(situation)
        if decision is None:
            return self._decide(situation, num_context_tokens)
        self.acceptance.meet(demand.sequence_id for demand in demands)
        return decision

    def _decide(self, situation: Situation, num_context_tokens: int) -> DraftDecision:
        demands, limits, num_spare = situation.demands, situation.limits, situation.num_spare_tokens
        chances = self.acceptance.chances(
            [demand.sequence_id for demand in demands], [demand.outlook.grade for demand in demands]
        )
        most_drafts = sum(limits) + situation.most_changed * self._longest_draft
        forecast = self.step_time.forecast(len(demands), num_context_tokens, most_drafts, self._longest_draft)
        are_free = [demand.outlook.is_free for demand in demands]
        options = weigh(chances.survival, limits, are_free, num_spare, forecast)
        best = self._best(options)
        terms = _terms(chances, forecast, options, best)
        choice, reason = self._explore(options, best, forecast)
        if reason is DraftReason.PLAIN_FASTEST and self._plain_at == self._step:  # not trial after trial
            hopeful = weigh(chances.hopeful, limits, are_free, num_spare, forecast)
            trial = terms.decision(demands, hopeful.draft_lengths(hopeful.best), DraftReason.TRY_DRAFTS)
            seconds = float(hopeful.seconds[hopeful.best])
            if any(trial.draft_lengths) and self._may_lose(options, best, seconds, trial.num_expected_tokens):
                return trial
        decision = terms.decision(demands, options.draft_lengths(choice), reason)
        if not decision.is_settled:
            return decision
        self._cap = best[0]
        self._standing.add(situation, decision, terms)
        return self._with_probes(situation, decision, terms)

    def observe(self, decision: DraftDecision, outcome: StepOutcome) -> None:
        """`outcome` may differ from the decision: sequences leave, blocks run out, drafters propose less. A step that
        also ran a prefill belongs here for its drafts only: pass 0 for `verify_s`."""
        self._standing.observed()
        self._unlearnt.append((decision, outcome))
        is_new = self._step < self._settings.first_steps
        if is_new or not decision.is_settled or len(self._unlearnt) >= self._settings.steps_together:
            self._learn()

    def _learn(self) -> None:
        """From the steps that were observed since this was done last."""
        unlearnt, self._unlearnt = self._unlearnt, []  # nothing is learnt twice, whatever happens
        if self._step < self._settings.first_steps:  # each of them may change much
            self._standing.clear()
        for decision, outcome in unlearnt:
            self._learn_from(decision, outcome)
        self.acceptance.observe(*(outcome.drafts for _, outcome in unlearnt))

    def _learn_from(self, decision: DraftDecision, outcome: StepOutcome) -> None:
        self._step += 1
        shape = outcome.shape
        if self.coverage is not None and outcome.num_distinct_experts is not None:
            num_rows = outcome.num_sequences + shape.num_draft_tokens
            self.coverage.observe(outcome.num_sequences, num_rows, outcome.num_distinct_experts)
        self.step_time.observe(shape, outcome.verify_s, outcome.draft_s)
        self._note_drafts(decision, outcome.drafts)
        if not shape.num_draft_tokens and outcome.verify_s > 0:
            self._plain_at = self._step
        self._budget.earn()
        if decision.reason in (DraftReason.TRY_SHAPE, DraftReason.TRY_PLAIN):
            self._budget.spend(max(0.0, _loss(decision, outcome, decision.num_expected_tokens)))
        elif decision.reason is DraftReason.TRY_DRAFTS and outcome.verify_s > 0:
            num_tokens = outcome.num_sequences + sum(draft.num_accepted for draft in outcome.drafts)
            self._budget.spend(_loss(decision, outcome, num_tokens))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        self._learn()  # or it would come back to them
        sequence_ids = list(sequence_ids)
        self.acceptance.forget(sequence_ids)
        self._probes.forget(sequence_ids)

    def _reason_for_none(self, situation: Situation) -> DraftReason | None:
        """Why nothing can be drafted, if so."""
        if not any(demand.most_drafts > 0 for demand in situation.demands):
            return DraftReason.NOT_WANTED
        if not any(situation.limits):
            return DraftReason.NO_OFFER
        if situation.num_spare_tokens < 1:
            return DraftReason.NO_ROOM
        return None if self.step_time.is_known else DraftReason.NO_TIMES

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
        num_since_plain, loss = self._step - self._plain_at, 1.0 - float(options.rates[0, 0] / options.rates[best])
        plain_is_old = num_since_plain >= max(self._settings.steps_together, loss / self._settings.plain_share)
        if best[1] and plain_is_old and self._budget.allows(0.0):  # loses less than a step, and so may overdraw
            return (0, 0), DraftReason.TRY_PLAIN
        hoped = options.rates * (1.0 + forecast.doubt)[options.num_drafts]
        hopeful = options.highest(hoped)
        is_worth_it = hoped[hopeful] >= options.rates[best] * (1.0 + self._settings.worth_trying)
        num_seen_hopeful, num_seen_best = forecast.num_seen[[options.num_drafts[hopeful], options.num_drafts[best]]]
        seconds, num_tokens = float(options.seconds[hopeful]), float(options.num_tokens[hopeful])
        is_newer = num_seen_hopeful < num_seen_best
        if is_worth_it and is_newer and self._may_lose(options, best, seconds, num_tokens):
            return hopeful, DraftReason.TRY_SHAPE
        return best, DraftReason.FASTEST if best[1] else DraftReason.PLAIN_FASTEST

    def _may_lose(self, options: DraftOptions, best: Choice, seconds: float, num_tokens: float) -> bool:
        """Whether the budget allows a step of so many seconds that emits so many tokens."""
        loss_s = seconds - num_tokens / options.rates[best]
        return self._budget.allows(max(0.0, float(loss_s / options.seconds[best])))

    def _with_probes(self, situation: Situation, decision: DraftDecision, terms: Terms) -> DraftDecision:
        """Gives a draft to some sequences that could have one and have none, if any is due and the budget allows it.

        What stands is the decision without. Of a few sequences it is made anew as soon as a probe has succeeded.
        """
        lengths = list(decision.draft_lengths)
        most = min(situation.num_spare_tokens - sum(lengths), self._settings.most_probes)
        spent = 0.0
        probed_ids: list[str] = []
        for index, (demand, limit) in enumerate(zip(situation.demands, situation.limits, strict=True)):
            if lengths[index] or not limit or len(probed_ids) >= most:
                continue
            is_due = self._probes.is_due(demand.sequence_id, demand.outlook.grade, self._step)
            cost = (terms.free_draft_cost if demand.outlook.is_free else terms.draft_cost) / len(lengths)
            if is_due and self._budget.allows(spent + cost):
                spent += cost
                lengths[index] = 1
                probed_ids.append(demand.sequence_id)
        if not probed_ids:
            return decision
        reason = DraftReason.PROBE if decision.reason is DraftReason.PLAIN_FASTEST else decision.reason
        return terms.decision(situation.demands, lengths, reason, tuple(probed_ids))

    def _note_drafts(self, decision: DraftDecision, drafts: Sequence[DraftOutcome]) -> None:
        for draft in drafts:
            if draft.sequence_id in decision.probed_ids:
                cost = decision.free_draft_cost if draft.is_free else decision.draft_cost
                self._budget.spend((cost - draft.num_accepted) / decision.best_num_tokens)
                self._probes.probed(draft.sequence_id, draft.grade, self._step, accepted=draft.num_accepted > 0)
                if draft.num_accepted and len(decision.draft_lengths) < MANY_SEQUENCES:
                    self._standing.clear()
            elif draft.num_asked:
                self._probes.drafted(draft.sequence_id, draft.grade, self._step)


def _terms(chances: Chances, forecast: StepForecast, options: DraftOptions, best: Choice) -> Terms:
    """Times of steps that differ by a row may be told wrong: a draft costs what the steepest way to one of the next
    sizes does. None can pay if the likeliest is worth less than the flattest way to any size, as far as there are any.
    """
    cap, num_drafts = best[0], int(options.num_drafts[best])
    rate = options.rates[best]
    more = np.arange(1, forecast.most_drafts - num_drafts + 1)
    row_costs = rate * (forecast.verify_s[num_drafts + more] - forecast.verify_s[num_drafts]) / more
    row_cost = float(row_costs[:_ROWS_AHEAD].max(initial=0.0))
    longer = max(cap, 1)
    draft_s = forecast.draft_s[longer] + forecast.draft_token_s[longer] - forecast.draft_s[cap]
    likeliest = float(chances.by_grade[..., 0].max())
    reaches_all = forecast.most_drafts >= chances.survival.size
    return Terms(
        chances,
        forecast,
        best_num_tokens=float(options.num_tokens[best]),
        best_s=float(options.seconds[best]),
        cap=cap,
        draft_cost=row_cost + max(0.0, float(draft_s * rate)),
        free_draft_cost=row_cost,
        price=options.least_chance(best) if num_drafts else row_cost,
        none_pays=not num_drafts and reaches_all and likeliest < float(row_costs.min()),
    )


def _loss(decision: DraftDecision, outcome: StepOutcome, num_tokens: float) -> float:
    """Of a trial, in steps of the fastest choice: what it took beyond the time that choice emits as many tokens in."""
    seconds = outcome.verify_s + outcome.draft_s
    return min(seconds / decision.best_s - num_tokens / decision.best_num_tokens, _MOST_LOSS)
