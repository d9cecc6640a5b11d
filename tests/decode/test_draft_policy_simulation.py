"""The draft policy on hardware and drafters that are known: near the best fixed length, never much below none.

Tokens and seconds are expectations of what was chosen, so luck plays no part in what is compared; what the policy sees
is drawn, and its times carry 5 % of noise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from statistics import mean

import pytest

from decode.coverage import ExpertCoverage
from decode.draft_decision import DraftDecision, DraftReason, StepOutcome
from decode.draft_policy import DraftPolicy
from decode.outlook import Outlook
from tests.decode.simulated_hardware import (
    COMPUTE_BOUND,
    DENSE,
    MIXTURE,
    SPARSE,
    Hardware,
    Offer,
    Simulation,
    emitted,
    fixed_rates,
)

HARDWARE = {"dense": DENSE, "compute_bound": COMPUTE_BOUND, "mixture": MIXTURE, "sparse": SPARSE}
WARM_UP = 200


def policy_for(hardware: Hardware) -> DraftPolicy:
    return DraftPolicy(7, ExpertCoverage(hardware.routing) if hardware.expert_s else None)


def fastest(rates: dict[int, float]) -> int:
    return max(rates, key=lambda length: rates[length])


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 32])
@pytest.mark.parametrize("name", HARDWARE)
def test_is_as_fast_as_the_best_fixed_length(name: str, num_sequences: int, acceptance: float) -> None:
    simulation = Simulation(HARDWARE[name], [acceptance] * num_sequences)
    policy = policy_for(HARDWARE[name])
    simulation.run(policy, WARM_UP)
    rate, rates = simulation.run(policy, 300), fixed_rates(simulation)
    assert rate >= 0.97 * max(rates.values())
    assert rate >= 0.98 * rates[0]


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("num_stalls", [1, 2])
@pytest.mark.parametrize("factor", [5.0, 30.0, 3600.0])
def test_first_drafts_that_are_held_up_do_not_end_drafting(
    factor: float, num_stalls: int, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else had the machine, and what nobody tries again nobody finds to be fast."""
    simulation, policy = Simulation(DENSE, [0.8] * num_sequences), policy_for(DENSE)
    stalled: list[DraftDecision] = []
    observe = policy.observe

    def slowly(decision: DraftDecision, outcome: StepOutcome) -> None:
        if any(decision.draft_lengths) and len(stalled) < num_stalls:
            stalled.append(decision)
            outcome = replace(outcome, verify_s=outcome.verify_s * factor, draft_s=outcome.draft_s * factor)
        observe(decision, outcome)

    monkeypatch.setattr(policy, "observe", slowly)
    simulation.run(policy, WARM_UP)
    assert simulation.run(policy, 300) >= 0.97 * max(fixed_rates(simulation).values())
    assert len(stalled) == num_stalls


def test_the_grid_asks_for_different_lengths() -> None:
    """Or it would show nothing: off here, long there, and not the same for every batch."""
    best = {
        (name, num_sequences, acceptance): fastest(fixed_rates(Simulation(hardware, [acceptance] * num_sequences)))
        for name, hardware in HARDWARE.items()
        for num_sequences in (1, 4, 16, 32)
        for acceptance in (0.05, 0.3, 0.6, 0.9)
    }
    assert len(set(best.values())) >= 6
    assert best["mixture", 1, 0.3] == 0 < best["mixture", 16, 0.3]  # few rows load experts, many find them loaded
    assert best["compute_bound", 1, 0.6] > best["compute_bound", 4, 0.6] > best["compute_bound", 32, 0.6] == 0


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("num_sequences", [4, 16])
def test_half_of_the_batch_drafts_badly(name: str, num_sequences: int) -> None:
    """One length for all is either too long for some or too short for others."""
    simulation = Simulation(HARDWARE[name], [0.85, 0.1] * (num_sequences // 2), seed=3)
    policy = policy_for(HARDWARE[name])
    simulation.run(policy, WARM_UP)
    rate, rates = simulation.run(policy, 300), fixed_rates(simulation)
    assert rate >= 0.98 * max(rates.values())
    good = mean(mean(decision.draft_lengths[::2]) for decision in simulation.decisions)
    bad = mean(mean(decision.draft_lengths[1::2]) for decision in simulation.decisions)
    if fastest(rates) > 0:
        assert rate >= 1.05 * max(rates.values())
        assert good > 1.0
        assert bad < 0.25 * good


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.05), (0.05, 0.9)])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_acceptance_changes_midway(num_sequences: int, before: float, after: float) -> None:
    """One sequence's text turns; its neighbours' does not."""
    simulation = Simulation(MIXTURE, [before] + [0.6] * (num_sequences - 1), seed=5)
    policy = policy_for(MIXTURE)
    simulation.run(policy, 300)
    lengths_before = mean(decision.draft_lengths[0] for decision in simulation.decisions[-100:])
    simulation.acceptance[0] = after
    simulation.run(policy, 250)  # to find out: a stopped sequence is probed rarely
    rate = simulation.run(policy, 200)
    lengths_after = mean(decision.draft_lengths[0] for decision in simulation.decisions)
    assert rate >= 0.97 * max(fixed_rates(simulation).values())
    low, high = sorted([lengths_before, lengths_after])
    assert (low == lengths_after) == (after < before)
    assert low < 0.25 * high and high > 2.5


