"""One cell of the grid: a model, a batch, a set of prompts and a drafter, in every way of drafting.

All ways decode the same prompts and take turns, a few tokens each, so that what else the machine does falls on all
alike; after each round every way has emitted as many tokens as any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from bench.decode_run import DecodeRun, DecodeStep, PrefilledPrompts, SaidOutlooks
from bench.speculation_figures import (
    Figures,
    acceptance_of,
    best_fixed,
    coverage_of,
    draft_cost,
    experts_by_rows,
    predicted_speedups,
    ratio_error,
    seconds_of,
    share_alike,
    tokens_per_second,
    verify_cost,
)
from decode.coverage import Routing
from decode.draft_planner import AdaptiveDrafts, FixedDrafts, NoDrafts
from decode.speculative_runner import SpeculativeRunner
from model.block_pool import BlockPool
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner

TURN_TOKENS = 8  # per sequence
LEAST_WARM_UP_SEQUENCES = 3
LONGEST_DRAFT = 7
OFF, ADAPTIVE = 0, -1  # the other ways are numbers of drafts


@dataclass(frozen=True, slots=True)
class Effort:
    """A cell takes about `seconds`, but at least `least_rounds` rounds beside the first, which warms up."""

    seconds: float
    least_rounds: int = 3
    most_rounds: int = 200
    # Per sequence, of a policy that does not know this size of batch: workers live long. A small batch warms up for as
    # many tokens as LEAST_WARM_UP_SEQUENCES would, or the policy would see too few steps.
    warm_up_tokens: int = 192


@dataclass(frozen=True, slots=True)
class Contest:
    """A drafter and its target. `adaptive` is that of a worker: it lives as long as the model is loaded."""

    target: TorchRunner
    drafting: SpeculativeRunner
    adaptive: AdaptiveDrafts
    outlooks: SaidOutlooks  # of `drafting`, as `adaptive` asks for them
    lengths: Sequence[int]
    max_context_tokens: int
    sampling: SamplingParams

    def measure(self, prompts: Sequence[Sequence[int]], batch: int, effort: Effort, *, warm_up: bool) -> Figures:
        """`warm_up`: lets the policy try this batch before."""
        begin = time.perf_counter()
        pool = BlockPool(self.target.num_blocks)
        prefilled = PrefilledPrompts(self.target, self.drafting, pool, prompts, self.sampling)
        if warm_up:
            run = DecodeRun(self.drafting, self.adaptive, prefilled, batch, self.outlooks)
            run.advance(effort.warm_up_tokens * max(batch, LEAST_WARM_UP_SEQUENCES))
            run.close()
        runs = self._runs(prefilled, batch)
        rounds: dict[int, list[list[DecodeStep]]] = {way: [] for way in runs}
        order = list(runs)
        for number in range(effort.most_rounds):
            if number > effort.least_rounds and time.perf_counter() - begin > effort.seconds:
                break
            for way in order:
                rounds[way].append(runs[way].advance((number + 1) * TURN_TOKENS * batch))
            order = order[1:] + order[:1]
        for run in runs.values():
            run.close()
        answers = {way: run.answers for way, run in runs.items()}
        alike = share_alike(answers.pop(OFF), answers.values())
        return self._figures({way: of_way[1:] for way, of_way in rounds.items()}, alike)

    def _runs(self, prompts: PrefilledPrompts, batch: int) -> dict[int, DecodeRun]:
        runs = {OFF: DecodeRun(self.target, NoDrafts(), prompts, batch)}
        for count in self.lengths:
            planner = FixedDrafts(count, self.max_context_tokens, self.outlooks)
            runs[count] = DecodeRun(self.drafting, planner, prompts, batch, self.outlooks)
        runs[ADAPTIVE] = DecodeRun(self.drafting, self.adaptive, prompts, batch, self.outlooks)
        return runs

    def _figures(self, rounds: dict[int, list[list[DecodeStep]]], alike: float) -> Figures:
        config = self.target.config
        steps = {way: list(chain(*of_way)) for way, of_way in rounds.items()}
        routing = Routing.of(config)
        every = [step for run in steps.values() for step in run]
        fixed = {count: steps[count] for count in self.lengths}  # the adaptive run chose where to draft
        acceptance = acceptance_of([step for run in fixed.values() for step in run], LONGEST_DRAFT)
        coverage = coverage_of(every, routing)
        plain = tokens_per_second(steps[OFF])
        plain_step_s = seconds_of(steps[OFF]) / len(steps[OFF])
        fixed_ways = {way: rounds[way] for way in (OFF, *self.lengths)}
        best = max(fixed_ways, key=lambda way: tokens_per_second(steps[way]))
        asked = [draft.num_asked for step in steps[ADAPTIVE] for draft in step.drafts]
        return Figures(
            plain_tokens_per_s=plain,
            plain_step_s=plain_step_s,
            fixed={count: tokens_per_second(steps[count]) / plain for count in self.lengths},
            best_fixed=best_fixed(fixed_ways),
            predicted=predicted_speedups(steps[OFF], fixed, acceptance, coverage),
            adaptive=tokens_per_second(steps[ADAPTIVE]) / plain,
            adaptive_error=ratio_error(rounds[ADAPTIVE], rounds[OFF]),
            adaptive_vs_best_fixed_error=ratio_error(rounds[ADAPTIVE], rounds[best]),
            adaptive_length=sum(asked) / sum(step.num_sequences for step in steps[ADAPTIVE]),
            acceptance=acceptance,
            draft_cost=draft_cost(every, plain_step_s),
            verify_cost={count: verify_cost(steps[count], plain_step_s) for count in self.lengths},
            experts=experts_by_rows(every),
            beta=None if coverage is None else coverage.beta,
            alike=alike,
        )
