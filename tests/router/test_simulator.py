"""The simulator's times on scenarios small enough to be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from router.candidate import Role
from router.config import AdmissionPolicy, LimitPolicy, PlacementPolicy
from router.observation import Observation
from router.outcomes import Slo, Totals
from router.scenario import Delays, Failure, RoleChange, Scenario
from router.simulator import simulate
from router.step_costs import Experts, StepCosts
from router.synthetic_trace import Lengths, Phase, synthetic_trace
from router.traced_request import TracedRequest
from tests.router.simulations import COSTS, LAYOUT, a_worker, p_and_d, played

PROMPT_S = 0.1 + 100 * 0.001  # of 100 tokens
ROUND_S = 0.011  # of one sequence
TOKEN_BYTES = LAYOUT.token_bytes


def test_one_request() -> None:
    (outcome,) = played(p_and_d(), TracedRequest(2.0, 100, 20))
    assert outcome.ttft_s == pytest.approx(PROMPT_S)
    assert outcome.tpot_s == pytest.approx(ROUND_S)
    assert outcome.worst_gap_s == pytest.approx(ROUND_S)
    assert outcome.ended_at_s == pytest.approx(2.0 + PROMPT_S + 19 * ROUND_S)
    assert (outcome.prefill, outcome.decode, outcome.error) == ("p0", "d0", "")


def test_the_first_token_waits_for_the_prompts_before_it() -> None:
    first, second = played(p_and_d(), TracedRequest(0.0, 100, 1), TracedRequest(0.05, 50, 1))
    assert first.ttft_s == pytest.approx(PROMPT_S)
    assert second.ttft_s == pytest.approx(PROMPT_S - 0.05 + 0.1 + 50 * 0.001)


def test_prompts_share_a_step_and_are_cut_where_it_is_full() -> None:
    """Two of 100 tokens wait until 0.2. In a step of 200 tokens both are computed; in one of 150 half of the second."""
    trace = [TracedRequest(at_s, 100, 1) for at_s in (0.0, 0.05, 0.06)]
    _, second, third = played(p_and_d(max_step_tokens=200), *trace)
    assert (second.ttft_s, third.ttft_s) == pytest.approx((0.2 + 0.3 - 0.05, 0.2 + 0.3 - 0.06))
    _, second, third = played(p_and_d(max_step_tokens=150), *trace)
    assert (second.ttft_s, third.ttft_s) == pytest.approx((0.2 + 0.25 - 0.05, 0.2 + 0.25 + 0.15 - 0.06))


def test_a_long_prompt_gives_way_to_a_short_one() -> None:
    """Shortest remaining first: 200 of 600 tokens are computed, then the 50 that came meanwhile and 150 of the 400."""
    long, short = played(p_and_d(max_step_tokens=200), TracedRequest(0.0, 600, 1), TracedRequest(0.1, 50, 1))
    assert short.ttft_s == pytest.approx(0.3 - 0.1 + 0.3)
    assert long.ttft_s == pytest.approx(0.3 + 0.3 + 0.3 + 0.15)


def test_two_share_a_decode_batch() -> None:
    """The second is there at 0.4, in the middle of the first one's 19th round, which ends at 0.409."""
    workers = p_and_d(max_step_tokens=100)
    first, second = played(workers, TracedRequest(0.0, 100, 30), TracedRequest(0.0, 100, 11))
    assert first.ended_at_s == pytest.approx(0.409 + 10 * 0.012)
    assert second.ended_at_s == pytest.approx(0.409 + 10 * 0.012)
    assert first.worst_gap_s == pytest.approx(0.012)
    assert second.worst_gap_s == pytest.approx(0.409 + 0.012 - 0.4)
    assert second.tpot_s == pytest.approx((0.409 + 0.12 - 0.4) / 10)


def test_context_experts_and_drafts_count() -> None:
    """Contexts of 101, 102 and so on; one token touches 2 of 8 experts; two tokens a step on average."""
    costs = replace(COSTS, decode_context_token_s=1e-4, decode_expert_s=0.002, experts=Experts(8, 2))
    (outcome,) = played(p_and_d(costs=costs), TracedRequest(0.0, 100, 11))
    mean_s = 0.011 + 105.5 * 1e-4 + 2 * 0.002
    assert outcome.tpot_s == pytest.approx(mean_s)
    assert outcome.worst_gap_s == pytest.approx(mean_s + 4.5e-4)
    (drafted,) = played(p_and_d(costs=replace(costs, tokens_per_step=2.0)), TracedRequest(0.0, 100, 11))
    assert drafted.tpot_s == pytest.approx(mean_s / 2)
    assert drafted.worst_gap_s == pytest.approx(mean_s + 4.5e-4)