def test_machine_slows_down_midway() -> None:
    """Twice as slow for everything: the best length stays what it was."""
    simulation, policy = Simulation(MIXTURE, [0.6]), policy_for(MIXTURE)
    simulation.run(policy, WARM_UP)
    simulation.slowness = 2.0
    rate = simulation.run(policy, 200)
    assert rate >= 0.97 * max(fixed_rates(simulation).values()) / 2


def test_load_changes_midway() -> None:
    """From 1 sequence to 32 and back: what was learnt of one load is still known after the other."""
    policy = policy_for(COMPUTE_BOUND)
    one, many = Simulation(COMPUTE_BOUND, [0.6]), Simulation(COMPUTE_BOUND, [0.6] * 32)
    one.run(policy, WARM_UP)
    many.run(policy, WARM_UP)
    assert many.run(policy, 200) >= 0.98 * fixed_rates(many)[0]
    assert one.run(policy, 100) >= 0.97 * max(fixed_rates(one).values())  # from the first step on


LONG, SHORT = Outlook(64, 3), Outlook(64, 0)
ROWS = Hardware(free_rows=1, row_s=0.12, draft_step_s=0.001)  # every row costs
FLAT = Hardware(row_s=0.04, draft_step_s=0.001)


def shares_of_best_and_none(simulation: Simulation, num_steps: int = 400) -> tuple[float, float]:
    """Of the rates of the best fixed length and of no drafts at all."""
    policy = policy_for(simulation.hardware)
    simulation.run(policy, WARM_UP)
    rate, rates = simulation.run(policy, num_steps), fixed_rates(simulation)
    return rate / max(rates.values()), rate / rates[0]


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("hardware", [FLAT, ROWS], ids=["flat", "rows"])
def test_drafter_that_has_something_now_and_then(hardware: Hardware, num_sequences: int, noise: float) -> None:
    """In three steps of ten, and then it is good: each step is decided by itself."""
    simulation = Simulation(hardware, [0.9] * num_sequences, [Offer(0.3, 0.9, LONG)], noise)
    of_best, of_none = shares_of_best_and_none(simulation)
    assert of_best >= 0.97
    assert of_none >= 0.98
    nothing = [decision for decision in simulation.decisions if decision.reason is DraftReason.NO_OFFER]
    assert len(nothing) == pytest.approx(400 * 0.7**num_sequences, abs=40)
    assert not any(sum(decision.draft_lengths) for decision in nothing)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_good_and_bad_guesses_are_told_apart_by_grade(num_sequences: int) -> None:
    """Where every row costs, what is good and what is worthless of a drafter is worth more than any fixed length."""
    offers = [Offer(0.3, 0.9, LONG), Offer(0.3, 0.05, SHORT)]
    simulation = Simulation(ROWS, [0.9] * num_sequences, offers)
    of_best, _ = shares_of_best_and_none(simulation)
    assert of_best >= 1.1


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("hardware", [FLAT, ROWS], ids=["flat", "rows"])
def test_worthless_guesses_cost_next_to_nothing(hardware: Hardware, num_sequences: int, noise: float) -> None:
    simulation = Simulation(hardware, [0.0] * num_sequences, [Offer(0.5, 0.02, SHORT)], noise)
    of_best, of_none = shares_of_best_and_none(simulation)
    assert of_best >= 0.97
    assert of_none >= 0.98


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("draft_step_s", [0.1, 0.3])
def test_model_that_drafts_at_a_price(draft_step_s: float, acceptance: float, noise: float) -> None:
    """Whatever the first drafts come to, by luck, of the price and of the drafts themselves."""
    hardware = Hardware(free_rows=4, row_s=0.03, draft_step_s=draft_step_s)
    shares = [shares_of_best_and_none(Simulation(hardware, [acceptance], noise=noise, seed=seed)) for seed in (1, 2, 3)]
    assert mean(of_best for of_best, _ in shares) >= 0.975 and min(of_best for of_best, _ in shares) >= 0.96
    assert min(of_none for _, of_none in shares) >= 0.97


