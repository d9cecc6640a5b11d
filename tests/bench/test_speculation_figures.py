"""Figures against hand counts, and the prediction against a machine and a drafter whose laws are known."""

from __future__ import annotations

import math
import random

import pytest

from bench.decode_run import DecodeStep
from bench.speculation_figures import (
    STALL,
    Acceptance,
    acceptance_of,
    best_fixed,
    coverage_of,
    draft_cost,
    experts_by_rows,
    percentile_90,
    predicted_speedups,
    ratio_error,
    seconds_of,
    share_alike,
    tokens_per_second,
    verify_cost,
)
from decode.acceptance import DraftOutcome
from decode.coverage import Routing, distinct_experts
from decode.speedup import expected_tokens_by_position


def step(
    *drafts: tuple[int, ...], seconds: float = 1.0, draft_s: float = 0.0, experts: float | None = None
) -> DecodeStep:
    """One sequence for each (asked, drafted, accepted, grade)."""
    outcomes = tuple(
        DraftOutcome(str(index), asked, drafted, accepted, sum(grade))
        for index, (asked, drafted, accepted, *grade) in enumerate(drafts)
        if asked
    )
    num_tokens = len(drafts) + sum(draft[2] for draft in drafts)
    return DecodeStep(seconds, draft_s, len(drafts), num_tokens, 100, outcomes, experts)


def test_rate_is_tokens_over_time() -> None:
    steps = [step((3, 3, 2), seconds=0.2), step((3, 3, 0), seconds=0.3)]
    assert tokens_per_second(steps) == pytest.approx((3 + 1) / 0.5)


def test_a_stall_counts_as_a_few_steps() -> None:
    steps = [step((0, 0, 0), seconds=0.1) for _ in range(10)]
    assert seconds_of([*steps, step((0, 0, 0), seconds=9.0)]) == pytest.approx(1.0 + STALL * 0.1)


def test_best_length_is_chosen_by_other_rounds_than_it_is_judged_by() -> None:
    plain, lucky, steady = [1.0] * 4, [0.5, 1.25, 0.5, 1.25], [0.8] * 4
    rounds = {
        way: [[step((0, 0, 0), seconds=seconds)] for seconds in of_way]
        for way, of_way in {0: plain, 3: lucky, 5: steady}.items()
    }
    # The even rounds choose 3, of which the odd ones say 0.8; those choose 5, of which the even ones say 1.25.
    assert best_fixed(rounds) == pytest.approx((0.8 * 1.25) ** 0.5)
    assert best_fixed({0: rounds[0], 5: [[step((0, 0, 0), seconds=2.0)]] * 4}) == 1.0


def test_error_of_a_ratio_is_how_far_rounds_differ() -> None:
    mine = [[step((0, 0, 0), seconds=seconds)] for seconds in (1.0, 2.0, 1.0, 2.0)]
    theirs = [[step((0, 0, 0), seconds=1.0)]] * 4
    assert ratio_error(theirs, theirs) == 0.0
    # Logarithms 0 and ln 2 twice each: a deviation of ln 2 / sqrt(3), over the root of four rounds.
    assert ratio_error(mine, theirs) == pytest.approx(math.log(2.0) / math.sqrt(3.0) / 2.0)


def test_acceptance_looks_only_where_all_before_stood() -> None:
    steps = [step((3, 3, 3, 0), (3, 3, 0, 1)), step((3, 3, 1, 1), (0, 0, 0)), step((3, 1, 1, 0)), step((0, 0, 0))]
    found = acceptance_of(steps, 4)
    # Position 1: of four three stood. Position 2: looked at after (3) and (1), not after the one that had no second;
    # stood once. Position 3: looked at once. Position 4: never asked for.
    assert found.rates == (3 / 4, 1 / 2, 1.0, None)
    assert found.rates_by_grade[:3] == ((1.0, 1.0, 1.0, None), (1 / 2, 0.0, None, None), (None,) * 4)
    assert found.offered == 4 / 6


def test_expected_tokens_are_the_formulas() -> None:
    rates = (0.9, 0.7, 0.5)
    found = Acceptance(rates, ((None,) * 3, rates), 1.0)
    for count in range(4):
        assert found.expected(count, 1) == pytest.approx(expected_tokens_by_position(rates[:count]))
        assert found.expected(count, 0) == 1.0


def test_costs_are_in_plain_steps() -> None:
    steps = [step((4, 4, 1), seconds=1.5, draft_s=0.4), step((2, 2, 1), seconds=1.3, draft_s=0.2), step((0, 0, 0))]
    assert draft_cost(steps, plain_step_s=0.5) == pytest.approx((0.4 + 0.2) / (4 + 2) / 0.5)
    assert verify_cost(steps[:2], plain_step_s=0.5) == pytest.approx((1.1 + 1.1) / 2 / 0.5)
    assert draft_cost([step((0, 0, 0))], plain_step_s=0.5) == 0.0


def test_experts_are_told_by_rows() -> None:
    steps = [step((0, 0, 0), experts=2.0), step((3, 3, 0), experts=4.0), step((3, 3, 3), experts=5.0), step((3, 1, 0))]
    assert experts_by_rows(steps) == {1: 2.0, 4: 4.5}


