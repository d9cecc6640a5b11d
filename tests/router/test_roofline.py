from __future__ import annotations

from dataclasses import replace

import pytest

from router.gpu_layout import GpuLayout, layouts_of, possible_layouts
from router.hardware import HARDWARE
from router.memory_plan import Holding
from router.model_config import model_shape
from router.precision import WEIGHT_FORMATS
from router.roofline import Efficiency, Roofline, StepTime, usual_efficiency
from tests.router import model_configs as configs

LLAMA = model_shape(configs.LLAMA_3_70B, "llama")
DEEPSEEK = model_shape(configs.DEEPSEEK_V3, "deepseek")
PEAK = Efficiency(prefill=1, decode=1, memory=1)


def llama(num_gpus: int = 1, efficiency: Efficiency = PEAK, weights: str = "bf16") -> Roofline:
    layout = GpuLayout(num_gpus, shards_attention=True)
    return Roofline(Holding(LLAMA, WEIGHT_FORMATS[weights], 2), layout, HARDWARE["H100"], efficiency)


def named(step: StepTime) -> dict[str, float]:
    return {each.name: each.value for each in step.figures}


def test_decode_of_one_sequence_waits_for_memory() -> None:
    """69.50 billion weights of 2 bytes at 3.35 TB/s: 41.5 ms; 2 * 69.50 GFLOP at 989 TFLOP/s: 0.141 ms."""
    step = llama().decode(1, 0)
    assert step.seconds == pytest.approx(2 * 69.502e9 / 3.35e12, rel=1e-4)
    assert named(step)["decode, arithmetic"] == pytest.approx(2 * 69.502e9 / 989e12, rel=1e-4)


def test_kv_is_read_with_the_weights() -> None:
    """16 sequences of 2,048 tokens add 10.74 GB to 139.0 GB."""
    assert llama().decode(16, 2048).seconds == pytest.approx((139.004e9 + 16 * 2048 * 327_680) / 3.35e12, rel=1e-4)


def test_a_large_batch_waits_for_arithmetic() -> None:
    figures = named(llama().decode(1024, 1))
    assert figures["decode step"] == figures["decode, arithmetic"] > figures["decode, weights and KV read"]


def test_prefill_waits_for_arithmetic() -> None:
    """1,500 tokens: 2 * 68.45e9 * 1,500 and 4 * 8,192 * 80 layers * 1,500 * 750 = 205.35 + 2.95 TFLOP, 210.6 ms."""
    step = llama().prefill(1500)
    work = 2 * 68.4516e9 * 1500 + 4 * 8192 * 80 * 1500 * 750
    assert step.seconds == pytest.approx(work / 989e12, rel=1e-4)
    assert llama(efficiency=Efficiency(0.5, 1, 1)).prefill(1500).seconds == pytest.approx(2 * work / 989e12, rel=1e-4)


def test_what_is_cached_is_attended_to_and_not_computed() -> None:
    attended = named(llama().prefill(500, 1000))["prefill, work of attention"]
    assert attended == 4 * 8192 * 80 * 500 * (1000 + 250)


def test_a_short_prompt_waits_for_the_weights() -> None:
    figures = named(llama().prefill(16))
    assert figures["prefill step"] == figures["prefill, weights read"] > figures["prefill, arithmetic"]


def test_eight_bits_halve_what_is_read_and_double_what_is_computed_but_for_attention() -> None:
    assert llama(weights="fp8").decode(1, 0).seconds == pytest.approx((68.4516e9 + 2 * 1.0507e9) / 3.35e12, rel=1e-4)
    work, attention = 2 * 68.4516e9 * 1500, 4 * 8192 * 80 * 1500 * 750
    expected = work / 1979e12 + attention / 989e12
    assert llama(weights="fp8").prefill(1500).seconds == pytest.approx(expected, rel=1e-4)


def test_gpus_of_a_worker_share_and_exchange() -> None:
    """4 GPUs: a quarter of the reading, and 160 all-reduces of 10 us and 2 * 3/4 * 8,192 * 2 bytes at 450 GB/s."""
    step = named(llama(4).decode(1, 0))
    assert step["decode, weights and KV read"] == pytest.approx(139.004e9 / 4 / 3.35e12, rel=1e-4)
    assert step["all-reduce"] == pytest.approx(160 * (10e-6 + 1.5 * 8192 * 2 / 450e9))
    assert step["decode step"] == pytest.approx(step["decode, weights and KV read"] + step["all-reduce"])


def test_experts_are_read_if_touched() -> None:
    """Mixtral, batch 1: 2 of 8 experts of 176.16 million weights in 32 layers, 1.605 billion of others."""
    shape = model_shape(configs.MIXTRAL_8X7B, "mixtral")
    layout = GpuLayout(1, shards_attention=True)
    moe = Roofline(Holding(shape, WEIGHT_FORMATS["bf16"], 2), layout, HARDWARE["H100"], PEAK)
    one, many = (named(moe.decode(batch, 0))["weights read per GPU"] for batch in (1, 256))
    others = 2 * (shape.num_common_weights + shape.num_embedding_weights)
    assert one == pytest.approx(others + 2 * 2 * 32 * 176_160_768)
    assert many == pytest.approx(others + 2 * 8 * 32 * 176_160_768)


def test_deepseek_on_96_h100_is_as_fast_as_was_measured() -> None:
    """SGLang, May 2025, per node of 8: 52.3k prompt tokens/s with 32 GPUs a worker (prompts of 2,000), 22.3k answer
    tokens/s with 72 a worker at some 256 sequences a GPU. A plan without overlap in decode must be near, and below."""
    holding = Holding(DEEPSEEK, WEIGHT_FORMATS["fp8"], 2)
    h100, efficiency = HARDWARE["H100"], usual_efficiency(DEEPSEEK)
    prefill = Roofline(holding, GpuLayout(32, shards_attention=False), h100, efficiency).prefill(2000)
    decode = Roofline(holding, GpuLayout(72, shards_attention=False), h100, efficiency).decode(72 * 256, 2100)
    assert 0.65 * 52_300 < 32 * 2000 / prefill.seconds / 4 < 52_300
    assert 0.65 * 22_300 < 72 * 256 / decode.seconds / 9 < 22_300


def test_layouts_that_are_possible() -> None:
    h100 = HARDWARE["H100"]
    assert [layout.num_gpus for layout in possible_layouts(LLAMA, h100)] == [1, 2, 4, 8]
    assert all(layout.shards_attention for layout in possible_layouts(LLAMA, h100))
    spread = possible_layouts(DEEPSEEK, h100)
    assert max(layout.num_gpus for layout in spread) == 256
    assert not any(layout.shards_attention for layout in spread if layout.num_gpus > 8)
    assert layouts_of(LLAMA, h100, 3) == ()  # 64 heads
    assert layouts_of(LLAMA, replace(h100, gpus_per_domain=72), 64) == (GpuLayout(64, shards_attention=True),)


def test_latent_caches_have_copies_where_attention_is_cut() -> None:
    assert GpuLayout(8, shards_attention=True).num_kv_shares(DEEPSEEK) == 1
    assert GpuLayout(8, shards_attention=False).num_kv_shares(DEEPSEEK) == 8
    assert GpuLayout(16, shards_attention=True).num_kv_shares(LLAMA) == 8  # its KV heads