@pytest.mark.parametrize(("all_s", "exposed_s"), [(0.04, 0.01), (1.0, 0.85)])
def test_a_hand_over_hides_behind_prefill(all_s: float, exposed_s: float) -> None:
    """Four layers, each computed in 0.05 s. One takes 0.01 s on the first link, and hides but for the last one; on the
    second all take 1 s, from when the first is there."""
    (outcome,) = played(p_and_d(link_bytes_per_s=100 * TOKEN_BYTES / all_s), TracedRequest(0.0, 100, 2))
    assert outcome.ttft_s == pytest.approx(PROMPT_S)
    assert outcome.worst_gap_s == pytest.approx(exposed_s + ROUND_S)


def test_messages_and_the_hand_over_take_their_time() -> None:
    """To the worker, for its ticket and back, and to the router."""
    (outcome,) = played(p_and_d(), TracedRequest(0.0, 100, 2), delays=Delays(message_s=0.01, hand_over_s=0.005))
    assert outcome.ttft_s == pytest.approx(4 * 0.01 + PROMPT_S)
    assert outcome.tpot_s == pytest.approx(0.005 + ROUND_S)


def test_a_full_decode_worker_is_asked_again() -> None:
    """10 blocks: the first takes 7 and grows to 8, the second needs 7. The router does not know: no report comes."""
    workers = [a_worker("p0", Role.PREFILL), a_worker("d0", Role.DECODE, num_blocks=10)]
    first, second = played(
        workers, TracedRequest(0.0, 100, 20), TracedRequest(0.25, 100, 2), delays=Delays(report_s=60.0)
    )
    assert first.ended_at_s == pytest.approx(0.2 + 19 * ROUND_S)
    starts_at = second.at_s + (second.ttft_s or 0.0) - PROMPT_S
    assert first.ended_at_s <= starts_at <= first.ended_at_s + 0.075


def test_blocks_that_run_out_preempt_the_newest() -> None:
    """20 blocks; both take 7 and want 13 in the end. The second is computed again when the first has ended."""
    workers = [a_worker("p0", Role.PREFILL, max_step_tokens=100), a_worker("d0", Role.DECODE, num_blocks=20)]
    first, second = played(workers, TracedRequest(0.0, 100, 101), TracedRequest(0.0, 100, 101))
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    # The first has 120 tokens at 0.409, the second 101; when that has 145 and the first 164 they want 11 and 10 blocks.
    # Of the 9 that the second gives back the first takes 2 until it ends, and 7 are found again.
    both_until = 0.409 + 44 * 0.012
    assert first.ended_at_s == pytest.approx(both_until + (201 - 164) * ROUND_S)
    again_at = first.ended_at_s + 0.1 + (145 - 7 * 16) * 0.001
    assert second.worst_gap_s == pytest.approx(again_at - both_until)
    assert second.ended_at_s == pytest.approx(again_at + (201 - 146) * ROUND_S)


def test_a_colocated_worker_computes_prompts_while_it_decodes() -> None:
    """In such a step the prompt's base counts, and what the sequence adds."""
    first, second = played([a_worker("w", Role.BOTH)], TracedRequest(0.0, 100, 40), TracedRequest(0.3, 100, 2))
    began_at = 0.2 + 10 * ROUND_S  # the round that was under way at 0.3 has ended
    assert (first.prefill, first.decode) == ("w", "w")
    assert second.ttft_s == pytest.approx(began_at + PROMPT_S + 0.001 - 0.3)
    assert first.worst_gap_s == pytest.approx(PROMPT_S + 0.001)
    assert first.ended_at_s == pytest.approx(began_at + PROMPT_S + 0.001 + 0.012 + 27 * ROUND_S)


def test_a_death_while_decoding_is_resumed_elsewhere() -> None:
    """At 0.25 there are 5 tokens, the last since 0.244; the prompt and they are computed again."""
    (alone,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 30))
    (outcome,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 30), failures=[Failure(0.25, alone.decode)])
    assert (outcome.num_resumes, outcome.num_retries, outcome.num_output_tokens) == (1, 0, 30)
    assert outcome.decode != alone.decode
    assert outcome.ttft_s == pytest.approx(PROMPT_S)
    waited_s = outcome.worst_gap_s - (0.25 - 0.244) - (0.1 + 105 * 0.001)
    assert 0.025 <= waited_s <= 0.05
    assert outcome.ended_at_s == pytest.approx(0.244 + outcome.worst_gap_s + 24 * ROUND_S)


def test_a_death_while_prefilling_is_tried_again() -> None:
    """The decode worker keeps blocks until the dead one cannot be writing any more; `played` sees them come back."""
    (alone,) = played(p_and_d(2, 1), TracedRequest(0.0, 100, 5))
    (outcome,) = played(p_and_d(2, 1), TracedRequest(0.0, 100, 5), failures=[Failure(0.15, alone.prefill)])
    assert (outcome.num_resumes, outcome.num_retries, outcome.num_output_tokens) == (0, 1, 5)
    assert 0.15 + 0.025 + PROMPT_S <= (outcome.ttft_s or 0.0) <= 0.15 + 0.05 + PROMPT_S


