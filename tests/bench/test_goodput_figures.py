"""What bench.goodput reckons, by hand; and the search, on sides whose highest rate is known."""

from __future__ import annotations

import math

import pytest

from bench.goodput_contest import Unloaded, common_rate
from bench.goodput_figures import Answer, Played, RateSearch, Slo, arrivals, joined, num_needed, percentile, ratio
from bench.goodput_report import COLOCATED, PD, VLLM_COLOCATED, VLLM_PD, Outcome

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def answer(ttft_s: float, tpot_s: float, worst_gap_s: float = 0.0) -> Answer:
    return Answer(ttft_s, tpot_s, worst_gap_s)


def test_times_of_an_answer() -> None:
    """Asked at 10; one token, then two and three."""
    seen = Answer.of(10.0, [(10.5, 1), (10.75, 2), (11.5, 3)], num_wanted=6, num_received=40)
    assert (seen.ttft_s, seen.tpot_s, seen.worst_gap_s) == (0.5, 1.0 / 5, 0.75)
    assert (seen.num_received, seen.failure) == (40, "")


def test_tokens_that_come_with_the_first_are_not_those_after_it() -> None:
    assert Answer.of(0.0, [(1.0, 3), (2.0, 2)], num_wanted=5).tpot_s == 0.5


def test_answer_in_one_message_has_no_gaps() -> None:
    seen = Answer.of(0.0, [(1.5, 4)], num_wanted=4)
    assert (seen.ttft_s, seen.tpot_s, seen.worst_gap_s) == (1.5, 0.0, 0.0)


@pytest.mark.parametrize("messages", [[], [(1.0, 1), (2.0, 2)]])
def test_short_answer_has_failed(messages: list[tuple[float, int]]) -> None:
    seen = Answer.of(0.0, messages, num_wanted=4)
    assert seen.failure == "SHORT"
    assert not seen.keeps(Slo(1e9, 1e9))


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "keeps"), [(2.0, 0.05, True), (2.01, 0.01, False), (0.1, 0.051, False), (0.1, 0.01, True)]
)
def test_both_slos_have_to_be_kept(ttft_s: float, tpot_s: float, keeps: bool) -> None:
    assert answer(ttft_s, tpot_s).keeps(SLO) is keeps


@pytest.mark.parametrize(("num_requests", "needed"), [(1, 1), (9, 9), (10, 9), (11, 10), (20, 18), (70, 63), (100, 90)])
def test_needed_of_90_percent(num_requests: int, needed: int) -> None:
    assert num_needed(num_requests) == needed


def test_percentile_by_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 10.0, 9.0, 8.0, 7.0, 6.0]
    assert [percentile(values, share) for share in (0.5, 0.9, 1.0, 0.01)] == [5.0, 9.0, 10.0, 1.0]
    assert percentile([7.0], 0.9) == 7.0
    assert math.isnan(percentile([], 0.9))


@pytest.mark.parametrize("num_late", [0, 1, 2, 3])
def test_run_is_kept_just_if_its_percentile_is_within(num_late: int) -> None:
    """Two of twenty may be late."""
    played = Played(1.0, 20, [answer(3.0, 0.01)] * num_late + [answer(1.0, 0.01)] * (20 - num_late))
    assert played.is_kept(SLO) == (num_late <= 2) == (played.ttft_s(0.9) <= SLO.ttft_s)


def test_requests_without_an_answer_are_not_in_time() -> None:
    """A run that was broken off: 8 of 10 are in time, and the others never came."""
    assert not Played(1.0, 10, [answer(1.0, 0.01)] * 8).is_kept(SLO)
    assert Played(1.0, 10, [answer(1.0, 0.01)] * 9).is_kept(SLO)


def test_runs_at_one_rate_are_joined() -> None:
    both = joined(
        [Played(2.0, 3, [answer(1.0, 0.1, 0.3)]), Played(2.0, 4, [answer(5.0, 0.2, 0.2), Answer.failed("X")])]
    )
    assert (both.per_s, both.num_requests, len(both.answers), both.num_failed) == (2.0, 7, 3, 1)
    assert both.worst_gap_s == math.inf


def test_share_of_prompts_handed_over_is_of_those_answered() -> None:
    answers = [Answer(1, 1, 1, num_received=30), Answer(1, 1, 1), Answer.failed("X"), Answer(1, 1, 1, num_received=7)]
    assert Played(1.0, 4, answers).share_received == pytest.approx(2 / 3)


def test_arrivals_are_poisson() -> None:
    """20,000 s at 2 a second: 40,000 with a deviation of 200; gaps as often above their mean as e^-1 says."""
    moments = arrivals(seed=3, per_s=2.0, seconds=20_000.0)
    gaps = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    assert abs(len(moments) - 40_000) < 1000
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)
    assert moments == sorted(moments)
    assert moments[-1] < 20_000.0


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow, fast = arrivals(1, 0.5, 60.0), arrivals(1, 2.0, 60.0)
    assert fast[: len(slow)] == pytest.approx([moment / 4 for moment in slow])
    assert arrivals(2, 0.5, 60.0) != slow


