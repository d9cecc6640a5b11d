"""The device computes what transformers computes on the CPU. Not run on a GPU yet: see conftest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.runner import Chunk, Outcome, SampledToken
from model.torch_runner import TorchRunner
from tests.model.parity import (
    BLOCK_SIZE,
    CHECKS,
    GREEDY,
    Model,
    bfloat16_is_near_float32_on_the_same_weights,
    tokens,
)
from tests.model.sampling_cases import mixed_rows
from tests.model.tiny_models import FAMILIES, build

pytestmark = pytest.mark.gpu


def load(folder: Path, device: str = "cuda", num_blocks: int = 128) -> TorchRunner:
    return TorchRunner.load(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, kernels="torch", device=device)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parity(check: Callable[[Model], None], family: str, tmp_path: Path) -> None:
    check(Model(build(family, tmp_path), load(tmp_path)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_bfloat16(family: str, tmp_path: Path) -> None:
    model = Model(build(family, tmp_path, torch.bfloat16), load(tmp_path))
    bfloat16_is_near_float32_on_the_same_weights(model)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_greedy_tokens_do_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    """Not bit for bit, as the CPU's kernels are: a product of other shape may be summed in another order."""
    build(family, tmp_path)
    prompts = [tokens(length, seed=length) for length in (3, 17, 40, 90)]
    alone = [generate(load(tmp_path), [prompt], 12)[0] for prompt in prompts]
    assert generate(load(tmp_path, num_blocks=256), prompts, 12) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)


def generate(runner: TorchRunner, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers of all prompts, one step at a time together."""
    tables = [range(50 * row, 50 * row + 50) for row in range(len(prompts))]
    histories, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(num_tokens):
        step = [
            Chunk(history[start:], start, table, GREEDY, list(history), len(prompt))
            for history, start, table, prompt in zip(histories, starts, tables, prompts, strict=True)
        ]
        starts = [len(history) for history in histories]
        for history, outcome in zip(histories, runner.execute(step).sampled, strict=True):
            history.append(token_id(outcome))
    return [history[len(prompt) :] for history, prompt in zip(histories, prompts, strict=True)]


def token_id(outcome: Outcome) -> int:
    assert isinstance(outcome, SampledToken)
    return outcome.token_id


def test_expert_load_and_sampled_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Every way to sample at once, over a model whose logits differ by 1e-5 at the most."""
    build("mixtral", tmp_path)
    rows, steps = mixed_rows(20), []
    for index, row in enumerate(rows):
        prompt = tokens(9, seed=index)
        steps.append(Chunk(prompt, 0, range(3 * index, 3 * index + 3), row.sampling, prompt, 5))
    silent = Chunk([5, 6], 0, (100,))
    there, here = (load(tmp_path, device).execute([silent, *steps]) for device in ("cuda", "cpu"))
    assert [list(layer) for layer in there.expert_load] == [list(layer) for layer in here.expert_load]
    assert there.sampled[0] is None
    assert list(map(token_id, there.sampled[1:])) == list(map(token_id, here.sampled[1:]))
