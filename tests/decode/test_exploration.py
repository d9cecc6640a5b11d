"""What may be lost to trials, and how rarely a sequence that drafts badly is tried."""

from __future__ import annotations

import itertools

import pytest

from decode.exploration import ExplorationBudget, ProbeTimetable


def test_budget_is_a_share_of_the_steps() -> None:
    budget = ExplorationBudget(0.01, 2.0)
    lost = 0.0
    for _ in range(10_000):
        budget.earn()
        if budget.allows(0.5):
            budget.spend(0.5)
            lost += 0.5
    assert 99 <= lost <= 102  # 1 % of the steps, and the 2 saved up at first


def test_overdrawn_budget_waits_and_savings_are_bounded() -> None:
    budget = ExplorationBudget(0.1, 2.0)
    budget.spend(3.0)
    assert not budget.allows(0.0)
    for _ in range(11):
        budget.earn()
    assert budget.allows(0.0)
    for _ in range(1000):
        budget.earn()
    assert budget.num_steps == 2.0
    budget.spend(0.5)
    budget.spend(-0.2)  # a trial that has paid
    assert budget.num_steps == pytest.approx(1.7)
    budget.spend(-9.0)
    assert budget.num_steps == 2.0


def test_failed_probes_get_rarer() -> None:
    probes, probed_at = ProbeTimetable(16, 128), []
    for step in range(700):
        if probes.is_due("a", 0, step):
            probed_at.append(step)
            probes.probed("a", 0, step, accepted=False)
    assert [b - a for a, b in itertools.pairwise(probed_at)] == [16, 32, 64, 128, 128, 128, 128]


def test_success_is_followed_up_and_a_drafting_sequence_starts_afresh() -> None:
    probes = ProbeTimetable(16, 128)
    for step in (0, 16, 48):
        assert probes.is_due("a", 0, step)
        probes.probed("a", 0, step, accepted=False)
    probes.probed("a", 0, 112, accepted=True)
    assert probes.is_due("a", 0, 112)  # at once
    probes.drafted("a", 0, 113)  # its acceptance has recovered
    assert [step for step in (114, 128, 129) if probes.is_due("a", 0, step)] == [129]
    probes.probed("a", 0, 129, accepted=False)
    assert [step for step in (144, 145) if probes.is_due("a", 0, step)] == [145]
    probes.probed("a", 2, 130, accepted=False)  # grades are tried apart
    assert not probes.is_due("a", 2, 145) and probes.is_due("a", 2, 146)
    probes.forget(["a", "unknown"])
    assert probes.is_due("a", 2, 131)
    assert probes.is_due("a", 0, 130)
