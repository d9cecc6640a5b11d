from __future__ import annotations

import pytest

from decode.speedup import expected_tokens, speedup
from protos.errors import InvalidArgument
from router.drafting_gain import Drafting, draft_gain, emitted_tokens, gain_of, textbook_speedup
from router.gpu_layout import GpuLayout
from router.hardware import HARDWARE
from router.memory_plan import Holding
from router.model_config import model_shape
from router.precision import WEIGHT_FORMATS
from router.roofline import Roofline, usual_efficiency
from tests.router import model_configs as configs


@pytest.mark.parametrize(
    ("acceptance", "num_drafts", "cost", "emitted", "gain"),
    [
        (0.6, 5, 0.1, 2.383, 1.589),  # (1 - 0.6^6) / 0.4 = 0.953344 / 0.4; over 1.5
        (0.8, 5, 0.1, 3.689, 2.460),
        (0.9, 5, 0.1, 4.686, 3.124),
        (0.832, 5, 0.114, 3.978, 2.534),
        (0.55, 5, 0.1, 2.161, 1.440),
        (0.55, 8, 0.1, 2.212, 1.229),  # longer drafts hurt
    ],
)
def test_the_textbooks_arithmetic(acceptance: float, num_drafts: int, cost: float, emitted: float, gain: float) -> None:
    tokens = emitted_tokens(acceptance, num_drafts)
    assert tokens.value == pytest.approx(emitted, abs=6e-4)
    assert textbook_speedup(tokens, num_drafts, cost).value == pytest.approx(gain, abs=6e-4)
    assert tokens.value == pytest.approx(expected_tokens(acceptance, num_drafts))
    assert textbook_speedup(tokens, num_drafts, cost).value == pytest.approx(speedup(tokens.value, num_drafts, cost))


def roofline(config: dict[str, object], num_gpus: int) -> Roofline:
    shape = model_shape(config, "model")
    layout = GpuLayout(num_gpus, shards_attention=True)
    return Roofline(Holding(shape, WEIGHT_FORMATS["bf16"], 2), layout, HARDWARE["H100"], usual_efficiency(shape))


def test_experts_make_drafting_pay_most_at_a_middling_batch() -> None:
    """At batch 1 each draft reads experts of its own; at 32 all are read anyway; at 2,048 rows are computed in vain."""
    moe = roofline(configs.QWEN3_30B_A3B, 1)
    drafting = Drafting(acceptance=0.8)
    single, middling, large = (draft_gain(moe, drafting, batch, 1000).speedup.value for batch in (1, 32, 2048))
    assert middling > single + 0.3
    assert middling > large + 0.5


def test_a_dense_models_gain_at_small_batch_is_the_textbooks() -> None:
    """Its weights are read whatever the number of rows."""
    dense = roofline(configs.LLAMA_3_70B, 4)
    gain = gain_of(dense, Drafting(0.8, cost=0.1), 1, 1000, 5)
    assert gain.textbook.value == pytest.approx(2.460, abs=6e-4)
    assert gain.speedup.value == pytest.approx(gain.textbook.value, rel=0.02)


def test_no_drafts_where_none_gains() -> None:
    dense = roofline(configs.LLAMA_3_70B, 4)
    assert draft_gain(dense, Drafting(0.1, cost=0.3), 4, 1000).num_draft_tokens == 0
    assert draft_gain(dense, None, 4, 1000).speedup.value == 1


def test_a_draft_model_costs_its_step() -> None:
    """8.03 of 70.55 billion weights are read, without their embeddings 7.505 of 69.50: 0.108 of the step's reading."""
    target, draft = roofline(configs.LLAMA_3_70B, 1), roofline(configs.LLAMA_3_8B, 1)
    gain = gain_of(target, Drafting(0.832, model=draft), 1, 1, 5)
    assert gain.iteration.value / target.decode_s(1, 1) == pytest.approx(1 + 5 * 7.505 / 69.502, rel=0.01)


@pytest.mark.parametrize("acceptance", [-0.1, 1.0])
def test_an_acceptance_out_of_range_is_refused(acceptance: float) -> None:
    with pytest.raises(InvalidArgument, match="acceptance is"):
        Drafting(acceptance)
