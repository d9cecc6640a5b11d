"""Every family computes what transformers computes: whole, in chunks, over a found prefix, and batched with others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.runner import Chunk
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from tests.model.tiny_models import FAMILIES, VOCAB_SIZE, build, reference_logits

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
BLOCK_SIZE = 4
TOLERANCE = 1e-4


class Model:
    """A runner, what it is compared with, and block ids in random order."""

    def __init__(self, reference: PreTrainedModel, runner: TorchRunner) -> None:
        self.reference = reference
        self.runner = runner
        self.free_blocks = random.Random(0).sample(range(runner.num_blocks), runner.num_blocks)

    def take_blocks(self, num_tokens: int) -> list[int]:
        return [self.free_blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]

    def chunk(self, token_ids: Sequence[int], start: int, end: int, block_ids: Sequence[int]) -> Chunk:
        blocks = block_ids[: -(-end // BLOCK_SIZE)]
        return Chunk(token_ids[start:end], start, blocks, GREEDY, token_ids[:end], num_prompt_tokens=end)

    def logits(self, *chunks: Chunk) -> Tensor:
        return self.runner.logits(chunks)[0]

    def expected(self, token_ids: Sequence[int], end: int | None = None) -> Tensor:
        """After the last of the first `end` tokens."""
        return reference_logits(self.reference, token_ids[:end])[-1]


@pytest.fixture(params=["torch", "avx2"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, kernels: str, tmp_path: Path) -> Model:
    reference = build(request.param, tmp_path)
    return Model(reference, TorchRunner.load(tmp_path, num_blocks=128, block_size=BLOCK_SIZE, kernels=kernels))


def tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 4, 31])
def test_whole_prompt(model: Model, length: int) -> None:
    prompt = tokens(length)
    found = model.logits(model.chunk(prompt, 0, length, model.take_blocks(length)))
    close(found[0], model.expected(prompt))


def test_uneven_chunks(model: Model) -> None:
    prompt, ends = tokens(90), (1, 2, 9, 40, 41, 77, 90)
    blocks = model.take_blocks(90)
    for start, end in zip((0, *ends), ends, strict=False):
        found = model.logits(model.chunk(prompt, start, end, blocks))
        close(found[0], model.expected(prompt, end))


def test_prefix_of_another_sequence(model: Model) -> None:
    shared, first, second = tokens(24), tokens(9, seed=2), tokens(13, seed=3)
    blocks = model.take_blocks(33)
    model.logits(model.chunk(shared + first, 0, 33, blocks))
    reused = blocks[: 24 // BLOCK_SIZE] + model.take_blocks(13)
    found = model.logits(model.chunk(shared + second, 24, 37, reused))
    close(found[0], model.expected(shared + second))


def test_decode_batched_with_prefill(model: Model) -> None:
    """Three sequences decode while a fourth is prefilled in two chunks and a fifth in one."""
    lengths = (5, 17, 40)
    prompts = [tokens(length + 2, seed=length) for length in lengths]
    blocks = [model.take_blocks(length + 2) for length in lengths]
    model.logits(*(model.chunk(p, 0, n, b) for p, n, b in zip(prompts, lengths, blocks, strict=True)))
    late, late_blocks = tokens(30, seed=7), model.take_blocks(30)
    other, other_blocks = tokens(11, seed=8), model.take_blocks(11)
    for step, (start, end) in enumerate(((0, 19), (19, 30))):
        decoding = [model.chunk(p, n + step, n + step + 1, b) for p, n, b in zip(prompts, lengths, blocks, strict=True)]
        extra = [model.chunk(other, 0, 11, other_blocks)] if step else []
        found = model.logits(decoding[0], model.chunk(late, start, end, late_blocks), *decoding[1:], *extra)
        wanted = [(prompts[0], lengths[0] + step + 1), (late, end)]
        wanted += [(p, n + step + 1) for p, n in zip(prompts[1:], lengths[1:], strict=True)]
        wanted += [(other, 11)] if step else []
        close(found, torch.stack([model.expected(ids, end) for ids, end in wanted]))


def test_only_rows_that_want_a_token_have_logits(model: Model) -> None:
    prompt, blocks = tokens(12), model.take_blocks(12)
    silent = Chunk(prompt[:8], 0, blocks[:2])
    wanting = model.chunk(prompt, 0, 12, model.take_blocks(12))
    found = model.logits(silent, wanting)
    assert found.shape == (1, VOCAB_SIZE)
    close(found[0], model.expected(prompt))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("kernels", ["torch", "avx2", "mixed"])
def test_bfloat16_is_near_float32_on_the_same_weights(family: str, kernels: str, tmp_path: Path) -> None:
    reference = build(family, tmp_path, torch.bfloat16)
    model = Model(reference, TorchRunner.load(tmp_path, num_blocks=128, block_size=BLOCK_SIZE, kernels=kernels))
    assert model.runner.layout.dtype == "bfloat16"
    prompt, blocks = tokens(200), model.take_blocks(200)
    model.logits(model.chunk(prompt, 0, 193, blocks))
    found = model.logits(model.chunk(prompt, 193, 200, blocks))[0]
    expected = model.expected(prompt)
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_kernels_give_the_same_bits_however_tokens_are_batched(family: str, tmp_path: Path) -> None:
    """What disaggregation rests on: chunks, batches and other sequences do not change a token's logits at all."""
    model = Model(
        build(family, tmp_path, torch.bfloat16),
        TorchRunner.load(tmp_path, num_blocks=256, block_size=BLOCK_SIZE, kernels="avx2"),
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
