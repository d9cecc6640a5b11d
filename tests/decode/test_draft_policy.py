"""The draft policy's decisions: limits, reasons, and trials that stay within their budget."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode.acceptance import DraftOutcome
from decode.draft_decision import DraftDecision, DraftDemand, DraftReason, StepOutcome, most_useful_drafts
from decode.draft_policy import DraftPolicy, PolicySettings
from tests.decode.simulated_hardware import DENSE, Hardware, Simulation

SLOW_ROWS = Hardware(free_rows=0, row_s=1.0)  # a row costs what a step costs: drafting never pays
TRIALS = {DraftReason.TRY_SHAPE, DraftReason.TRY_PLAIN, DraftReason.TRY_DRAFTS}


def demands(most_drafts: Sequence[int]) -> list[DraftDemand]:
    return [DraftDemand(str(index), most) for index, most in enumerate(most_drafts)]


def trained(hardware: Hardware, acceptance: list[float], num_steps: int = 200) -> DraftPolicy:
    policy = DraftPolicy(7)
    Simulation(hardware, acceptance).run(policy, num_steps)
    return policy


def observe(policy: DraftPolicy, decision: DraftDecision, num_accepted: int = 0, slowness: float = 1.0) -> None:
    drafts = tuple(
        DraftOutcome(str(index), length, length, min(length, num_accepted))
        for index, length in enumerate(decision.draft_lengths)
        if length
    )
    lengths = decision.draft_lengths
    verify_s, draft_s = DENSE.verify_s(lengths, 200) * slowness, DENSE.draft_s(lengths) * slowness
    policy.observe(decision, StepOutcome(len(lengths), 200, drafts, verify_s, draft_s))


@pytest.mark.parametrize(
    ("tokens_left", "context_left", "requested", "most"),
    [
        (100, 100, None, 7),
        (4, 100, None, 3),  # 3 drafts and the token behind them
        (1, 100, None, 0),
        (100, 2, None, 2),
        (100, 100, 5, 5),
        (100, 100, 0, 0),  # off
        (3, 2, 9, 2),
        (0, 0, None, 0),
    ],
)
def test_drafts_that_can_be_of_use(tokens_left: int, context_left: int, requested: int | None, most: int) -> None:
    assert most_useful_drafts(tokens_left, context_left, 7, requested) == most


def test_first_step_is_plain_and_says_why() -> None:
    policy = DraftPolicy(7)
    decision = policy.choose(demands([7, 7]), 200, 100)
    assert (decision.draft_lengths, decision.reason) == ((0, 0), DraftReason.NO_TIMES)
    observe(policy, decision)
    assert sum(policy.choose(demands([7, 7]), 200, 100).draft_lengths) > 0


def settled(policy: DraftPolicy) -> DraftDecision:
    """Where nothing is to be tried: the first decision of that kind after the last lesson."""
    for _ in range(100):
        decision = policy.choose(demands([7]), 200, 100)
        if decision.is_settled and not policy._unlearnt:
            return decision
        observe(policy, decision, num_accepted=7)
    raise AssertionError("it never settles")


def test_decision_stands_for_some_steps_of_its_kind() -> None:
    policy = trained(DENSE, [0.9])
    first = settled(policy)
    for _ in range(PolicySettings().steps_together - 1):
        observe(policy, first, num_accepted=0)
        assert policy.choose(demands([7]), 230, 100) is first
    observe(policy, first, num_accepted=0)
    assert policy.choose(demands([7]), 230, 100) is not first
    assert policy.acceptance.pool_rates[0] < 0.9


def test_decision_that_is_seldom_needed_stands_no_longer() -> None:
    policy = trained(DENSE, [0.9])
    first, other = settled(policy), policy.choose(demands([3]), 200, 100)
    for _ in range(PolicySettings().longest_standing - 1):
        observe(policy, first, num_accepted=3)
        policy.choose(demands([7]), 200, 100)
    assert policy.choose(demands([3]), 200, 100) is other
    observe(policy, first, num_accepted=3)
    assert policy.choose(demands([3]), 200, 100) is not other


def test_decision_outlives_a_few_of_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes instead gets at once what it is worth, and what becomes of its drafts is its own."""
    policy = trained(DENSE, [0.9] * 12)
    ids = [str(index) for index in range(12)]
    for _ in range(100):
        policy._standing.clear()
        decision = policy.choose([DraftDemand(name, 7) for name in ids], 2400, 100)
        if decision.is_settled:
            break
        observe(policy, decision, num_accepted=7)
    policy.forget(["3", "7"])
    ids = [name for name in ids if name not in ("3", "7")] + ["12", "13"]
    monkeypatch.setattr(policy, "_decide", lambda *_: pytest.fail("decided anew"))
    lengths = policy.choose([DraftDemand(name, 7) for name in ids], 2400, 100).draft_lengths
    was = decision.draft_lengths
    assert lengths[:10] == was[:3] + was[4:7] + was[8:]
    assert lengths[10] > 0
    assert "12" in policy.acceptance._slots


