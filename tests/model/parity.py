"""What any runner must compute, whatever device and kernels it runs on: checks against transformers on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.prompt_scores import PromptScores
from model.runner import Chunk
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from tests.model.tiny_models import VOCAB_SIZE, reference_logits

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
        return self.runner.forward(chunks).logits.cpu()

    def expected(self, token_ids: Sequence[int], end: int | None = None) -> Tensor:
        """After the last of the first `end` tokens."""
        return reference_logits(self.reference, token_ids[:end])[-1]


def tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def whole_prompts(model: Model) -> None:
    for length in (1, 4, 31):
        prompt = tokens(length)
        found = model.logits(model.chunk(prompt, 0, length, model.take_blocks(length)))
        close(found[0], model.expected(prompt))


def uneven_chunks(model: Model) -> None:
    prompt, ends = tokens(90), (1, 2, 9, 40, 41, 77, 90)
    blocks = model.take_blocks(90)
    for start, end in zip((0, *ends), ends, strict=False):
        found = model.logits(model.chunk(prompt, start, end, blocks))
        close(found[0], model.expected(prompt, end))


def prefix_of_another_sequence(model: Model) -> None:
    shared, first, second = tokens(24), tokens(9, seed=2), tokens(13, seed=3)
    blocks = model.take_blocks(33)
    model.logits(model.chunk(shared + first, 0, 33, blocks))
    reused = blocks[: 24 // BLOCK_SIZE] + model.take_blocks(13)
    found = model.logits(model.chunk(shared + second, 24, 37, reused))
    close(found[0], model.expected(shared + second))


def decode_batched_with_prefill(model: Model) -> None:
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


def only_rows_that_want_a_token_have_logits(model: Model) -> None:
    prompt, blocks = tokens(12), model.take_blocks(12)
    silent = Chunk(prompt[:8], 0, blocks[:2])
    wanting = model.chunk(prompt, 0, 12, model.take_blocks(12))
    found = model.logits(silent, wanting)
    assert found.shape == (1, VOCAB_SIZE)
    close(found[0], model.expected(prompt))


def prompts_are_scored(model: Model) -> None:
    """In uneven chunks, while another decodes and a third is scored whole; what is computed again is scored once."""
    first, second, third = tokens(75), tokens(30, seed=2), tokens(20, seed=3)
    blocks, second_blocks, third_blocks = (model.take_blocks(len(text)) for text in (first, second, third))
    model.logits(model.chunk(third, 0, 15, third_blocks))
    scores = PromptScores(4, num_prompt_tokens=70)  # the last five were said already
    whole = PromptScores(0, num_prompt_tokens=30)

    def step(start: int, end: int, *others: Chunk) -> None:
        chunk = Chunk(first[start:end], start, blocks, GREEDY if end == 75 else None, first, 70, scores=scores)
        model.runner.execute([*others, chunk])

    step(0, 1, model.chunk(third, 15, 16, third_blocks))
    step(
        1,
        20,
        replace(model.chunk(second, 0, 30, second_blocks), scores=whole),
        model.chunk(third, 16, 17, third_blocks),
    )
    step(0, 12)
    step(12, 66)
    assert (scores.num_scored, scores.is_complete) == (66, False)
    step(66, 75)
    assert (scores.num_scored, scores.is_complete, whole.is_complete) == (69, True, True)
    for text, found, count in ((first[:70], scores, 4), (second, whole, 0)):
        laws = reference_logits(model.reference, text).log_softmax(-1)
        for law, token_id, each in zip(laws, text[1:], found, strict=False):
            assert abs(each.chosen - float(law[token_id])) < TOLERANCE
            best = law.topk(count)
            assert [token for token, _ in each.top] == best.indices.tolist()
            assert all(abs(each.top[rank][1] - value) < TOLERANCE for rank, value in enumerate(best.values.tolist()))
        assert len(list(found)) == len(text) - 1


def trees_batched_with_everything_else(model: Model) -> None:
    """Behind one token and behind several, while others decode, draft a chain and are prefilled."""
    shapes = ((-1, -1, 0, 0, 1, 4, 2, -1), tuple(random.Random(node).randrange(-1, node) for node in range(30)))
    lengths = (7, 22)
    texts = [tokens(n + len(parents), seed=n) for n, parents in zip(lengths, shapes, strict=True)]
    blocks = [model.take_blocks(len(text)) for text in texts]
    other, chain, late = tokens(13, seed=3), tokens(18, seed=4), tokens(25, seed=5)
    other_blocks, chain_blocks, late_blocks = (model.take_blocks(len(text)) for text in (other, chain, late))
    starts = (lengths[0] - 1, lengths[1] - 5)
    before = [model.chunk(t, 0, start, b) for t, start, b in zip(texts, starts, blocks, strict=True)]
    before += [model.chunk(other, 0, 12, other_blocks), model.chunk(chain, 0, 13, chain_blocks)]
    model.logits(*before)
    trees = [
        replace(model.chunk(text, start, len(text), of_text), parents=parents)
        for text, start, of_text, parents in zip(texts, starts, blocks, shapes, strict=True)
    ]
    step = [
        model.chunk(other, 12, 13, other_blocks),
        trees[0],
        model.chunk(chain, 13, 18, chain_blocks),
        trees[1],
        model.chunk(late, 0, 25, late_blocks),
    ]
    found = model.runner.forward(step, num_rows=[1, 1 + len(shapes[0]), 5, 1 + len(shapes[1]), 1]).logits.cpu()
    paths = [other, *(text for pair in zip(texts, lengths, shapes, strict=True) for text in _paths(*pair)), late]
    paths[1 + 1 + len(shapes[0]) : 1 + 1 + len(shapes[0])] = [chain[:end] for end in range(14, 19)]
    close(found, torch.stack([model.expected(path) for path in paths]))


def _paths(text: Sequence[int], num_known: int, parents: Sequence[int]) -> list[list[int]]:
    """What is before the tree, and to each node."""
    paths = [list(text[:num_known])]
    for token, parent in zip(text[num_known:], parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


CHECKS: tuple[Callable[[Model], None], ...] = (
    whole_prompts,
    uneven_chunks,
    prefix_of_another_sequence,
    decode_batched_with_prefill,
    only_rows_that_want_a_token_have_logits,
    prompts_are_scored,
    trees_batched_with_everything_else,
)


def bfloat16_is_near_float32_on_the_same_weights(model: Model) -> None:
    """For a model whose weights and cache are in bfloat16."""
    assert model.runner.layout.dtype == "bfloat16"
    prompt, blocks = tokens(200), model.take_blocks(200)
    model.logits(model.chunk(prompt, 0, 193, blocks))
    found = model.logits(model.chunk(prompt, 193, 200, blocks))[0]
    expected = model.expected(prompt)
    assert (found - expected).norm() < 0.03 * expected.norm()
