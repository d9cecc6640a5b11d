"""What two pools make of requests, against what can be worked out by hand."""

from __future__ import annotations

import math
from array import array

import pytest

from router.candidate import Role
from router.outcomes import Outcome, Slo, percentile
from router.replay import MISSED, DecodePool, Expected, Played, PrefillPool, blended, replay
from router.scenario import Delays, Scenario
from router.simulator import simulate
from router.step_costs import StepCosts
from router.traced_request import TracedRequest
from tests.router.simulations import LAYOUT, a_worker

FLAT = StepCosts(0.0, 0.001, 0.0, 0.010, 0.0, 0.0)  # 10 ms a step, however many decode
SHARED = StepCosts(0.0, 0.001, 0.0, 0.010, 0.010, 0.0)  # 10 ms, and 10 ms for each sequence


def prefill(num_workers: int, *prompts_s: float) -> PrefillPool:
    return PrefillPool([prompts_s] * num_workers, [0.0] * num_workers)


def expected(at_s: float, num_output: int = 1) -> Expected:
    return Expected(at_s, 100, 0, num_output)


def test_prompts_wait_for_each_other() -> None:
    played = replay([expected(0.0), expected(0.1)], prefill(1, 1.0, 1.0), DecodePool(FLAT, 1, 9))
    assert list(played.ttfts_s) == pytest.approx([1.0, 1.9])
    assert list(played.tpots_s) == [0.0, 0.0]


def test_two_workers_take_two_prompts() -> None:
    requests = [expected(0.0), expected(0.1), expected(0.2)]
    played = replay(requests, prefill(2, 1.0, 1.0, 1.0), DecodePool(FLAT, 1, 9))
    assert list(played.ttfts_s) == pytest.approx([1.0, 1.0, 1.8])


def test_of_unequal_workers_the_one_is_taken_where_it_is_done_first() -> None:
    """The slow one takes 3 s. The second waits 1 s for the fast one, the third 2 s; the fourth would wait 3 s."""
    pool = PrefillPool([(1.0,) * 4, (3.0,) * 4], [0.0, 0.0])
    played = replay([expected(0.0)] * 4, pool, DecodePool(FLAT, 1, 9))
    assert sorted(played.ttfts_s) == pytest.approx([1.0, 2.0, 3.0, 3.0])


def test_a_worker_that_is_busy_begins_later() -> None:
    played = replay([expected(0.0)], PrefillPool([(1.0,)], [2.5]), DecodePool(FLAT, 1, 9))
    assert list(played.ttfts_s) == pytest.approx([3.5])


def test_steps_of_equal_length() -> None:
    played = replay([expected(0.0, 11)], prefill(1, 1.0), DecodePool(FLAT, 1, 9))
    assert list(played.tpots_s) == pytest.approx([0.010])


def test_sequences_share_a_worker() -> None:
    """Both are there from 0 on, with 20 and 40 tokens to come. Together a step takes 30 ms, alone 20: the first ends
    after 20 steps at 0.6 s, the second after 20 more at 1.0 s."""
    played = replay([expected(0.0, 21), expected(0.0, 41)], prefill(2, 0.0, 0.0), DecodePool(SHARED, 1, 9))
    assert list(played.tpots_s) == pytest.approx([0.030, 1.0 / 40])


def test_on_two_workers_each_has_half_of_them() -> None:
    played = replay([expected(0.0, 21), expected(0.0, 21)], prefill(2, 0.0, 0.0), DecodePool(SHARED, 2, 9))
    assert list(played.tpots_s) == pytest.approx([0.020, 0.020])


def test_a_worker_that_joins_later_helps_then() -> None:
    """Until 0.3 s both have got 10 tokens; then there are three on two workers, and a step takes 25 ms."""
    requests = [expected(0.0, 21), expected(0.0, 21), expected(0.3, 21)]
    played = replay(requests, prefill(3, 0.0, 0.0, 0.0), DecodePool(SHARED, 2, 9, joins_at_s=[0.3]))
    assert played.tpots_s[0] == pytest.approx((10 * 0.030 + 10 * 0.025) / 20)


