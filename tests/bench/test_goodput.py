"""What bench.goodput makes of what it measures, against what can be worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

import bench.goodput_load
from bench.goodput import APART, TOGETHER, Outcome, Plan, measure, table_of
from bench.goodput_load import Answer, Figures, percentile, poisson
from bench.goodput_search import RateSearch
from protos.client import PdserveClient
from router.outcomes import Slo
from tests.router.fakes import running_fleet

SLO = Slo(1.0, 0.05)


def test_the_search_closes_in_on_the_highest_rate() -> None:
    """Up to 3 a second nine of ten are in time: 1, 1.5, 2.25, 3.375 is too high, and then between."""
    search = RateSearch(1.0)
    for _ in range(7):
        search.tried(0.95 if search.next_per_s <= 3.0 else 0.5)
    tried = [rate for rate, _ in search.rates]
    between = math.sqrt(2.25 * 3.375)
    higher = math.sqrt(between * 3.375)
    assert tried[:6] == pytest.approx([1.0, 1.5, 2.25, 3.375, between, higher])
    assert search.best_per_s == pytest.approx(math.sqrt(between * higher)) and search.best_per_s <= 3.0


def test_the_search_goes_down_where_the_first_rate_is_too_high() -> None:
    search = RateSearch(1.0)
    search.tried(0.89)
    assert search.next_per_s == pytest.approx(1 / 1.5)
    search.tried(0.9)
    assert search.best_per_s == pytest.approx(1 / 1.5)
    assert search.next_per_s == pytest.approx(math.sqrt(1 / 1.5))


def test_times_of_an_answer() -> None:
    """Two tokens after a second, one 0.1 s later, three 0.5 s after that: four later ones in 0.6 s."""
    answer = Answer.of(10.0, [(11.0, 2), (11.1, 1), (11.6, 3)])
    assert (answer.ttft_s, answer.tpot_s, answer.worst_gap_s) == pytest.approx((1.0, 0.15, 0.5))
    assert Answer.of(10.0, [(11.0, 1)]) == Answer(1.0, 0.0, 0.0)
    assert Answer.of(10.0, []).error


def test_what_counts_as_in_time() -> None:
    answers = [Answer(1.0, 0.05), Answer(1.01, 0.05), Answer(1.0, 0.051), Answer(error="OVERLOADED"), Answer(0.1, 0.0)]
    figures = Figures(answers)
    assert figures.attainment(SLO) == pytest.approx(2 / 5)
    assert figures.num_failed == 1
    assert percentile([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0], 0.9) == 9.0
    assert percentile([], 0.9) == 0.0


def test_arrivals_are_the_same_requests_at_every_rate() -> None:
    text = list(range(10_000))
    slow, fast = poisson(text, 1.0, 200, 3), poisson(text, 4.0, 200, 3)
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert [request.at_s / 4 for request in slow] == pytest.approx([request.at_s for request in fast])
    assert 150 < slow[-1].at_s < 250
    assert all(200 <= len(request.prompt) <= 1500 and 32 <= request.num_output_tokens <= 128 for request in slow)
    assert len({request.prompt[0] for request in slow}) > 190


def test_ratios_say_how_much_better_separate_pools_are() -> None:
    apart, together = Figures([Answer(1.0, 0.02, 0.1)]), Figures([Answer(3.0, 0.03, 0.8)])
    outcome = Outcome(SLO, {APART: 2.7, TOGETHER: 2.0}, 2.0, {APART: apart, TOGETHER: together})
    result = outcome.result
    assert (result["goodput_ratio"], result["ttft_p90_ratio"], result["tpot_p90_ratio"]) == (1.35, 3.0, 1.5)
    assert (result["rate_pd"], result["rate_colocated"], result["worst_gap_ratio"]) == (2.7, 2.0, 8.0)
    assert table_of(outcome).row_count == 6


async def test_a_whole_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.goodput_load, "PROMPT_TOKENS", (20, 150))  # the workers are small ones
    told: list[str] = []
    plan = Plan(3, 2, 1, 1, seed=1, slo_ttft_s=30.0, slo_tpot_s=30.0)
    text = [5 + index % 50 for index in range(5000)]
    async with running_fleet(num_both=1) as fleet, PdserveClient(fleet.router.address) as client:
        outcome = await measure({APART: client, TOGETHER: client}, text, plan, told.append)
    assert outcome.rates[APART] > 0 and outcome.rates[TOGETHER] > 0
    assert all(len(figures.answers) == 3 and not figures.num_failed for figures in outcome.figures.values())


@pytest.mark.parametrize("option", ["--requests", "--rates", "--slo-ttft", "--slo-tpot"])
def test_what_makes_no_sense_is_refused(option: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "bench.goodput", option, "0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 2
    assert f"{option} is 0" in found.stderr
