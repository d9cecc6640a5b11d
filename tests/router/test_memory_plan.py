from __future__ import annotations

import pytest

from router.gpu_layout import GpuLayout
from router.hardware import HARDWARE
from router.memory_plan import Holding, plan_memory
from router.model_config import model_shape
from router.precision import WEIGHT_FORMATS, wire_bytes_per_value
from tests.router import model_configs as configs

LLAMA = model_shape(configs.LLAMA_3_70B, "llama")
DRAFT = Holding(model_shape(configs.LLAMA_3_8B, "draft"), WEIGHT_FORMATS["bf16"], 2)
TWO = GpuLayout(2, shards_attention=True)
H100 = HARDWARE["H100"]


def test_llama_70b_and_its_draft_do_not_fit_two_h100_in_16_bits() -> None:
    """141.1 + 16.06 = 157.2 of 160 GB: 2.8 GB are left for everything, which 0.9 of the memory does not even give."""
    memory = plan_memory(Holding(LLAMA, WEIGHT_FORMATS["bf16"], 2), DRAFT, TWO, H100)
    assert memory.draft is not None
    held = 2 * (memory.weights.value + memory.draft.value)
    assert held == pytest.approx(157.167e9, rel=1e-4)
    assert 160e9 - held == pytest.approx(2.83e9, rel=0.01)
    assert not memory.fits
    assert memory.tokens.value == 0


def test_in_eight_bits_they_fit_and_leave_this_much_kv() -> None:
    """70B in fp8, embeddings in bf16: 72.66 GB; the draft in bf16 16.06 GB. 144 - 88.72 = 55.28 GB, over 327,680 and
    131,072 bytes a token 120,495 tokens: 58 sequences of 2,048. With KV in eight bits, twice as many."""
    memory = plan_memory(Holding(LLAMA, WEIGHT_FORMATS["fp8"], 2), DRAFT, TWO, H100)
    assert 2 * memory.weights.value == pytest.approx(72.656e9, rel=1e-4)
    assert memory.token.value == 327_680 + 131_072
    assert memory.pool.value == pytest.approx(55.28e9, rel=1e-3)
    assert memory.tokens.value // 2048 == 58
    eight = Holding(DRAFT.shape, DRAFT.weights, 1)
    halved = plan_memory(Holding(LLAMA, WEIGHT_FORMATS["fp8"], 1), eight, TWO, H100)
    assert halved.tokens.value == pytest.approx(2 * memory.tokens.value, abs=1)


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    layout = GpuLayout(16, shards_attention=True)
    memory = plan_memory(Holding(LLAMA, WEIGHT_FORMATS["bf16"], 2), None, layout, H100)
    assert memory.pool.value == 8 * memory.kv.value


def test_deepseek_fits_sixteen_h100_and_not_eight() -> None:
    """671 GB in fp8. Eight GPUs have 640. Sixteen hold 16 experts of 44.04 million in each of 58 layers,
    and all else whole."""
    shape = model_shape(configs.DEEPSEEK_V3, "deepseek")
    holding = Holding(shape, WEIGHT_FORMATS["fp8"], 2)
    assert not plan_memory(holding, None, GpuLayout(8, shards_attention=True), H100).fits
    sixteen = plan_memory(holding, None, GpuLayout(16, shards_attention=False), H100)
    whole = shape.num_common_weights + 2 * (2 * shape.num_embedding_weights)
    rest = 2 * (shape.num_gate_weights + shape.num_norm_weights)
    assert sixteen.weights.value == whole + rest + 16 * 58 * 3 * 7168 * 2048
    assert sixteen.fits


@pytest.mark.parametrize(("coding", "cached", "expected"), [("bf16", 2, 2.0), ("int8", 1, 1.0)])
def test_kv_goes_as_it_is_cached(coding: str, cached: int, expected: float) -> None:
    assert wire_bytes_per_value(coding, cached, 16, 128) == expected


def test_in_eight_bits_it_is_as_large_as_the_packer_makes_it() -> None:
    from kvtransfer.eight_bit import Coding, EightBit
    from model.kv_layout import KVLayout

    layout = KVLayout("m", "bfloat16", num_layers=1, num_kv_heads=8, head_dim=128)
    packed = EightBit(layout, Coding.INT8).packed_bytes
    assert wire_bytes_per_value("int8", 2, 16, 128) * 2 * 8 * 16 * 128 == packed