def test_nobody_is_asked_where_no_draft_could_be_worth_it() -> None:
    linear = replace(SLOW_ROWS, weights_s=0.1)  # a draft costs nearly what a token does
    hopeless, hopeful = trained(linear, [0.3] * 4), trained(DENSE, [0.3] * 4)
    for policy in (hopeless, hopeful):
        policy._standing.clear()
        while not policy.choose(demands([7] * 4), 800, 100).is_settled:
            observe(policy, replace(policy.choose(demands([7] * 4), 800, 100), draft_lengths=(0,) * 4))
    decision = hopeless.choose_unasked(4)
    assert decision is not None
    assert (decision.draft_lengths, decision.reason) == ((0,) * 4, DraftReason.PLAIN_FASTEST)
    assert hopeless.choose_unasked(5) is None
    assert hopeful.choose_unasked(4) is None


def test_another_situation_is_decided_for_itself() -> None:
    policy = trained(DENSE, [0.9])
    first = settled(policy)
    assert policy.choose(demands([2]), 200, 100).draft_lengths[0] <= 2
    assert policy.choose(demands([7]), 200, 1).draft_lengths[0] <= 1
    assert policy.choose([DraftDemand("new", 7)], 200, 100) is not first
    assert policy.choose(demands([7]), 200, 100) is first


def test_outcome_that_cannot_be_learnt_from_is_gone_with_its_error() -> None:
    policy = trained(DENSE, [0.9])
    decision = settled(policy)
    beyond = DraftOutcome("0", 9, 9, 1, nodes=(8,))  # more than the policy ever asks for
    for _ in range(PolicySettings().steps_together - 1):
        policy.observe(decision, StepOutcome(1, 200, (beyond,), 1.0, 0.1))
    with pytest.raises(IndexError):
        policy.observe(decision, StepOutcome(1, 200, (beyond,), 1.0, 0.1))
    policy.forget(["0"])
    observe(policy, policy.choose(demands([7]), 200, 100), num_accepted=7)


def test_last_steps_of_a_sequence_teach_something_too() -> None:
    policy = trained(DENSE, [0.9])
    decision, before = settled(policy), policy.acceptance.pool_rates[0]
    observe(policy, decision, num_accepted=0)
    assert policy.acceptance.pool_rates[0] == before  # not yet
    policy.forget(["0"])
    assert policy.acceptance.pool_rates[0] < before


def test_what_was_observed_of_a_sequence_is_gone_with_it() -> None:
    policy = trained(DENSE, [0.9])
    observe(policy, settled(policy), num_accepted=7)
    policy.forget(["0"])
    assert not policy.acceptance._slots and not policy._probes._entries


@pytest.mark.parametrize(
    ("most", "spare", "reason"),
    [
        ([0, 0], 100, DraftReason.NOT_WANTED),
        ([], 100, DraftReason.NOT_WANTED),
        ([0, 0], 0, DraftReason.NOT_WANTED),
        ([7, 7], 0, DraftReason.NO_ROOM),
    ],
)
def test_nothing_can_be_drafted(most: list[int], spare: int, reason: DraftReason) -> None:
    decision = trained(DENSE, [0.9, 0.9]).choose(demands(most), 200, spare)
    assert (decision.draft_lengths, decision.reason) == ((0,) * len(most), reason)


