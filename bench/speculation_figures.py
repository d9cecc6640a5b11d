"""From steps to figures: rates and their ratios, acceptance by position, and what the formula makes of them.

Letters: B sequences, K drafts asked of each, E tokens that a step emits of one sequence, T seconds of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bench.decode_run import DecodeStep
from decode.coverage import ExpertCoverage, Routing
from decode.outlook import NUM_GRADES
from decode.step_time import StepShape, StepTime

STALL = 4.0  # a step that took more than so many medians was held up by something else, and counts as so many


@dataclass(frozen=True, slots=True)
class Acceptance:
    """By position: chance that a draft stands if all before it stand, None where none got so far, and the same by the
    drafter's grade; in which share of their steps sequences had drafts. Of a tree, a position is a node's place, the
    best first, and its chance does not depend on what became of others."""

    rates: tuple[float | None, ...]
    rates_by_grade: tuple[tuple[float | None, ...], ...]
    offered: float
    tree_grades: frozenset[int] = frozenset()

    def expected(self, num_drafts: int, grade: int) -> float:
        """E of a sequence in a step that verifies so many of its drafts: what the formula says."""
        if grade in self.tree_grades:
            return 1.0 + sum(rate or 0.0 for rate in self.rates_by_grade[grade][:num_drafts])
        total = survival = 1.0
        for rate in self.rates_by_grade[grade][:num_drafts]:
            survival *= rate or 0.0
            total += survival
        return total


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one model, batch, set and drafter. `fixed` and `predicted` are ratios to no drafting in the same run, by K, as
    are `best_fixed` (see the function) and `adaptive`; `draft_cost` is c, a draft in plain steps; `experts` are
    distinct ones per layer, measured, by rows of a step."""

    plain_tokens_per_s: float
    plain_step_s: float
    fixed: Mapping[int, float]
    best_fixed: float
    predicted: Mapping[int, float]
    adaptive: float
    adaptive_error: float  # standard error, as all errors
    adaptive_vs_best_fixed_error: float  # about, by the way that was best over all rounds
    adaptive_length: float  # drafts it asked for, per sequence and step
    acceptance: Acceptance
    draft_cost: float
    verify_cost: Mapping[int, float]  # by K, in plain steps: the step without its drafting
    experts: Mapping[int, float]
    beta: float | None
    alike: float  # share of the answers that are the same as without drafting

    @property
    def adaptive_vs_best_fixed(self) -> float:
        return self.adaptive / self.best_fixed

    @property
    def errors(self) -> dict[int, float]:
        """Of the prediction, relative, by K."""
        return {count: abs(self.predicted[count] / self.fixed[count] - 1.0) for count in self.fixed}


def seconds_of(steps: Sequence[DecodeStep]) -> float:
    """Of all steps together, with stalls cut short: they hit whoever is running."""
    limit = STALL * statistics.median(step.seconds for step in steps)
    return sum(min(step.seconds, limit) for step in steps)


def tokens_per_second(steps: Sequence[DecodeStep]) -> float:
    return sum(step.num_tokens for step in steps) / seconds_of(steps)


def best_fixed(rounds: Mapping[int, Sequence[Sequence[DecodeStep]]]) -> float:
    """Of the ways by K, 0 among them, the best one's tokens per second over those of K = 0. Steps by way and round.

    The best of several noisy figures is the luckiest, too: so what is best in one half of the rounds is judged by the
    other, both ways.
    """
    halves = [{way: list(chain(*of_way[first::2])) for way, of_way in rounds.items()} for first in (0, 1)]
    ratios = []
    for chosen_by, judged_by in (halves, halves[::-1]):
        best = max(chosen_by, key=lambda way: tokens_per_second(chosen_by[way]))
        ratios.append(tokens_per_second(judged_by[best]) / tokens_per_second(judged_by[0]))
    return statistics.geometric_mean(ratios)


def ratio_error(rounds: Sequence[Sequence[DecodeStep]], others: Sequence[Sequence[DecodeStep]]) -> float:
    """Standard error of the ratio of two runs' tokens per second, from how it differs between rounds."""
    pairs = zip(rounds, others, strict=True)
    logs = [math.log(tokens_per_second(mine) / tokens_per_second(theirs)) for mine, theirs in pairs]
    return statistics.stdev(logs) / math.sqrt(len(logs))


def acceptance_of(steps: Sequence[DecodeStep], longest: int) -> Acceptance:
    counts = np.zeros((2, NUM_GRADES, longest))  # looked at, stood
    positions = np.arange(longest)
    drafts = [draft for step in steps for draft in step.drafts]
    for draft in drafts:
        stood = positions < draft.num_accepted if draft.nodes is None else np.isin(positions, draft.nodes)
        counts[:, draft.grade] += np.stack((positions < draft.num_looked_at, stood))
    return Acceptance(
        _ratios(counts.sum(axis=1)),
        tuple(_ratios(counts[:, grade]) for grade in range(NUM_GRADES)),
        len(drafts) / sum(step.num_sequences for step in steps),
        frozenset(draft.grade for draft in drafts if draft.nodes is not None),
    )