def test_beta_is_that_of_the_steps() -> None:
    routing, rows = Routing(8, 2), 8
    touched = distinct_experts(routing, rows**0.5)
    coverage = coverage_of([step((7, 7, 0), experts=touched)] * 400, routing)
    assert coverage is not None and coverage.beta == pytest.approx(0.5, abs=0.02)
    assert coverage_of([], None) is None


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shares", [{0: 1.0}, {1: 0.3, 3: 0.2}])
def test_prediction_is_what_the_laws_say(batch: int, shares: dict[int, float]) -> None:
    """The drafter has something now and then, by grade; the machine takes time by the row."""
    rng, chances = random.Random(0), {0: 0.75, 1: 0.4, 3: 0.9}

    def draft(count: int) -> tuple[int, int, int, int]:
        draw = rng.random()
        for grade, share in shares.items():
            draw -= share
            if count and draw < 0:
                num_accepted = next((place for place in range(count) if rng.random() > chances[grade]), count)
                return count, count, num_accepted, grade
        return 0, 0, 0, 0

    def run(count: int) -> list[DecodeStep]:
        steps = []
        for _ in range(600):
            drafts = [draft(count) for _ in range(batch)]
            draft_s = 0.0005 * max(asked for asked, *_ in drafts)
            rows = batch + sum(drafted for _, drafted, *_ in drafts)
            steps.append(step(*drafts, seconds=0.01 + 0.001 * (rows - 1) + draft_s, draft_s=draft_s))
        return steps

    fixed = {count: run(count) for count in (1, 3, 5)}
    acceptance = acceptance_of([each for steps in fixed.values() for each in steps], 7)
    found = predicted_speedups(run(0), fixed, acceptance, None)
    plain_s, idle = 0.01 + 0.001 * (batch - 1), 1 - sum(shares.values())
    for count in (1, 3, 5):
        emitted = idle + sum(
            share * sum(chances[grade] ** place for place in range(count + 1)) for grade, share in shares.items()
        )
        seconds = plain_s + 0.001 * batch * count * (1 - idle) + 0.0005 * count * (1 - idle**batch)
        assert found[count] == pytest.approx(emitted * plain_s / seconds, rel=0.04), count


def test_prediction_knows_how_often_there_was_something_to_draft() -> None:
    """What is copied fast is over soon: a run of long drafts has something in fewer of its steps than one of short."""
    short = [step((1, 1, 1, 2)), step((1, 1, 1, 2)), step((0, 0, 0))] * 100
    long = [step((4, 4, 4, 2)), step((0, 0, 0)), step((0, 0, 0))] * 100
    acceptance = acceptance_of([*short, *long], 4)
    found = predicted_speedups([step((0, 0, 0))] * 100, {1: short, 4: long}, acceptance, None)
    assert found == {1: pytest.approx(5 / 3, rel=0.02), 4: pytest.approx(7 / 3, rel=0.02)}


def test_prediction_does_not_look_at_the_rate_it_predicts() -> None:
    """Chances come from all runs together: a run whose drafts all stood by chance is not believed."""
    fixed = {1: [step((1, 1, 0)), step((1, 1, 0))] * 100, 2: [step((2, 2, 2))] * 100}
    acceptance = acceptance_of([each for steps in fixed.values() for each in steps], 2)
    found = predicted_speedups([step((0, 0, 0))] * 100, fixed, acceptance, None)
    assert found[1] == pytest.approx(1 + 1 / 3, rel=0.05)


def test_answers_are_compared_as_far_as_both_go() -> None:
    mine = {0: (1, 2), 1: (3, 8), 2: (4,)}
    assert share_alike(mine, [{0: (1, 2, 3), 1: (3, 9)}, {2: (4,), 7: (5,)}]) == pytest.approx(2 / 3)
    assert share_alike(mine, [{}]) == 1.0


def test_percentile() -> None:
    values = [number / 100 for number in range(101)]
    random.Random(1).shuffle(values)
    assert percentile_90(values) == pytest.approx(0.9)
    assert percentile_90([]) is None


def tree_step(num_nodes: int, *nodes: int, draft_s: float = 0.0, is_free: bool = False) -> DecodeStep:
    outcome = DraftOutcome("0", num_nodes, num_nodes, len(nodes), 0, nodes, is_free)
    return DecodeStep(1.0, draft_s, 1, 1 + len(nodes), 100, (outcome,))


def test_nodes_of_a_tree_are_counted_by_their_places() -> None:
    found = acceptance_of([tree_step(3, 0, 2), tree_step(3, 1), tree_step(2)], 4)
    assert found.rates == (1 / 3, 1 / 3, 1 / 2, None)
    assert found.expected(3, 0) == pytest.approx(1 + 1 / 3 + 1 / 3 + 1 / 2)  # each stands by itself


def test_look_ups_have_no_part_in_what_drafting_costs() -> None:
    steps = [tree_step(4, draft_s=0.4), tree_step(4, draft_s=0.001, is_free=True)]
    assert draft_cost(steps, plain_step_s=0.5) == pytest.approx(0.4 / 4 / 0.5)
    assert draft_cost(steps[1:], plain_step_s=0.5) == 0.0