def test_every_limit_holds_whatever_happens() -> None:
    policy, draws, reasons = DraftPolicy(7), random.Random(3), Counter[DraftReason]()
    for _ in range(600):
        most = [draws.choice([0, 1, 2, 7, 50]) for _ in range(draws.randint(1, 12))]
        spare = draws.choice([0, 1, 3, 10, 1000])
        decision = policy.choose(demands(most), draws.randint(1, 10_000), spare)
        assert len(decision.draft_lengths) == len(most)
        assert all(0 <= length <= min(limit, 7) for length, limit in zip(decision.draft_lengths, most, strict=True))
        assert sum(decision.draft_lengths) <= spare
        reasons[decision.reason] += 1
        observe(policy, decision, draws.randint(0, 3), draws.uniform(0.5, 2.0))
    assert {DraftReason.NO_ROOM, DraftReason.FASTEST, DraftReason.TRY_SHAPE} <= set(reasons)


def test_choosing_changes_nothing_that_another_choice_depends_on() -> None:
    policy = trained(DENSE, [0.9, 0.1])
    assert policy.choose(demands([7, 7]), 400, 100) == policy.choose(demands([7, 7]), 400, 100)


def test_drafts_where_it_pays_and_forecasts_the_speedup() -> None:
    decision = trained(DENSE, [0.9], 400).choose(demands([7]), 200, 100)
    assert decision.reason is DraftReason.FASTEST
    assert decision.draft_lengths == (7,)
    tokens, seconds = (1 - 0.9**8) / 0.1, 1.0 + 7 * 0.0505
    assert decision.expected_speedup == pytest.approx(tokens / seconds, rel=0.1)


def test_short_of_budget_the_likely_drafts_are_kept() -> None:
    policy = trained(DENSE, [0.1, 0.9], 400)
    for _ in range(20):
        decision = policy.choose(demands([7, 7]), 400, 2)
        if decision.reason is DraftReason.FASTEST:
            break
        observe(policy, decision)  # something was tried
    assert decision.draft_lengths == (0, 2)


def test_trials_stay_within_their_share_of_the_time() -> None:
    """Nothing to gain anywhere: all that is lost is what was tried, from the very first step on."""
    policy = DraftPolicy(7)
    simulation = Simulation(SLOW_ROWS, [0.3] * 4)
    plain_rate = 4 / SLOW_ROWS.verify_s([0] * 4, 800)
    num_steps = 800
    rate = simulation.run(policy, num_steps)
    lost_steps = simulation.spent_s * (1 - rate / plain_rate) / SLOW_ROWS.verify_s([0] * 4, 800)
    assert lost_steps <= 0.02 * num_steps + 10
    assert simulation.run(policy, num_steps) > 0.985 * plain_rate


def test_dear_trial_puts_off_the_next() -> None:
    """What counts is what a trial took, not what it was expected to."""
    simulation, policy = Simulation(DENSE, [0.6]), DraftPolicy(7, settings=PolicySettings(plain_share=0.02))
    simulation.run(policy, 100)
    assert any(decision.reason in TRIALS for decision in simulation.decisions[20:])
    decision = replace(policy.choose(demands([7]), 200, 100), reason=DraftReason.TRY_SHAPE)
    for _ in range(2):
        policy.observe(decision, StepOutcome(1, 200, (), 8 * decision.best_s, 0.0))
    simulation.run(policy, 300)
    assert not any(decision.reason in TRIALS for decision in simulation.decisions)


def test_nothing_is_lost_where_drafting_hardly_pays() -> None:
    """Drafting paid, and then gains 0.3 %: either way is right, and going to and fro between them must cost nothing."""
    hardware = Hardware(draft_step_s=0.096)
    for seed in (1, 2, 3):
        simulation = Simulation(hardware, [0.9], noise=0.02, longest_draft=1, seed=seed)
        policy = DraftPolicy(7)
        simulation.run(policy, 200)
        simulation.acceptance[0] = 0.1
        simulation.run(policy, 200)
        assert simulation.run(policy, 300) > 0.99 / hardware.verify_s([0], 200)


