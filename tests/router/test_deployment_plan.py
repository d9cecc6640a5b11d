"""Whole plans, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protos.errors import FailedPrecondition, InvalidArgument
from router.alternatives import alternatives
from router.deployment_plan import DeploymentPlan, Draft, Question, plan
from router.forecast import Forecast, Lengths
from router.hardware import HARDWARE
from router.model_config import model_shape
from router.plan_figures import gains, plan_figures
from router.prefill_pool import size_prefill
from router.targets import Targets
from tests.router import model_configs as configs

LLAMA = model_shape(configs.LLAMA_3_70B, "Llama-3-70B")
CHAPTER = Targets(ttft_s=0.3, tpot_s=0.05, percentile=0.99)


def forecast(per_min: float, prompt: float = 1500, answer: float = 800, **more: Any) -> Forecast:
    return Forecast(per_min / 60, Lengths(prompt), Lengths(answer), **more)


def question(per_min: float = 3000, hardware: str = "H100", **more: Any) -> Question:
    given: dict[str, Any] = {"shape": LLAMA, "forecast": forecast(per_min), "targets": CHAPTER} | more
    return Question(hardware=HARDWARE[hardware], **given)


@pytest.fixture(scope="module")
def chapter() -> DeploymentPlan:
    """3,000 requests/min of 1,500 + 800 tokens, on 32 H100, TTFT within 300 ms at the 99th percentile."""
    return plan(question(num_gpus=32))


def test_kv_of_the_chapters_case(chapter: DeploymentPlan) -> None:
    """1,500 * 327,680 = 491.52 MB a request, 50 times a second 24.576 GB/s: 98 % of one InfiniBand HDR link of 200
    Gbit/s, 25 GB/s, and 2 % of the links that the prefill workers have, 16 * 2 * 50 GB/s at 70 %."""
    traffic = chapter.traffic
    assert traffic.request.value == 491_520_000
    assert traffic.per_s.value == pytest.approx(24.576e9)
    assert traffic.per_s.value * 8 / 200e9 == pytest.approx(0.98304)
    assert traffic.utilisation.value == pytest.approx(24.576e9 / (chapter.prefill.num_gpus * 50e9 * 0.7))
    assert traffic.hides


def test_pools_of_the_chapters_case(chapter: DeploymentPlan) -> None:
    """A prompt on 2 H100 at half their peak: 208.3 TFLOP / 989 TFLOP/s = 210.6 ms, and 160 all-reduces of 1,500 * 8,192
    * 2 bytes at 450 GB/s and 10 us, 10.3 ms: 50 a second keep 11 workers busy, and for so little waiting at the
    99th percentile there must be 16. 40,000 tokens/s of answers at 21.4 ms each are 856 sequences, 3 workers
    of 8 have room for 698 each."""
    prefill, decode = chapter.prefill, chapter.decode
    all_reduce = 160 * (10e-6 + 1 * 1500 * 8192 * 2 / 450e9)
    work = 2 * 68.4516e9 * 1500 + 4 * 8192 * 80 * 1500 * 750
    assert prefill.service.mean.value == pytest.approx(work / 989e12 + all_reduce, rel=1e-4)
    assert (prefill.num_workers, prefill.kind.layout.num_gpus) == (16, 2)
    assert prefill.wait.load.value == pytest.approx(50 * prefill.service.mean.value)
    assert prefill.ttft_late.value <= 0.3
    token_s = decode.tpot.value
    assert (decode.num_workers, decode.kind.layout.num_gpus) == (3, 8)
    assert decode.batch.value == pytest.approx(50 * 800 * token_s / 3, rel=1e-4)
    kv_read = decode.batch.value * 1900 * 327_680
    exchanged = 160 * (10e-6 + 1.75 * decode.batch.value * 8192 * 2 / 450e9)
    assert token_s == pytest.approx((139.004e9 + kv_read) / (8 * 3.35e12 * 0.7) + exchanged, rel=1e-3)
    assert decode.slots.value == (72e9 * 8 - 141.107e9 - 7 * 161 * 8192 * 2) // (1900 * 327_680)


def test_the_chapters_case_takes_eight_bits_to_fit_32_gpus(chapter: DeploymentPlan) -> None:
    assert chapter.num_gpus == 56
    assert not chapter.is_within_budget
    by_format = {(each.weights, each.kv): each.plan for each in alternatives(chapter.question)}
    eight = by_format["fp8", "fp8"]
    assert eight is not None
    assert eight.is_within_budget
    assert eight.num_gpus == 28
    assert eight.traffic.request.value == 491_520_000 / 2


def test_prefill_and_decode_compute_about_as_much_per_token(chapter: DeploymentPlan) -> None:
    """(2 * 68.45e9 + 4 * 8192 * 80 * 750) * 1,500 over (2 * 69.50e9 + 4 * 8192 * 80 * 1,900) * 800 = 1.81."""
    ratio = {each.name: each for each in plan_figures(chapter)["a prompt"]}["work of a prompt over that of an answer"]
    assert ratio.value == pytest.approx(208.30 / 115.19, rel=1e-3)


@pytest.mark.parametrize(("per_min", "separate"), [(60, False), (300, False), (450, False), (1000, True), (3000, True)])
def test_few_requests_are_served_by_one_pool(per_min: float, separate: bool) -> None:
    made = plan(question(per_min))
    assert made.advice.disaggregate is separate
    assert made.colocated is not None
    if separate:
        assert made.num_gpus < made.colocated.num_gpus
    else:
        assert made.colocated.num_gpus <= made.num_gpus
        assert f"{per_min:.0f} requests/min are fewer than 500" in " ".join(made.advice.reasons)
        assert f"{made.num_gpus} GPUs in two pools, {made.colocated.num_gpus} in one" in made.advice.reasons[0]


def test_a_tight_time_per_token_takes_separate_pools() -> None:
    """Prompts take their time from the steps of workers that do both: these must be faster to begin with."""
    made = plan(question(3000, targets=Targets(ttft_s=0.5, tpot_s=0.025)))
    assert made.advice.disaggregate
    assert made.colocated is not None
    assert made.colocated.num_gpus > 1.2 * made.num_gpus
    assert made.colocated.slowdown.value > 1.3


@pytest.mark.parametrize("max_utilisation", [0.5, 0.85])
def test_no_pool_is_busier_than_it_may_be(max_utilisation: float) -> None:
    relaxed = Targets(ttft_s=5, tpot_s=0.1, max_utilisation=max_utilisation)
    made = plan(question(20_000, targets=relaxed))
    for wait in (made.prefill.wait, made.decode.wait):
        assert max_utilisation - 0.12 < wait.utilisation.value <= max_utilisation


def test_bursts_and_uneven_lengths_take_more_workers() -> None:
    targets = Targets(ttft_s=0.1)
    calm = plan(question(targets=targets, prefill_gpus=8))
    uneven = Forecast(50, Lengths.of("prompt", 1500, 1900), Lengths(800))
    bursts = forecast(3000, arrival_variability=10)
    for harder in (uneven, bursts):
        made = plan(question(targets=targets, prefill_gpus=8, forecast=harder))
        assert made.prefill.num_workers > calm.prefill.num_workers


def test_the_first_token_waits_for_a_place_at_a_decode_worker_too() -> None:
    """2 H100 hold two sequences of 3,500 tokens: short answers leave places soon, and are waited for."""
    traffic = Forecast(5, Lengths(3500), Lengths(10))
    made = plan(question(forecast=traffic, targets=Targets(ttft_s=5, percentile=0.99), decode_gpus=2))
    wait_s = made.decode.wait.percentile.value
    assert made.decode.slots.value == 2
    assert 0.05 < wait_s <= 0.05 * 5
    alone = size_prefill(made.prefill.kind)
    assert made.prefill.ttft_late.value == pytest.approx(alone.ttft_late.value + wait_s)


def test_cached_prompts_take_fewer_prefill_workers_and_as_much_kv() -> None:
    cold, warm = plan(question()), plan(question(forecast=forecast(3000, cache_hit_rate=0.5)))
    assert warm.prefill.num_gpus < 0.7 * cold.prefill.num_gpus
    assert warm.traffic.request == cold.traffic.request


def test_prefill_workers_have_room_for_their_prompts() -> None:
    """2 H100 have 2.9 GB beside Llama-3-70B; two prompts of 6,000 tokens take 3.93 GB."""
    targets = Targets(ttft_s=5, tpot_s=0.05)
    made = plan(question(300, targets=targets, forecast=forecast(300, prompt=6000)))
    assert made.prefill.kind.layout.num_gpus == 4
    with pytest.raises(FailedPrecondition, match=r"2\.9 GB for KV on 2 GPUs.*do not hold 2 prompts of 6000 tokens"):
        plan(question(300, targets=targets, forecast=forecast(300, prompt=6000), prefill_gpus=2))


def test_cost_of_a_million_tokens(chapter: DeploymentPlan) -> None:
    """56 GPUs at $3 make 3,600 * 50 * 800 = 144 million tokens an hour: $1.167 a million."""
    priced = plan(replace(chapter.question, price=3.0)).cost
    assert [cost.value for cost in priced] == pytest.approx([56 * 3 / 144, 56 * 3 / (3600 * 50 * 2300 / 1e6)])
    assert chapter.cost == ()


def test_drafting_takes_load_off_decode_and_is_told_by_batch() -> None:
    draft = Draft(0.832, model=model_shape(configs.LLAMA_3_8B, "draft"), max_tokens=5)
    plain, drafting = plan(question(600)), plan(question(600, draft=draft))
    assert drafting.decode.tpot.value < 0.75 * plain.decode.tpot.value
    told = gains(drafting)
    num_gpus = drafting.decode.kind.layout.num_gpus
    read_s, exchange_s = 1 / (num_gpus * 3.35e12 * 0.7), 10e-6 + 2 * (num_gpus - 1) / num_gpus * 8192 / 450e9
    draft_s = (2 * 7.505e9 + 1900 * 131_072) * read_s + 64 * exchange_s
    target_s = (139.004e9 + 1900 * 327_680) * read_s + 160 * (exchange_s + 2 * (num_gpus - 1) / num_gpus * 8192 / 450e9)
    assert told[0].textbook.value == pytest.approx(3.978 / (1 + 5 * draft_s / target_s), rel=1e-3)
    assert [gain.num_sequences for gain in told] == [1, 4, 16, 64]  # there is no room for 256
    assert told[0].speedup.value == pytest.approx(told[0].textbook.value, rel=0.01)
    assert told[0].speedup.value > told[-1].speedup.value > 1.5
    assert drafting.traffic.request.value == 1500 * (327_680 + 131_072)


def test_what_does_not_fit_is_told_with_what_would() -> None:
    with pytest.raises(FailedPrecondition, match=r"141\.1 GB of weights per GPU on 1 GPU.*in fp8 it fits 2 GPUs") as e:
        plan(question(decode_gpus=1))
    assert e.value.field == "model"
    deepseek = model_shape(configs.DEEPSEEK_V3, "DeepSeek-V3")
    small = replace(HARDWARE["H100"], memory_bytes=16e9)
    with pytest.raises(FailedPrecondition, match=r"DeepSeek-V3 in fp8 does not fit.*a GPU with \d+ GB"):
        plan(Question(deepseek, small, forecast(60)))


def test_times_that_cannot_be_kept_are_told_with_how_far_off_they_are() -> None:
    with pytest.raises(FailedPrecondition, match=r"no prefill pool.* 1,500 tokens.* 70 ms .*ttft is limited to 20 ms"):
        plan(question(targets=Targets(ttft_s=0.02), prefill_gpus=8))
    with pytest.raises(
        FailedPrecondition, match=r"no decode pool.*a token takes .*even at batch 1; tpot is limited to"
    ):
        plan(question(targets=Targets(tpot_s=0.004), decode_gpus=4))
    with pytest.raises(FailedPrecondition, match=r"3 GPUs cannot share Llama-3-70B.*divides its 64 heads"):
        plan(question(decode_gpus=3))


def test_gpus_without_fp8_are_not_planned_with_it() -> None:
    with pytest.raises(InvalidArgument, match="A100 computes none; int8 or bf16"):
        plan(question(hardware="A100", weights="fp8"))
    eight = [each for each in alternatives(question(hardware="A100")) if each.weights == "int8"]
    assert eight
    assert all(each.plan is not None for each in eight)


def test_weights_in_an_unknown_format_are_asked_for() -> None:
    packed = model_shape(configs.LLAMA_3_70B | {"quantization_config": {"quant_method": "awq"}}, "packed")
    with pytest.raises(FailedPrecondition, match=r"stored in 'awq'.*bf16, fp8, int8, mxfp4"):
        plan(question(shape=packed))
    assert plan(question(shape=packed, weights="int8")).question.weight_format == "int8"
    with pytest.raises(FailedPrecondition, match="the draft model's weights are stored in 'awq'"):
        plan(question(draft=Draft(0.8, model=packed)))


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("name", ["MIXTRAL_8X7B", "QWEN3_30B_A3B", "GPT_OSS_120B", "DEEPSEEK_V2_LITE", "QWEN3_8B"])
def test_every_family_has_a_plan_on_all_hardware(hardware: str, name: str) -> None:
    shape = model_shape(getattr(configs, name), name)
    traffic = Forecast(20, Lengths.of("prompt", 1500, 3000), Lengths.of("answer", 400, 800), cache_hit_rate=0.2)
    made = plan(question(hardware=hardware, shape=shape, forecast=traffic, targets=Targets(ttft_s=2)))
    sections = plan_figures(made)
    assert ("experts" in sections) is (shape.experts is not None)
    for each in (figure for figures in sections.values() for figure in figures):
        assert each.value == each.value, each  # no NaN
        assert each.formula
        assert each.worked
