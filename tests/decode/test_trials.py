"""What the draft policy tries beside what seems fastest, and what keeps it from trying."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from decode.acceptance import Chances, DraftOutcome
from decode.draft_decision import DraftReason
from decode.draft_options import DraftOptions, weigh
from decode.draft_policy import DraftPolicy, _terms
from decode.exploration import ExplorationBudget
from decode.outlook import ANYTHING, NOTHING, Outlook
from decode.standing import Terms
from decode.step_time import StepForecast
from tests.decode.simulated_hardware import Hardware, Simulation
from tests.decode.test_standing import situation, terms

FREE = Outlook(9, grade=2, is_free=True)


def forecast(verify_s: Sequence[float], num_seen: Sequence[float], noise: float = 0.1) -> StepForecast:
    return StepForecast(np.array(verify_s), np.zeros(3), np.zeros(3), np.array(num_seen, dtype=np.float64), noise)


def weighed(seen: StepForecast, survival: Sequence[float] = (0.9, 0.5)) -> DraftOptions:
    """The choices of one sequence."""
    return weigh(np.array([survival]), [2], [False], 2, seen)


def tried(seen: StepForecast, policy: DraftPolicy | None = None) -> DraftReason:
    options = weighed(seen)
    return (policy or DraftPolicy(2))._explore(options, options.best, seen)[1]


def test_shape_that_may_be_faster_and_is_less_known_is_tried() -> None:
    """1.9 tokens in 1 s are best; 2.4 in 1.3 s could be 25 % faster if that was never seen."""
    assert tried(forecast([1.0, 1.0, 1.3], [50, 50, 0])) is DraftReason.TRY_SHAPE
    assert tried(forecast([1.0, 1.0, 1.3], [50, 50, 50])) is DraftReason.FASTEST
    assert tried(forecast([1.0, 1.0, 2.6], [50, 50, 0])) is DraftReason.FASTEST


def test_shape_that_is_known_better_than_the_best_one_is_not_tried() -> None:
    """Both are doubtful by 20 %, so that the best itself and the other could be faster than they seem."""
    assert tried(forecast([1.0, 1.0, 1.3], [50, 2, 3], noise=0.2)) is DraftReason.FASTEST
    assert tried(forecast([1.0, 1.0, 1.3], [50, 3, 2], noise=0.2)) is DraftReason.TRY_SHAPE


def test_nothing_is_tried_that_could_lose_more_than_was_saved() -> None:
    """2.4 tokens in 1.3 s, which the best emits in 1.26 s, lose 0.037 steps of 1 s."""
    policy, seen = DraftPolicy(2), forecast([1.0, 1.0, 1.3], [50, 50, 0])
    policy._budget = ExplorationBudget(0.0, 0.036)
    assert tried(seen, policy) is DraftReason.FASTEST
    policy._budget = ExplorationBudget(0.0, 0.038)
    assert tried(seen, policy) is DraftReason.TRY_SHAPE


def test_plain_step_is_due_the_sooner_the_less_it_loses() -> None:
    """Drafting gains 1.9 fold where rows are free: 0.474 of a step for 0.4 % of the time is one in 118."""
    policy, free, dear = DraftPolicy(2), forecast([1.0, 1.0, 5.0], [50] * 3), forecast([1.0, 1.8, 5.0], [50] * 3)
    for seen, steps in ((free, 119), (dear, 14)):  # 1.9 tokens in 1.8 s: 0.053 of a step
        for policy._step in range(200):
            if tried(seen, policy) is DraftReason.TRY_PLAIN:
                break
        assert policy._step == steps


def test_no_trial_of_drafts_follows_another() -> None:
    """A plain step comes first, or a budget that was saved up would be spent on the worst of luck at once."""
    policy, simulation = DraftPolicy(7), Simulation(Hardware(weights_s=2.0, free_rows=0, row_s=0.5), [0.3] * 2)
    simulation.run(policy, 300)
    reasons = [decision.reason for decision in simulation.decisions]
    assert reasons.count(DraftReason.TRY_DRAFTS) >= 10
    assert (DraftReason.TRY_DRAFTS, DraftReason.TRY_DRAFTS) not in set(itertools.pairwise(reasons))


@pytest.mark.parametrize(("budget", "num_probed"), [(0.10, 0), (0.12, 1), (0.22, 1), (0.23, 2), (9.0, 2)])
def test_probes_stop_where_the_budget_does(budget: float, num_probed: int) -> None:
    """One of eight sequences costs 0.9 / 8 steps, and two at most are probed."""
    policy, made_on, at = DraftPolicy(4), terms(8, cap=0), situation([ANYTHING] * 8)
    policy._budget = ExplorationBudget(0.0, budget)
    decision = policy._with_probes(at, made_on.decision(at.demands, [0] * 8, DraftReason.PLAIN_FASTEST), made_on)
    assert sum(decision.draft_lengths) == len(decision.probed_ids) == num_probed
    assert decision.reason is (DraftReason.PROBE if num_probed else DraftReason.PLAIN_FASTEST)


def test_who_drafts_or_has_nothing_is_not_probed() -> None:
    policy, made_on, at = DraftPolicy(4), terms(4, cap=1), situation([ANYTHING, NOTHING, FREE, ANYTHING])
    decision = policy._with_probes(at, made_on.decision(at.demands, [1, 0, 0, 0], DraftReason.FASTEST), made_on)
    assert (decision.draft_lengths, decision.probed_ids) == ((1, 0, 1, 1), ("2", "3"))
    assert decision.reason is DraftReason.FASTEST


def still_stands(num_sequences: int, num_accepted: int) -> bool:
    """What stood before, after probes of which each came to this."""
    policy, made_on, at = DraftPolicy(4), terms(num_sequences, cap=0), situation([ANYTHING] * num_sequences)
    decision = made_on.decision(at.demands, [0] * num_sequences, DraftReason.PLAIN_FASTEST)
    policy._standing.add(at, decision, made_on)
    probed = policy._with_probes(at, decision, made_on)
    assert probed.probed_ids
    policy._note_drafts(probed, [DraftOutcome(name, 1, 1, num_accepted) for name in probed.probed_ids])
    return policy._standing.find(at) is decision


def test_success_of_a_probe_is_followed_up_at_once_in_a_small_batch() -> None:
    assert still_stands(2, num_accepted=0) and not still_stands(2, num_accepted=1)
    assert still_stands(8, num_accepted=0) and still_stands(8, num_accepted=1)


def made_on(verify_s: Sequence[float], survival: Sequence[float], others: float, limit: int = 3) -> Terms:
    """Of one sequence that drafts in grade 0. Those of other grades and of new sequences stand with chance `others`."""
    by_grade = np.full((2, 4, 3), others)
    by_grade[0, 0] = survival
    seen = StepForecast(np.array(verify_s), np.array([0, 0.1, 0.3, 0.5]), np.zeros(4), np.ones(len(verify_s)), 0.02)
    options = weigh(by_grade[:1, 0], [limit], [False], limit, seen)
    return _terms(Chances(by_grade[:1, 0], by_grade[:1, 0], by_grade, {"a": 0}), seen, options, options.best)


def test_terms_of_a_decision_that_drafts() -> None:
    """1.9 tokens in 1.1 s are best; the second draft's row takes 0.5 s, the third's nothing, and either 0.2 s more."""
    terms_ = made_on([1.0, 1.0, 1.5, 1.5], [0.9, 0.3, 0.1], others=0.5)
    assert terms_.cap == 1
    assert [terms_.best_num_tokens, terms_.best_s] == pytest.approx([1.9, 1.1])
    assert terms_.price == pytest.approx(0.9)
    assert terms_.free_draft_cost == pytest.approx(0.5 * 1.9 / 1.1)  # the steepest way: both rows are 0.25 s each
    assert terms_.draft_cost == pytest.approx(0.5 * 1.9 / 1.1)  # no longer than the longest
    assert not terms_.none_pays


def test_terms_of_a_decision_that_does_not_draft() -> None:
    """A row costs 0.9 s, two 0.8 s each and three 0.7 s each: no draft could pay that stands in two of three cases."""
    verify_s = [1.0, 1.9, 2.6, 3.1]
    terms_ = made_on(verify_s, [0.3, 0.1, 0.1], others=0.65)
    assert terms_.cap == 0
    assert [terms_.price, terms_.free_draft_cost, terms_.draft_cost] == pytest.approx([0.9, 0.9, 1.0])
    assert terms_.none_pays
    assert not made_on(verify_s, [0.3, 0.1, 0.1], others=0.75).none_pays  # another grade's, or a new sequence's
    assert not made_on(verify_s[:3], [0.3, 0.1, 0.1], others=0.65, limit=2).none_pays  # more rows might be cheaper
