"""A prompt that would be late on the prefill workers is computed by a decode worker, where that keeps every promise."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from router.candidate import Role
from router.config import AdmissionPolicy, LimitPolicy, PlacementPolicy, SloPolicy
from router.dispatch import Dispatch, Dispatches
from router.fleet import Fleet
from router.outcomes import Slo
from router.placement import Grounds, Placement, place
from router.scenario import Delays, Scenario
from router.shared_records import RouterRecord, SentLoad
from router.simulator import simulate
from router.spill import Spill, Spilled
from router.step_costs import StepCosts
from router.synthetic_trace import Lengths, Phase, synthetic_trace
from tests.router.simulations import LAYOUT, a_worker
from tests.router.test_predicted_placement import demand, measured

SLO = SloPolicy(ttft_s=1.0, tpot_s=0.05)
SPILLS, KEEPS = PlacementPolicy(slo=SLO), PlacementPolicy()
P, D = Role.PREFILL, Role.DECODE


def test_what_was_spilled_fades_away() -> None:
    assert Spilled().num_tokens_at(5.0) == 0.0
    first = Spilled().and_then(5.0, 100)
    assert first.num_tokens_at(5.0) == 100
    assert first.num_tokens_at(15.0) == pytest.approx(100 / math.e)
    assert first.and_then(15.0, 50).num_tokens_at(25.0) == pytest.approx(100 / math.e**2 + 50 / math.e)


FITS = Spill(ttft_s=1.0, tpot_s=0.04, prompt_s=0.3, prompts_s=1.0, num_beside=20, stay_s=0.0)


@pytest.mark.parametrize(
    ("spill", "keeps"),
    [
        (FITS, True),  # a tenth of the time: 44 ms a token, of 45 that are given away
        (replace(FITS, prompts_s=1.2), False),  # 45.5 ms
        (replace(FITS, ttft_s=1.1), False),
        (replace(FITS, tpot_s=0.046, prompts_s=0.0), False),
        (replace(FITS, tpot_s=0.001, prompts_s=10.0), False),  # nothing but prompts
        # 0.3 s make answers of less than 30 tokens late. Of mean 200 those are 1.0 % of what runs, of 50 12.2 %.
        (replace(FITS, stay_s=200 * 0.04, num_beside=48), True),
        (replace(FITS, stay_s=200 * 0.04, num_beside=50), False),
        (replace(FITS, stay_s=50 * 0.04, num_beside=4), True),
        (replace(FITS, stay_s=50 * 0.04, num_beside=5), False),
    ],
)
def test_promises(spill: Spill, keeps: bool) -> None:
    assert spill.keeps(SLO) == keeps


def test_only_prompts_that_are_computed_where_they_decode_are_counted() -> None:
    here, elsewhere = Dispatches(), Dispatches()
    Dispatch(1.0, 100, 4, prefill=None, decode=here).begin()
    Dispatch(1.0, 700, 4, prefill=elsewhere, decode=here).begin()
    assert (here.spilled.num_tokens_at(1.0), elsewhere.spilled.num_tokens_at(1.0)) == (100.0, 0.0)


def placed(prefill: dict[str, int], decode: dict[str, int], policy: PlacementPolicy = SPILLS) -> Placement:
    """A prompt of 500 tokens, 1,024 of which take a second; ten that decode already."""
    fleet = [measured("p", P, **prefill), measured("d", D, **{"num_active": 10, **decode})]
    return place(Fleet(fleet, 0.0), demand(501), (), random.Random(1), policy)


@pytest.mark.parametrize(
    ("prefill", "decode", "policy", "grounds"),
    [
        ({"num_queued_tokens": 2000}, {}, SPILLS, Grounds.SPILL),
        ({"num_queued_tokens": 2000}, {}, KEEPS, Grounds.LOAD),  # not wanted
        ({"num_queued_tokens": 350}, {}, SPILLS, Grounds.SPILL),  # 850 tokens in 0.83 s: that might be late
        ({"num_queued_tokens": 300}, {}, SPILLS, Grounds.LOAD),  # 0.78 s
        ({"num_queued_tokens": 2000}, {"num_queued_tokens": 600}, SPILLS, Grounds.LOAD),  # late there, too
        # With eleven sequences a token takes 35 ms, and of 45 that leaves 22 % of ten seconds: 2,276 tokens.
        ({"num_queued_tokens": 2000}, {"num_spilled_elsewhere": 1700}, SPILLS, Grounds.SPILL),
        ({"num_queued_tokens": 2000}, {"num_spilled_elsewhere": 1800}, SPILLS, Grounds.LOAD),
        ({"num_queued_tokens": 2000}, {"num_active": 21}, SPILLS, Grounds.LOAD),  # 46 ms a token as it is
    ],
)
def test_where_a_prompt_goes(
    prefill: dict[str, int], decode: dict[str, int], policy: PlacementPolicy, grounds: Grounds
) -> None:
    found = placed(prefill, decode, policy)
    assert found.grounds is grounds
    assert (found.prefill is None) == (grounds is Grounds.SPILL)
    assert found.decode is not None and found.decode.id.name == "d"
    if grounds is Grounds.SPILL:
        assert found.reason.startswith("spill: it would be late on a prefill worker, and d keeps to the SLOs")


def test_other_routers_are_told() -> None:
    worker = measured("d", D).id
    told = RouterRecord("127.0.0.1:1", 7, {worker: SentLoad(1, 2, 3, 4, 5)})
    assert RouterRecord.from_bytes(told.to_bytes()).loads == told.loads
    older = told.to_bytes().replace(b'"spilled":[5]', b'"unknown":[5]')
    assert older != told.to_bytes()
    assert RouterRecord.from_bytes(older).loads == {worker: SentLoad(1, 2, 3, 4, 0)}


def attainment(num_prefill: int, policy: PlacementPolicy) -> float:
    costs = StepCosts(0.015, 2.6e-4, 8e-10, 0.022, 6.5e-4, 1.2e-7)
    workers = [a_worker(f"w{i}", P if i < num_prefill else D, costs=costs, num_blocks=8000) for i in range(8)]
    scenario = Scenario(
        workers,
        LAYOUT,
        Delays(report_s=0.5),
        admission=AdmissionPolicy(max_queue_s=2.0),
        placement=replace(policy, limits=LimitPolicy(max_backlog_s=1.0)),
    )
    chat = Phase(100.0, 8.3, Lengths(1155, 0.6, 16, 8000), Lengths(211, 0.9, 2, 1500))
    return simulate(scenario, synthetic_trace([chat], seed=3)).attainment(Slo(SLO.ttft_s, SLO.tpot_s))


def test_it_makes_up_for_too_few_prefill_workers_and_costs_nothing_where_there_are_enough() -> None:
    """Three of eight are too few to prefill, five more than enough: then decode workers have no time to spare."""
    assert attainment(3, SPILLS) > 0.85 > 1.1 * attainment(3, KEEPS)
    assert attainment(5, SPILLS) > attainment(5, KEEPS) - 0.01