def test_somebody_comes_at_any_rate() -> None:
    assert len(arrivals(0, 0.001, 1.0)) == 1


def searched(first_per_s: float, limit: float, tolerance: float = 1.1) -> tuple[RateSearch, list[float]]:
    search, tried = RateSearch(first_per_s, tolerance), list[float]()
    while not search.is_done:
        tried.append(search.next_per_s)
        search.tell(tried[-1], is_kept=tried[-1] <= limit)
        assert len(tried) < 30
    return search, tried


def test_search_by_hand() -> None:
    """From 1, with 3 as the most: 2 is kept, 4 is not; sqrt(8) is kept, sqrt(sqrt(8) * 4) is not, and 1.19 will do."""
    search, tried = searched(1.0, 3.0, tolerance=1.2)
    assert tried == pytest.approx([1.0, 2.0, 4.0, 8**0.5, (4 * 8**0.5) ** 0.5])
    assert search.highest == pytest.approx(8**0.5)


@pytest.mark.parametrize("limit", [0.07, 0.3, 1.0, 1.9, 7.7, 20.0])
def test_search_ends_within_the_tolerance_below_the_limit(limit: float) -> None:
    search, _ = searched(1.0, limit)
    assert limit / 1.1 <= search.highest <= limit


def test_search_gives_up_where_there_is_no_limit() -> None:
    assert searched(1.0, 0.0)[0].highest == 0.0
    assert searched(1.0, math.inf)[0].highest == 32.0


def test_ratio_of_what_has_one() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(0.0, 2.0) == 0.0
    for above, below in ((1.0, 0.0), (math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        assert ratio(above, below) is None


def test_common_rate_is_the_lowest_there_is() -> None:
    assert common_rate([0.5, 0.4], 1.0) == 0.4
    assert common_rate([0.5, 0.0], 1.0) == 0.5
    assert common_rate([0.0, 0.0], 1.0) == 1.0


def test_slos_and_first_rate_follow_from_what_is_unloaded() -> None:
    """600 of 1,000 tokens take 0.6 s, 80 tokens 1.4 s more."""
    assert Unloaded(ttft_s=1.0, tpot_s=0.5).slo(None, None) == Slo(3.0, 1.25)
    assert Unloaded(ttft_s=1.0, tpot_s=0.5).slo(0.7, None) == Slo(0.7, 1.25)
    assert Unloaded(ttft_s=1.0, tpot_s=0.5).slo(None, 0.1) == Slo(3.0, 0.1)
    unloaded = Unloaded(ttft_s=1.0, tpot_s=0.0175)
    assert unloaded.first_rate(600.0, 1000) == pytest.approx(0.5)


def outcome(**highest: float) -> Outcome:
    compared = {
        PD: Played(0.5, 2, [answer(1.0, 0.02, 0.1), answer(2.0, 0.04, 0.3)]),
        COLOCATED: Played(0.5, 2, [answer(5.0, 0.05, 0.6), answer(1.0, 0.01, 0.2)]),
    }
    names = {"pd": PD, "colocated": COLOCATED, "vllm_pd": VLLM_PD, "vllm_colocated": VLLM_COLOCATED}
    return Outcome("m", SLO, 9.0, {names[name]: per_s for name, per_s in highest.items()}, 0.5, compared)


def test_ratios_are_above_one_where_separate_pools_are_better() -> None:
    result = outcome(pd=0.6, colocated=0.5).result
    expected = {"goodput_ratio": 1.2, "ttft_p90_ratio": 2.5, "tpot_p90_ratio": 1.25, "worst_gap_ratio": 2.0}
    assert {name: result[name] for name in expected} == expected
    assert (result["rate_pd"], result["rate_colocated"], result["bench"]) == (0.6, 0.5, "goodput")
    assert not any("vllm" in name for name in result)


def test_vllm_is_compared_like_with_like_and_best_with_best() -> None:
    result = outcome(pd=0.6, colocated=0.5, vllm_pd=0.2, vllm_colocated=0.4).result
    assert (result["over_vllm_pd"], result["over_vllm_colocated"], result["over_vllm"]) == (3.0, 1.25, 1.5)
    assert (result["rate_vllm_pd"], result["rate_vllm_colocated"]) == (0.2, 0.4)


def test_side_that_keeps_no_rate_has_no_ratio() -> None:
    result = outcome(pd=0.6, colocated=0.0).result
    assert result["goodput_ratio"] is None
    assert result["rate_colocated"] == 0.0