def _ratios(counts: NDArray[np.float64]) -> tuple[float | None, ...]:
    looked, stood = counts.tolist()
    return tuple(part / whole if whole else None for part, whole in zip(stood, looked, strict=True))


def draft_cost(steps: Iterable[DecodeStep], plain_step_s: float) -> float:
    """c: a draft of every sequence that drafts, in plain steps; 0 where all are looked up."""
    drafting = [step for step in steps if step.longest_draft]
    num_drafts = sum(step.longest_draft for step in drafting)
    return sum(step.draft_s for step in drafting) / num_drafts / plain_step_s if num_drafts else 0.0


def verify_cost(steps: Sequence[DecodeStep], plain_step_s: float) -> float:
    """A step without its drafting, in plain steps."""
    return (seconds_of(steps) / len(steps) - statistics.fmean(step.draft_s for step in steps)) / plain_step_s


def experts_by_rows(steps: Iterable[DecodeStep]) -> dict[int, float]:
    counts: dict[int, list[float]] = {}
    for step in steps:
        if step.num_distinct_experts is not None:
            counts.setdefault(step.num_rows, []).append(step.num_distinct_experts)
    return {num_rows: statistics.fmean(values) for num_rows, values in sorted(counts.items())}


def coverage_of(steps: Iterable[DecodeStep], routing: Routing | None) -> ExpertCoverage | None:
    """With beta as these steps say; None without experts."""
    if routing is None:
        return None
    coverage = ExpertCoverage(routing)
    for step in steps:
        if step.num_distinct_experts is not None:
            coverage.observe(step.num_sequences, step.num_rows, step.num_distinct_experts)
    return coverage


def predicted_speedups(
    plain: Sequence[DecodeStep],
    fixed: Mapping[int, Sequence[DecodeStep]],
    acceptance: Acceptance,
    coverage: ExpertCoverage | None,
) -> dict[int, float]:
    """E(K) / T(B, K) in units of the plain step, as the policy forecasts them before each step: by K.

    E is the mean over the steps of what is expected of their drafts, from how many there are of which grade and from
    chances that are those of all runs together; T from the model of step times that the policy has, which has seen the
    steps of all runs in the order in which they ran.
    """
    longest = len(acceptance.rates)
    runs = [plain, *fixed.values()]
    times = StepTime(longest, coverage)
    for step in _interleaved(runs):
        times.observe(_shape(step), step.seconds - step.draft_s, step.draft_s)
    batch = plain[0].num_sequences
    context = round(statistics.fmean(step.num_context_tokens for run in runs for step in run))
    forecast = times.forecast(batch, context, batch * longest, longest)
    speedups = {}
    for count, steps in fixed.items():
        num_tokens = seconds = 0.0
        for step in steps:
            shape = _shape(step)
            drafts = [acceptance.expected(draft.num_drafted, draft.grade) for draft in step.drafts]
            num_tokens += step.num_sequences - len(drafts) + sum(drafts)
            seconds += float(forecast.verify_s[shape.num_draft_tokens])
            seconds += forecast.drafting_s(shape.longest_draft, shape.num_asked_tokens)
        speedups[count] = num_tokens / batch * forecast.plain_s / seconds
    return speedups


def _shape(step: DecodeStep) -> StepShape:
    num_made = sum(draft.num_asked for draft in step.drafts if not draft.is_free)
    num_drafted = step.num_rows - step.num_sequences
    return StepShape(step.num_sequences, step.num_context_tokens, num_drafted, num_made, step.longest_draft)


def _interleaved(runs: Sequence[Sequence[DecodeStep]]) -> list[DecodeStep]:
    """The runs took turns and emitted as many tokens each: the steps of one lie evenly among those of the others."""
    placed = [(place / len(run), index) for index, run in enumerate(runs) for place in range(len(run))]
    following = [iter(run) for run in runs]
    return [next(following[index]) for _, index in sorted(placed)]


def share_alike(answers: Mapping[int, Sequence[int]], others: Iterable[Mapping[int, Sequence[int]]]) -> float:
    """Of the answers that both have, how many are the same as far as both go: all, unless logits are equal to a hair.

    1 if there is nothing to compare.
    """
    pairs = [(answers[index], other[index]) for other in others for index in answers.keys() & other.keys()]
    same = [all(a == b for a, b in zip(mine, theirs, strict=False)) for mine, theirs in pairs]
    return statistics.fmean(same) if same else 1.0


def percentile_90(values: Sequence[float]) -> float | None:
    return float(np.quantile(values, 0.9)) if values else None