def test_what_runs_already_is_in_the_way() -> None:
    """Its 10 tokens take ten steps of 30 ms, then the other is alone for its last ten."""
    pool = DecodePool(SHARED, 1, 9, running=[(100.0, 10.0)])
    played = replay([expected(0.0, 21)], prefill(1, 0.0), pool)
    assert list(played.tpots_s) == pytest.approx([(10 * 0.030 + 10 * 0.020) / 20])


def test_where_as_many_decode_as_can_the_next_prompt_waits() -> None:
    """The first ends at 1.0 + 0.2 s; only then the second prompt begins."""
    played = replay([expected(0.0, 21), expected(0.0, 21)], prefill(2, 1.0, 1.0), DecodePool(FLAT, 1, 1))
    assert list(played.ttfts_s) == pytest.approx([1.0, 2.2])


def test_who_would_wait_too_long_is_refused() -> None:
    played = replay([expected(0.0)] * 3, prefill(1, 1.0, 1.0, 1.0), DecodePool(FLAT, 1, 9), most_wait_s=1.5)
    assert list(played.ttfts_s) == pytest.approx([1.0, 2.0, math.inf])


def test_scores() -> None:
    """Twice as late is worth half of what a miss is worth at most; what was refused, nothing."""
    played = Played([0.5, 2.0, 0.5, math.inf], [0.0, 0.05, 0.2, math.inf])
    assert played.scores([Slo(1.0, 0.1)] * 4) == pytest.approx([1.0, MISSED / 2, MISSED / 2, 0.0])


def test_unequal_decode_workers_keep_the_same_pace() -> None:
    """Bisection over the step time: the sequences that make it on each sum up to all."""
    first, second = StepCosts(0.0, 0.0, 0.0, 0.010, 0.001, 1e-7), StepCosts(0.0, 0.0, 0.0, 0.020, 0.003, 2e-7)
    context, number = 1000.0, 60.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        held = sum(
            (middle - each.decode_base_s) / (each.decode_sequence_s + context * each.decode_context_token_s)
            for each in (first, second)
        )
        low, high = (middle, high) if held < number else (low, middle)
    of_each = number / 2
    assert blended([first, second], context).decode_s(of_each, of_each * context) == pytest.approx(low)
    assert blended([first, first], context) is first


@pytest.mark.parametrize("num_prefill", [2, 3, 4])
def test_it_comes_close_to_the_simulator(num_prefill: int) -> None:
    """A minute of even load on six workers, with each of these ratios."""
    costs, slo = StepCosts(0.015, 2.6e-4, 0.0, 0.022, 6.5e-4, 1.2e-7), Slo(1.0, 0.05)
    requests = [Expected(0.2 * index, 600 + 97 * (index % 11), 0, 40 + 31 * (index % 13)) for index in range(300)]
    workers = [
        a_worker(f"w{i}", Role.PREFILL if i < num_prefill else Role.DECODE, costs=costs, num_blocks=8000)
        for i in range(6)
    ]
    outcomes: list[Outcome] = []
    trace = [TracedRequest(each.at_s, each.num_prompt_tokens, each.num_output_tokens) for each in requests]
    totals = simulate(Scenario(workers, LAYOUT, Delays()), trace, outcomes.append)
    prompts_s = [costs.prompt_s(each.num_prompt_tokens, 512) for each in requests]
    played = replay(requests, prefill(num_prefill, *prompts_s), DecodePool(costs, 6 - num_prefill, 1000))
    attained = played.scores([slo] * len(requests)).count(1.0) / len(requests)
    assert attained == pytest.approx(totals.attainment(slo), abs=0.05)
    for share in (0.5, 0.9):
        tpot_s = percentile(array("d", played.tpots_s), share)
        assert tpot_s == pytest.approx(percentile(totals.tpots_s, share), rel=0.15)
        if num_prefill > 2:  # with two the queue grows without end
            ttft_s = percentile(array("d", played.ttfts_s), share)
            assert ttft_s == pytest.approx(percentile(totals.ttfts_s, share), rel=0.2)