def test_a_worker_that_comes_back_is_used_again() -> None:
    outcomes = played(
        p_and_d(), TracedRequest(0.0, 100, 30), TracedRequest(4.0, 100, 2), failures=[Failure(0.25, "d0", 1.0)]
    )
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[0].num_resumes == 1
    assert outcomes[0].worst_gap_s > 0.75  # until there was a decode worker again


def test_without_a_decode_worker_requests_fail_in_time() -> None:
    (outcome,) = played([a_worker("p0", Role.PREFILL)], TracedRequest(1.0, 100, 30))
    assert (outcome.error, outcome.ttft_s) == ("NO_WORKER", None)
    assert 6.0 <= outcome.ended_at_s <= 6.3


def test_a_flip_hands_its_sequences_over_without_a_pause() -> None:
    """Over links that take no time nothing is lost, wherever in a round it goes."""
    (alone,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 60))
    flip = RoleChange(0.3, alone.decode, Role.PREFILL)
    trace = TracedRequest(0.0, 100, 60), TracedRequest(1.0, 100, 5), TracedRequest(1.0, 100, 5)
    moved, *later = played(p_and_d(1, 2), *trace, role_changes=[flip])
    assert moved.num_moves == 1
    assert moved.decode != alone.decode
    assert moved.ended_at_s == pytest.approx(alone.ended_at_s)
    assert moved.worst_gap_s == pytest.approx(ROUND_S)
    assert {outcome.prefill for outcome in later} == {"p0", alone.decode}


def test_a_flip_pauses_for_what_is_written_last() -> None:
    """All but 16 tokens at most, and one at least, have been sent when it stands still."""
    token_s, hand_over_s = 5e-5, 0.03
    workers, delays = p_and_d(1, 2, link_bytes_per_s=TOKEN_BYTES / token_s), Delays(hand_over_s=hand_over_s)
    (alone,) = played(workers, TracedRequest(0.0, 100, 60), delays=delays)
    flip = RoleChange(0.4, alone.decode, Role.PREFILL)
    (moved,) = played(workers, TracedRequest(0.0, 100, 60), role_changes=[flip], delays=delays)
    assert moved.num_moves == 1
    assert token_s <= moved.ended_at_s - alone.ended_at_s - hand_over_s <= 16 * token_s + 1e-9


def test_what_was_moved_counts_once_at_the_router() -> None:
    """At 2 s there are about 265 tokens, in 17 blocks: they are in the reports, and no longer on their way."""
    seen: list[Observation] = []

    def plan(observed: Observation) -> Mapping[str, Role]:
        seen.append(observed)
        return {}

    (alone,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 200))
    flip = RoleChange(0.3, alone.decode, Role.PREFILL)
    (moved,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 200), role_changes=[flip], planner=plan, plan_every_s=2.0)
    (target,) = [worker for worker in seen[0].workers if worker.id.name == moved.decode]
    assert (moved.num_moves, target.num_active) == (1, 1)
    assert 16 <= target.num_blocks - target.num_free_blocks <= 18


def test_a_flip_without_hand_over_leaves_what_is_there() -> None:
    (alone,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 60))
    flip = RoleChange(0.3, alone.decode, Role.PREFILL, hands_over=False)
    (stayed,) = played(p_and_d(1, 2), TracedRequest(0.0, 100, 60), role_changes=[flip])
    assert (stayed.num_moves, stayed.decode) == (0, alone.decode)
    assert stayed.ended_at_s == pytest.approx(alone.ended_at_s)


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    trace = (
        TracedRequest(0.0, 1100, 2, (1, 2)),
        TracedRequest(5.0, 1100, 2, (1, 2)),
        TracedRequest(9.0, 1024, 2, (1, 2)),
    )
    first, second, third = played(p_and_d(2, 1, max_step_tokens=2048), *trace)
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 1024, 512]  # the last token is computed
    assert first.prefill == second.prefill == third.prefill
    assert second.ttft_s == pytest.approx(0.1 + 76 * 0.001)


def test_prefixes_give_way_when_their_room_is_needed() -> None:
    """80 blocks hold a prompt of 1,024 tokens and not two."""
    trace = [TracedRequest(4.0 * i, 1100, 1, (2 * (i % 2), 2 * (i % 2) + 1)) for i in range(4)]
    outcomes = played(p_and_d(num_blocks=80, max_step_tokens=2048), *trace)
    assert [outcome.num_cached_tokens for outcome in outcomes] == [0, 0, 0, 0]


