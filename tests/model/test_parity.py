"""Every family computes what transformers computes: whole, in chunks, over a found prefix, and batched with others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.torch_runner import TorchRunner
from tests.model.parity import BLOCK_SIZE, CHECKS, Model, bfloat16_is_near_float32_on_the_same_weights, tokens
from tests.model.tiny_models import FAMILIES, build


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_parity(check: Callable[[Model], None], family: str, kernels: str, tmp_path: Path) -> None:
    reference = build(family, tmp_path)
    check(Model(reference, TorchRunner.load(tmp_path, num_blocks=128, block_size=BLOCK_SIZE, kernels=kernels)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("kernels", ["torch", "c", "mixed"])
def test_bfloat16(family: str, kernels: str, tmp_path: Path) -> None:
    reference = build(family, tmp_path, torch.bfloat16)
    runner = TorchRunner.load(tmp_path, num_blocks=128, block_size=BLOCK_SIZE, kernels=kernels)
    bfloat16_is_near_float32_on_the_same_weights(Model(reference, runner))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_kernels_give_the_same_bits_however_tokens_are_batched(family: str, tmp_path: Path) -> None:
    """What disaggregation rests on: chunks, batches and other sequences do not change a token's logits at all."""
    model = Model(
        build(family, tmp_path, torch.bfloat16),
        TorchRunner.load(tmp_path, num_blocks=256, block_size=BLOCK_SIZE, kernels="c"),
    )
    prompt, other = tokens(150), tokens(90, seed=2)
    whole = model.logits(model.chunk(prompt, 0, 150, model.take_blocks(150)))[0]
    blocks, other_blocks = model.take_blocks(150), model.take_blocks(90)
    for start, end in ((0, 1), (1, 60), (60, 67), (67, 149)):
        model.logits(
            model.chunk(other, 0, start + 1 if start < 90 else 90, other_blocks),
            model.chunk(prompt, start, end, blocks),
        )
    decoded = model.logits(model.chunk(other, 0, 90, other_blocks), model.chunk(prompt, 149, 150, blocks))[1]
    assert torch.equal(decoded, whole)