@dataclass
class UnsteadySimulation(Simulation):
    """On a machine that is up to 15 % faster or slower for some 25 steps, and so on; contexts grow at first."""

    steady_s: float = 0.0  # what the steps of the last run take on a steady one
    num_steps: int = 0

    def run(self, policy: DraftPolicy, num_steps: int) -> float:
        self.steady_s = 0.0
        super().run(policy, num_steps)
        return self.num_tokens / self.steady_s

    def _step(self, policy: DraftPolicy) -> None:
        self.num_steps += 1
        if self._phases.random() < 1 / 25:
            self.slowness = 1.0 + self._phases.uniform(-0.15, 0.15)
        self.context_tokens = 100 + min(self.num_steps, 60) + self.num_steps % 20
        before = self.spent_s
        super()._step(policy)
        self.steady_s += (self.spent_s - before) / self.slowness

    def __post_init__(self) -> None:
        super().__post_init__()
        self._phases = random.Random(self.seed + 100)


@pytest.mark.parametrize("acceptance", [0.6, 0.92])
@pytest.mark.parametrize("others", [(), (Offer(0.7),)], ids=["look-ups", "all"])
def test_machine_that_is_now_faster_and_now_slower(others: tuple[Offer, ...], acceptance: float) -> None:
    """A step of 32 sequences is bound by compute: what is measured while it is fast must not seem to be."""
    hardware = Hardware(0.05, 0, 0.95 / 32, context_token_s=2e-6, draft_step_s=0.008, draft_token_s=0.0003)
    offers = (Offer(0.3, acceptance, Outlook(64, 2, is_free=True)), *others)
    shares = []
    for seed in range(1, 7):
        simulation = UnsteadySimulation(hardware, [0.5] * 32, offers, noise=0.07, seed=seed)
        shares.append(shares_of_best_and_none(simulation, 300)[0])
    assert mean(shares) >= 0.985 and min(shares) >= 0.96


def test_finds_how_alike_neighbours_route() -> None:
    policy = policy_for(SPARSE)
    Simulation(SPARSE, [0.6] * 4).run(policy, 300)
    assert policy.coverage is not None
    assert policy.coverage.beta == pytest.approx(SPARSE.beta, abs=0.05)


def test_expected_tokens_of_the_simulation() -> None:
    assert emitted([(0.6, Offer())], [5]) == pytest.approx(2.383, abs=5e-4)


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("quality", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("name", HARDWARE)
def test_trees_get_about_as_many_nodes_as_are_best(name: str, quality: float, num_sequences: int) -> None:
    """What a node brings does not depend on those before it, and falls slowly. Small chances are known least well: of
    one sequence, from its last fifty steps."""
    nodes = (0.6, 0.35, 0.25, 0.18, 0.14, 0.1, 0.08)
    simulation = Simulation(HARDWARE[name], [quality] * num_sequences, [Offer(nodes=nodes)])
    of_best, of_none = shares_of_best_and_none(simulation)
    assert of_best >= (0.95 if quality < 0.5 else 0.965)
    assert of_none >= 0.98


def test_look_ups_go_on_where_drafting_does_not_pay() -> None:
    """They take the drafter no time, and their cost is not learnt from those that do."""
    hardware = Hardware(row_s=0.02, draft_step_s=0.4)
    offers = [Offer(0.4, 0.8, Outlook(64, 2, is_free=True)), Offer(0.6, 0.25)]
    simulation = Simulation(hardware, [0.5], offers)
    shares_of_best_and_none(simulation)
    steps = zip(simulation.offered, simulation.decisions, strict=True)
    lengths = [(offered[0][1].outlook.is_free, decision.draft_lengths[0]) for offered, decision in steps]
    assert mean(length for is_free, length in lengths if is_free) > 4
    assert mean(length for is_free, length in lengths if not is_free) < 0.3