def test_the_gate_refuses_what_would_wait_too_long() -> None:
    policy = PlacementPolicy(LimitPolicy(max_sequences=1))
    trace = [TracedRequest(0.01 * i, 100, 200) for i in range(6)]
    outcomes = played(p_and_d(), *trace, placement=policy, admission=AdmissionPolicy(max_queued=2))
    assert [outcome.error for outcome in outcomes].count("OVERLOADED") >= 2
    served = [outcome for outcome in outcomes if not outcome.error]
    assert outcomes[0].wait_s == 0.0
    assert all(outcome.wait_s > 1.0 for outcome in served[1:])


def test_a_planner_is_asked_and_obeyed() -> None:
    seen: list[Observation] = []

    def plan(observed: Observation) -> Mapping[str, Role]:
        seen.append(observed)
        return {"d1": Role.PREFILL} if len(seen) == 2 else {}

    trace = [TracedRequest(0.5 + 0.4 * i, 100, 5) for i in range(12)]
    outcomes = played(p_and_d(1, 2), *trace, planner=plan, plan_every_s=1.0)
    assert [observed.now_s for observed in seen[:3]] == [1.0, 2.0, 3.0]
    assert [arrival.at_s for arrival in seen[0].arrived] == pytest.approx([0.5, 0.9])
    assert sum(len(observed.answered) for observed in seen) >= 10
    assert (seen[0].answered[0].num_prompt_tokens, seen[0].answered[0].num_output_tokens) == (100, 5)
    assert [len([w for w in observed.workers if w.role is Role.PREFILL]) for observed in seen[:3]] == [1, 1, 2]
    assert {outcome.decode for outcome in outcomes if outcome.at_s > 2.0} == {"d0"}


def test_a_planner_is_told_what_was_learnt_and_not_what_is_true() -> None:
    """One worker of a kind is 30 % slower; one of another kind says nothing of these."""
    load = Phase(90.0, 12.0, Lengths(300, 0.8, 16, 2000), Lengths(40, 0.8, 2, 200))
    true = StepCosts(0.02, 1e-4, 1e-8, 0.01, 5e-4, 1e-7)
    workers = p_and_d(3, 2, costs=true, num_blocks=4000, max_step_tokens=512)
    workers[0] = replace(workers[0], costs=true.scaled(1.3))
    workers.append(a_worker("idle", Role.PREFILL, flippable=False, hardware="other", costs=true.scaled(50.0)))
    seen: list[Observation] = []

    def planner(observed: Observation) -> Mapping[str, Role]:
        seen.append(observed)
        return {}

    simulate(Scenario(workers, LAYOUT, planner=planner, plan_every_s=1.0), synthetic_trace([load], seed=3))
    models = seen[-1].models
    assert models is not None
    costs = {worker.id.name: models.costs_of(worker.id) for worker in seen[-1].workers}
    for name in ("p1", "p2", "d0"):
        assert costs[name].decode_s(8, 4000) == pytest.approx(true.decode_s(8, 4000), rel=0.03)
        assert costs[name].prefill_s([(300, 300)]) == pytest.approx(true.prefill_s([(300, 300)]), rel=0.03)
    assert costs["p0"].prefill_s([(300, 300)]) == pytest.approx(1.3 * true.prefill_s([(300, 300)]), rel=0.05)
    d0 = next(worker.id for worker in seen[-1].workers if worker.id.name == "d0")
    assert min(models.confidences_of(d0)) > 0.7


def test_totals_count_what_was_promised() -> None:
    scenario = Scenario(p_and_d(), LAYOUT)
    totals = simulate(scenario, [TracedRequest(0.0, 100, 20), TracedRequest(0.05, 50, 20), TracedRequest(3.0, 100, 20)])
    slo = Slo(0.25, 0.02)  # of the second the first token comes after 0.3 s
    assert (totals.num_requests, totals.num_within(slo), totals.num_output_tokens) == (3, 2, 60)
    assert totals.attainment(slo) == pytest.approx(2 / 3)
    assert totals.duration_s == pytest.approx(3.0 + PROMPT_S + 19 * ROUND_S)
    assert totals.goodput(slo) == pytest.approx(2 / (totals.duration_s * 2))
    assert totals.prefill_utilisation == pytest.approx((0.2 + 0.15 + 0.2) / (2 * totals.duration_s))


def test_an_unsorted_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="sort the trace"):
        played(p_and_d(), TracedRequest(2.0, 10, 1), TracedRequest(1.0, 10, 1))


def test_scenarios_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="no worker d9"):
        Scenario(p_and_d(), LAYOUT, failures=[Failure(1.0, "d9")])
    with pytest.raises(ValueError, match="name of its own"):
        Scenario([*p_and_d(), *p_and_d()], LAYOUT)
    with pytest.raises(ValueError, match="num_blocks of p0 is 0"):
        p_and_d(num_blocks=0)
    assert Totals().attainment(Slo(1.0, 1.0)) == 1.0