def test_plain_step_is_measured_now_and_then() -> None:
    """It loses what drafting gains: where that is 4.2 times as fast 0.76 of a step, where 1.38 times 0.27 (both by
    `fixed_rates`). At 0.75 % of the time that is one step in 102, or in 37."""
    for draft_step_s, interval in ((0.05, 102), (0.5, 37)):
        policy = DraftPolicy(7, settings=PolicySettings(plain_share=0.0075))
        simulation = Simulation(replace(DENSE, draft_step_s=draft_step_s), [0.9], longest_draft=7)
        simulation.run(policy, 300)
        simulation.run(policy, 1000)
        plain = [step for step, decision in enumerate(simulation.decisions) if not any(decision.draft_lengths)]
        assert len(plain) == pytest.approx(1000 / interval, rel=0.3)
        assert {simulation.decisions[step].reason for step in plain} == {DraftReason.TRY_PLAIN}


def test_stopped_sequence_is_probed_ever_more_rarely() -> None:
    policy = DraftPolicy(7)
    simulation = Simulation(DENSE, [0.9, 0.001])
    simulation.run(policy, 1200)
    bad = [step for step, decision in enumerate(simulation.decisions) if decision.draft_lengths[1] and step > 300]
    probed = [step for step, decision in enumerate(simulation.decisions) if "1" in decision.probed_ids]
    assert len(bad) < 45  # of 900
    assert probed
    assert sum(decision.draft_lengths[0] for decision in simulation.decisions[300:]) > 5 * 900  # its neighbour goes on


def test_stays_with_its_choice_under_small_differences() -> None:
    simulation, policy = Simulation(DENSE, [0.6]), DraftPolicy(7)
    simulation.run(policy, 300)
    simulation.run(policy, 300)
    lengths = [d.draft_lengths[0] for d in simulation.decisions if d.reason not in TRIALS]
    assert sum(a != b for a, b in itertools.pairwise(lengths)) < 40


def test_step_without_times_still_teaches_acceptance() -> None:
    """It also ran a prefill, so its time says nothing."""
    policy = trained(DENSE, [0.9])
    policy._learn()  # what was observed before
    policy._standing.clear()
    decision = policy.choose(demands([7]), 200, 100)
    before = decision.plain_s
    for _ in range(120):
        policy.observe(decision, StepOutcome(1, 200, (DraftOutcome("0", 7, 7, 0),), 0.0, 0.0))
    after = policy.choose(demands([7]), 200, 100)
    assert after.plain_s == pytest.approx(before)
    assert sum(after.draft_lengths) <= 1


def test_outcome_may_differ_from_the_decision() -> None:
    """Blocks ran out, a sequence left, and the drafter had nothing to say."""
    policy = trained(DENSE, [0.9, 0.9, 0.9])
    decision = policy.choose(demands([7, 7, 7]), 600, 100)
    policy.forget(["1", "unknown"])
    drafts = (DraftOutcome("0", 2, 1, 1), DraftOutcome("1", 3, 3, 0))
    policy.observe(decision, StepOutcome(2, 400, drafts, 1.0, 0.1))
    policy.observe(replace(decision, draft_lengths=()), StepOutcome(0, 0, (), 0.0, 0.0))
    assert len(policy.choose(demands([7, 7]), 400, 100).draft_lengths) == 2


def test_shapes_that_can_hardly_be_better_are_not_tried() -> None:
    """A trial has to be decided on and learnt from by itself, which costs more than a percent may gain."""
    policy = DraftPolicy(7)
    simulation = Simulation(DENSE, [0.6] * 4)
    simulation.run(policy, 300)
    simulation.run(policy, 600)
    assert sum(decision.reason is DraftReason.TRY_SHAPE for decision in simulation.decisions) < 40
