"""When the first token is there, worked out by hand and, of many prompts, against a simulation that is checked against
the real scheduler."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefill.scheduler import PrefillPolicy
from router.candidate import Candidate, PrefillTimes, Role, WorkerId
from router.first_token import AGEING_TOKENS_PER_S, Prompt, first_token_s, rank_of
from router.outcomes import Outcome
from router.scenario import Scenario
from router.simulated_request import SimulatedRequest
from router.simulated_router import SimulatedRouter
from router.simulator import Simulation
from router.step_costs import StepCosts
from router.synthetic_trace import Lengths, Phase, synthetic_trace
from router.traced_request import TracedRequest
from tests.router.simulations import LAYOUT, p_and_d

TIMES = PrefillTimes(base_s=0.1, token_s=0.001, pair_s=1e-6, confidence=1.0, max_step_tokens=500)
NOW = 100.0


def a_worker(num_queued: int = 0, prompts: Sequence[tuple[float, int]] = (), **times: float) -> Candidate:
    return Candidate(
        WorkerId("p", "1"),
        "",
        Role.PREFILL,
        True,
        "",
        100,
        num_queued_tokens=num_queued,
        num_active=0,
        num_free_blocks=100,
        prefill_times=replace(TIMES, **times),  # type: ignore[arg-type]
        prompts=tuple(sorted(prompts)),
    )


def waiting(*lengths: int, since_s: float = 0.0) -> list[tuple[float, int]]:
    return [(rank_of(length, NOW - since_s), length) for length in lengths]


def expected(worker: Candidate, num_tokens: int, num_cached: int = 0, paced_s: float | None = 1.0) -> float | None:
    return first_token_s(worker, Prompt(num_tokens, num_cached), NOW, paced_s)


def test_ages_as_the_scheduler_lets_it() -> None:
    assert PrefillPolicy().ageing_tokens_per_s == AGEING_TOKENS_PER_S


def test_on_an_idle_worker_it_takes_what_its_steps_take() -> None:
    """In steps of 500 and 500 and 200, each token with the context at the end of its step."""
    costs = StepCosts(0.1, 0.001, 1e-6, 0, 0, 0)
    assert expected(a_worker(), 300) == pytest.approx(costs.prompt_s(300, 500))
    assert expected(a_worker(), 1000) == pytest.approx(costs.prompt_s(1000, 500))
    assert expected(a_worker(), 1200) == pytest.approx(costs.prompt_s(1200, 500), rel=0.02)  # the last is not full
    assert expected(a_worker(), 1200, 900) == pytest.approx(costs.prompt_s(1200, 500, 900))


def test_a_short_prompt_goes_past_a_long_one() -> None:
    """Behind half a step of 500, and in one with 400 tokens of the long one: of 2,000, 1,500 are left."""
    half_s, step_s = 0.5 * (0.1 + 0.5), 0.1 + 0.5
    worker = a_worker(2000, waiting(2000))
    assert expected(worker, 100) == pytest.approx(half_s + step_s + 1e-6 * 100 * 100)
    longer = expected(worker, 3000)  # behind all of it
    assert longer == pytest.approx(half_s + 9 * 0.1 + 4.5 + 1e-6 * 3000 * 1750)


def test_what_has_waited_for_long_goes_first() -> None:
    """1,000 tokens that came four seconds ago are like a prompt of none. 500 of them are in the step that goes on."""
    worker = a_worker(1000, waiting(1000, since_s=4.0))
    assert expected(worker, 100) == pytest.approx(0.5 * 0.6 + 2 * 0.1 + 0.6 + 1e-6 * 100 * 100)


def test_of_what_others_sent_the_same_share_goes_first() -> None:
    """Of 3,000 tokens 1,500 are known here, a third of these goes before: of all 1,000, half of it in the step."""
    prompts = [*waiting(500, since_s=2.0), *waiting(1000)]
    assert expected(a_worker(3000, prompts), 100) == pytest.approx(0.3 + 2 * 0.1 + 1.0 + 1e-6 * 100 * 100)
    assert expected(a_worker(3000), 100) == pytest.approx(0.3 + 6 * 0.1 + 2.6 + 1e-6 * 100 * 100)  # nothing is known


@pytest.mark.parametrize(("confidence", "share"), [(0.0, 0.0), (0.2, 0.0), (0.4, 0.5), (0.6, 1.0), (0.9, 1.0)])
def test_the_pace_counts_for_less_the_better_the_model_is_known(confidence: float, share: float) -> None:
    modelled_s = 0.1 + 0.3 + 1e-6 * 300 * 300
    assert expected(a_worker(confidence=confidence), 300, paced_s=2.0) == pytest.approx(
        2.0 ** (1 - share) * modelled_s**share
    )


def test_before_a_pace_is_known_a_calibration_says_it() -> None:
    assert expected(a_worker(confidence=0.1), 300, paced_s=None) == pytest.approx(0.4 + 1e-6 * 300 * 300)
    assert expected(a_worker(confidence=0.01), 300, paced_s=None) is None
    unknown = replace(a_worker(), prefill_times=None)
    assert (expected(unknown, 300, paced_s=None), expected(unknown, 300, paced_s=2.0)) == (None, 2.0)


def test_of_short_and_long_prompts_it_knows_better_than_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """On three busy workers: a third of them would be off by more than a factor of 1.5 if all took the mean speed."""
    costs = StepCosts(0.01, 5e-5, 5e-10, 0.012, 1.5e-4, 2e-8)
    workers = p_and_d(3, 3, costs=costs, num_blocks=20000, max_step_tokens=2048, max_running=128)
    short = Phase(80.0, 36.0, Lengths(300, 0.6, 16, 32000), Lengths(20, 0.8, 2, 200))
    long = Phase(80.0, 6.0, Lengths(6000, 0.3, 16, 32000), Lengths(20, 0.8, 2, 200))
    trace = [*synthetic_trace([short], seed=1), *synthetic_trace([long], seed=2)]
    predicted: dict[float, tuple[float, float | None, float]] = {}
    go = SimulatedRouter._go

    def noted(router: SimulatedRouter, request: SimulatedRequest, placement: object, dispatch: object) -> None:
        worker, ttft_s = placement.prefill, placement.ttft_s  # type: ignore[attr-defined]
        num_tokens = worker.num_queued_tokens + request.num_tokens
        paced_s = num_tokens / worker.prefill_tokens_per_s if worker.prefill_tokens_per_s else 0.0
        predicted[request.traced.at_s] = router._time.now, ttft_s, paced_s
        go(router, request, placement, dispatch)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedRouter, "_go", noted)
    outcomes: list[Outcome] = []
    by_time: list[TracedRequest] = sorted(trace, key=lambda traced: traced.at_s)
    Simulation(Scenario(workers, LAYOUT), by_time, outcomes.append).run()
    errors, paced_errors = [], []
    for outcome in outcomes:
        placed_at, ttft_s, paced_s = predicted[outcome.at_s]
        if outcome.at_s > 20.0 and ttft_s is not None and outcome.ttft_s is not None:
            took_s = outcome.at_s + outcome.ttft_s - placed_at
            errors.append(math.log(took_s / ttft_s))
            paced_errors.append(math.log(took_s / paced_s))
    assert len(errors) > 2000
    assert statistics.mean(map(abs, errors)) < 0.3 < 0.45 < statistics.mean(map(abs, paced_errors))
    assert abs(statistics.mean(errors)) < 0.1
