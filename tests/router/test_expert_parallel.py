from __future__ import annotations

import pytest

from decode.coverage import Routing, distinct_experts
from router.expert_parallel import (
    all_to_all_bytes,
    all_to_all_s,
    placement,
    share_across_domains,
    tokens_for_efficiency,
    tokens_per_expert,
    touched_experts,
)
from router.gpu_layout import GpuLayout
from router.hardware import HARDWARE
from router.model_config import model_shape
from router.model_shape import ExpertShape
from tests.router import model_configs as configs

MIXTRAL = model_shape(configs.MIXTRAL_8X7B, "mixtral")
DEEPSEEK = model_shape(configs.DEEPSEEK_V3, "deepseek")
H100 = HARDWARE["H100"]
ONE_DOMAIN, TWO_DOMAINS = GpuLayout(8, shards_attention=False), GpuLayout(16, shards_attention=False)


def experts_of(shape: object) -> ExpertShape:
    experts = getattr(shape, "experts", None)
    assert isinstance(experts, ExpertShape)
    return experts


def test_mixtral_over_eight_gpus() -> None:
    """Batch 64 of 1,024 tokens, d = 4,096, k = 2, bf16: 2 * 65,536 * 2 * 4,096 * 2 = 2.147 GB per layer, of which each
    GPU sends 7/8 of 1/8 over its link of 450 GB/s: 0.5220 ms, and twice 10 us to begin with."""
    experts = experts_of(MIXTRAL)
    volume = all_to_all_bytes(experts, 4096, 64 * 1024)
    assert volume.value == 2_147_483_648
    figures = {each.name: each.value for each in all_to_all_s(MIXTRAL, ONE_DOMAIN, H100, 64 * 1024)}
    assert figures["all-to-all inside the domain"] == pytest.approx(20e-6 + 2_147_483_648 / 8 * 7 / 8 / 450e9)
    assert figures["all-to-all"] == pytest.approx(32 * 541.95e-6, rel=1e-3)
    assert figures["share sent to other domains"] == 0
    assert tokens_per_expert(experts, 64).value == 16
    assert tokens_for_efficiency(experts).value == 256
    assert placement(experts, ONE_DOMAIN, H100) == ((0, range(0, 8), range(0, 8)),)


def test_across_domains_half_of_what_is_sent_takes_the_network() -> None:
    """16 GPUs in two domains: 8 of 16 experts are elsewhere. Their share at 50 GB/s outweighs that at 450 GB/s."""
    assert share_across_domains(TWO_DOMAINS, H100).value == 0.5
    inside = all_to_all_s(DEEPSEEK, ONE_DOMAIN, H100, 4096)[-1].value
    figures = {each.name: each.value for each in all_to_all_s(DEEPSEEK, TWO_DOMAINS, H100, 4096)}
    volume = 2 * 4096 * 8 * 7168 * 2
    assert figures["all-to-all across domains"] == pytest.approx(80e-6 + volume / 16 * 0.5 / 50e9)
    assert figures["all-to-all"] == pytest.approx(58 * figures["all-to-all across domains"])
    assert figures["all-to-all"] > 2 * inside


def test_deepseeks_experts_have_their_places() -> None:
    placed = placement(experts_of(DEEPSEEK), TWO_DOMAINS, H100)
    assert placed == ((0, range(0, 8), range(0, 128)), (1, range(8, 16), range(128, 256)))
    uneven = placement(experts_of(DEEPSEEK), GpuLayout(72, shards_attention=False), H100)  # 4 places each, 288 in all
    assert uneven[-1] == (8, range(64, 72), range(256, 256))
    assert uneven[7] == (7, range(56, 64), range(224, 256))


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "num_tokens", "touched"),
    [(512, 10, 4, 38.8), (8, 2, 11, 7.66), (256, 8, 4, 30.5), (256, 8, 16, 102.0)],
)
def test_touched_experts(num_experts: int, num_chosen: int, num_tokens: int, touched: float) -> None:
    """Published counts of uniform routing; decode workers predict the same."""
    experts = ExpertShape(1, num_experts, num_chosen, 1, 0, 0)
    value = touched_experts(experts, num_tokens).value
    assert value == pytest.approx(touched, abs=0.06)
    assert value == pytest.approx(distinct_experts(Routing(num_experts, num_chosen), num_tokens))


def test_rows_of_one_sequence_choose_alike() -> None:
    """Measured of 256 experts, top 8, at 4, 8 and 16 consecutive tokens: 22, 36, 56."""
    experts = ExpertShape(1, 256, 8, 1, 0, 0)
    counts = [touched_experts(experts, 1, rows, beta=0.75).value for rows in (4, 8, 16)]
    assert counts == pytest.approx([22.0, 35.9, 57.4], abs=0.1)
