"""What is counted of drafts, and how forecast and measurement are laid side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from decode import metrics
from decode.acceptance import DraftOutcome
from decode.coverage import ExpertCoverage, Routing
from decode.decoding import DecodeSequence
from decode.draft_decision import DraftDecision, DraftReason, StepOutcome
from decode.draft_meter import DraftMeter
from decode.draft_planner import AdaptiveDrafts, FixedDrafts
from decode.draft_policy import DraftPolicy
from decode.outbox import Outbox
from decode.outlook import ANYTHING, NOTHING, Outlook
from model.runner import DraftingState, Outcome, SampledToken, StepOutput, VerifiedDraft
from model.sampling_params import SamplingParams
from model.sequence import Sequence as TokenSequence

DECISION = DraftDecision(
    draft_lengths=(4, 2),
    reason=DraftReason.FASTEST,
    num_expected_tokens=4.4,
    expected_s=0.020,
    plain_s=0.010,
    expected_draft_s=0.006,
)
STEP = StepOutcome(
    num_sequences=2,
    num_context_tokens=100,
    drafts=(DraftOutcome("a", 4, 4, 3), DraftOutcome("b", 2, 2, 0)),
    verify_s=0.012,
    draft_s=0.004,
    num_distinct_experts=6.5,
)


def counted(counts: metrics.DraftCounts) -> dict[str, float]:
    """By name and label."""
    return {
        "/".join([sample.name.removeprefix("pdserve_draft_"), *sample.labels.values()]): sample.value
        for family in counts.collect()
        for sample in family.samples
    }


def test_meter_tells_ratios_of_sums() -> None:
    meter = DraftMeter()
    meter.observe(DECISION, STEP, forecast_experts=5.0)
    forecast, measured = meter.forecast, meter.measured
    assert meter.tokens_per_step(forecast) == pytest.approx(2.2)
    assert meter.tokens_per_step(measured) == pytest.approx((4 + 1) / 2)
    assert meter.draft_cost(forecast) == pytest.approx(0.6 / 4)  # of a plain step, for each of the longest draft's
    assert meter.draft_cost(measured) == pytest.approx(0.4 / 4)
    assert meter.verify_cost(forecast) == pytest.approx(1.4)
    assert meter.verify_cost(measured) == pytest.approx(1.2)
    assert meter.speedup(forecast) == pytest.approx(2.2 / 2.0)
    assert meter.speedup(measured) == pytest.approx(2.5 / 1.6)
    assert (meter.experts_per_step(forecast), meter.experts_per_step(measured)) == (5.0, 6.5)


def test_later_steps_count_more() -> None:
    meter = DraftMeter()
    meter.observe(DECISION, STEP, 0.0)
    slow = StepOutcome(2, 100, (DraftOutcome("a", 4, 4, 0), DraftOutcome("b", 2, 2, 0)), 0.024, 0.008)
    for _ in range(1000):
        meter.observe(DECISION, slow, 0.0)
    assert meter.tokens_per_step(meter.measured) == pytest.approx(1.0, rel=1e-3)
    assert meter.speedup(meter.measured) == pytest.approx(1.0 / 3.2, rel=1e-3)


@pytest.mark.parametrize(
    ("decision", "step"),
    [
        (DraftDecision((4, 2), DraftReason.NO_TIMES), STEP),  # nothing was forecast
        (DECISION, StepOutcome(2, 100, (), 0.01, 0.0)),  # nothing was drafted
        (DECISION, StepOutcome(2, 100, STEP.drafts, 0.0, 0.0)),  # a prefill ran in it, too
    ],
)
def test_meter_leaves_out_what_cannot_be_compared(decision: DraftDecision, step: StepOutcome) -> None:
    meter = DraftMeter()
    meter.observe(decision, step, 0.0)
    assert math.isnan(meter.speedup(meter.measured)) and math.isnan(meter.draft_cost(meter.forecast))


def test_tokens_by_position() -> None:
    counts = metrics.DraftCounts()
    counts.verified(verified(3, 3), 4)
    counts.verified(verified(3, 1), 2)
    counts.verified(verified(1, 0), 1)
    counts.verified(verified(2, 2), 1)  # the first of them ended the answer
    told = counted(counts)
    by_position = {
        name: [told.get(f"{name}_tokens_total/{position}") for position in (1, 2, 3, 4)]
        for name in ("drafted", "judged", "accepted")
    }
    assert by_position == {"drafted": [4, 3, 2, None], "judged": [4, 3, 1, None], "accepted": [3, 2, 1, None]}
    assert told["emitted_tokens_total"] == 8


def test_lengths_asked_for_are_a_histogram() -> None:
    counts = metrics.DraftCounts()
    counts.asked([0, 0, 3, 7])
    counts.asked([10, 64])
    told = counted(counts)
    assert [told[f"length_bucket/{bound}"] for bound in ("0.0", "2.0", "3.0", "7.0", "8.0", "12.0", "32.0")] == [
        *(2, 2, 3, 4, 4, 5, 5)
    ]
    assert (told["length_bucket/+Inf"], told["length_count"], told["length_sum"]) == (6, 6, 84)


def decoding() -> DecodeSequence:
    sampling = SamplingParams(max_tokens=500, temperature=0.0)
    return DecodeSequence(TokenSequence("a", [5, 6, 7], 3, sampling, 16), Outbox())


def verified(num_drafted: int, num_accepted: int, nodes: tuple[int, ...] | None = None) -> VerifiedDraft:
    return VerifiedDraft(tuple(SampledToken(9) for _ in range(num_accepted + 1)), num_drafted, nodes)


def test_nodes_of_a_tree_count_by_their_places_and_are_all_judged() -> None:
    counts = metrics.DraftCounts()
    counts.verified(verified(3, 2, (0, 2)), 3)
    counts.verified(verified(2, 1, (1,)), 2)
    counts.verified(verified(1, 1), 2)  # a chain
    told = counted(counts)
    for name, expected in (("drafted", [3, 2, 1]), ("judged", [3, 2, 1]), ("accepted", [2, 1, 1])):
        assert [told[f"{name}_tokens_total/{position}"] for position in (1, 2, 3)] == expected


def test_planner_feeds_the_meter_and_the_gauges_read_it() -> None:
    coverage = ExpertCoverage(Routing(num_experts=8, num_chosen=2))
    planner = AdaptiveDrafts(DraftPolicy(4, coverage), 4, 1000, lambda drafting, token_ids: ANYTHING)
    metrics.watch_drafting(planner.meter, lambda position: 0.5 - position / 10, 4, coverage)
    one = decoding()

    def step(outcome: Outcome, compute_s: float, draft_s: float, load: Sequence[Sequence[int]] = ()) -> int:
        length = planner.plan([one], 64)[0]
        output = StepOutput((outcome,), compute_s, load, draft_s)
        planner.learn([(one, outcome)], output, was_mixed=False)
        return length

    def gauge(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"pdserve_draft_{name}", labels)

    assert step(SampledToken(9), 0.010, 0.0) == 0  # no time is known yet
    before = gauge("verify_experts_count") or 0.0
    length = step(verified(1, 1), 0.013, 0.001, [[3, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    assert length >= 1
    assert planner.meter.measured.num_tokens == 2
    assert planner.meter.measured.verify_s == pytest.approx(0.012)
    assert planner.meter.measured.draft_s == 0.001
    assert gauge("tokens_per_step", source="measured") == 2
    assert gauge("verify_cost_ratio", source="measured") == pytest.approx(1.2)
    assert gauge("experts", source="measured") == 3.0  # (2 + 4) / 2
    forecast_experts = 8 * (1 - 0.75**2**0.75)  # of two rows of one sequence, by the first guess of beta
    assert gauge("experts", source="forecast") == pytest.approx(forecast_experts)
    assert gauge("coverage_beta") == coverage.beta
    assert gauge("acceptance_ratio", position="2") == 0.4
    assert (gauge("verify_experts_count") or 0.0) - before == 1
    forecast = gauge("speedup_ratio", source="forecast")
    assert forecast is not None and forecast > 1.0


def lengths() -> tuple[float, float]:
    """Steps of sequences and drafts asked for, so far."""
    told = counted(metrics.DRAFTS)
    return told["length_count"], told["length_sum"]


def test_drafts_that_were_withdrawn_are_not_counted() -> None:
    offer = Outlook(3)
    for planner in (
        FixedDrafts(5, 1000, lambda drafting, token_ids: offer),
        AdaptiveDrafts(DraftPolicy(5), 5, 1000, lambda drafting, token_ids: offer),
    ):
        staying, leaving = decoding(), decoding()
        both = [staying, leaving]
        if isinstance(planner, AdaptiveDrafts):
            planner.plan(both, 64)
            planner.learn([(each, SampledToken(9)) for each in both], StepOutput((), 0.01), was_mixed=False)
        before = lengths()
        asked = planner.plan(both, 64)[0]
        assert 1 <= asked <= 3
        planner.withdraw(leaving)
        results: list[tuple[DecodeSequence, Outcome]] = [(staying, verified(asked, 0)), (leaving, SampledToken(9))]
        planner.learn(results, StepOutput((), 0.01), was_mixed=False)
        assert [after - old for after, old in zip(lengths(), before, strict=True)] == [2, asked]


def test_drafter_is_asked_about_the_text_and_not_where_nothing_may_be_drafted() -> None:
    asked: list[tuple[int, ...]] = []

    def outlook(drafting: DraftingState, token_ids: Sequence[int]) -> Outlook:
        asked.append(tuple(token_ids))
        return NOTHING

    one, off = decoding(), decoding()
    off.sequence.drafting.failed = True
    one.sequence.append(8)
    planner = AdaptiveDrafts(DraftPolicy(4), 4, 1000, outlook)
    assert list(planner.plan([one, off], 64)) == [0, 0]
    assert asked == [(5, 6, 7, 8)]


def test_cost_of_drafts_where_all_are_free_is_none() -> None:
    meter = DraftMeter()
    free = replace(STEP, drafts=tuple(replace(draft, is_free=True) for draft in STEP.drafts))
    meter.observe(DECISION, free, 0.0)
    assert meter.draft_cost(meter.measured) == 0.0 and meter.speedup(meter.measured) > 0.0
