"""Loading, sizing the cache, and the contract of `execute`."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from model import kernel_backend
from model.kernels.library import KernelsUnavailable, builds
from model.kv_cache import CacheDoesNotFit, num_blocks_that_fit
from model.kv_layout import KVLayout
from model.prompt_scores import PromptScores
from model.runner import Chunk, ModelRunner, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams
from model.torch_runner import TorchRunner
from tests.model.tiny_models import MAX_TOKENS, VOCAB_SIZE, build, reference_logits

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    build("mixtral", folder)
    return folder


def blocks(count: int) -> list[int]:
    return list(range(count))


def test_greedy_decode_is_that_of_transformers(tmp_path: Path) -> None:
    reference = build("llama", tmp_path, seed=4)
    runner = TorchRunner.load(tmp_path, num_blocks=20)
    history = random.Random(0).choices(range(VOCAB_SIZE), k=20)
    start = 0
    for _ in range(30):
        expected = int(reference_logits(reference, history)[-1].argmax())
        output = runner.execute([Chunk(history[start:], start, blocks(4), GREEDY, history, 20)])
        assert output.sampled == (SampledToken(expected),)
        start = len(history)
        history.append(expected)


def test_runner_tells_about_itself(mixtral: Path) -> None:
    runner: ModelRunner = TorchRunner.load(mixtral, num_blocks=40, kernels="c")
    layout = runner.layout
    assert (layout.dtype, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size) == (
        "float32",
        2,
        2,
        8,
        16,
    )
    assert (runner.num_blocks, runner.kernels, runner.cache_device_id) == (40, builds()[0].name, -1)
    assert runner.cache_address % 4096 == 0


def test_layer_done_comes_when_the_layer_is_in_the_cache(mixtral: Path) -> None:
    runner = TorchRunner.load(mixtral, num_blocks=40)
    memory = runner.cache.memory  # [L, N, H, 2, B, D]
    seen: list[tuple[int, list[bool]]] = []

    def layer_done(layer: int) -> None:
        seen.append((layer, [bool(memory[other, 3, :, :, :5].all()) for other in range(2)]))

    runner.execute([Chunk([1, 2, 3, 4, 5], 0, [3])], layer_done)
    assert seen == [(0, [True, False]), (1, [True, True])]


def test_prompt_is_scored_with_few_rows_of_logits_at_a_time(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TorchRunner.load(mixtral, num_blocks=40)
    read, num_rows = runner.model.logits, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return read(hidden)

    monkeypatch.setattr(runner.model, "logits", logits)
    prompt = random.Random(0).choices(range(VOCAB_SIZE), k=150)
    scores = PromptScores(2, num_prompt_tokens=150)
    runner.execute([Chunk(prompt, 0, blocks(10), GREEDY, prompt, 150, scores=scores)])
    assert num_rows == [1, 64, 64, 21]
    assert len(list(scores)) == 149


def test_tokens_come_in_the_order_of_chunks(mixtral: Path) -> None:
    runner = TorchRunner.load(mixtral, num_blocks=40)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    alone = [runner.execute([Chunk(p, 0, [0], GREEDY, p, len(p))]).sampled[0] for p in prompts]
    wanted = [Chunk(p, 0, [i], GREEDY, p, len(p)) for i, p in enumerate(prompts)]
    silent = Chunk([1, 2], 0, [9])
    together = runner.execute([silent, wanted[0], wanted[1], silent, wanted[2]]).sampled
    assert together == (None, alone[0], alone[1], None, alone[2])


def test_expert_load_counts_every_token_of_every_layer_but_the_silent_ones_of_the_last(mixtral: Path) -> None:
    for kernels in ("torch", "c"):
        runner = TorchRunner.load(mixtral, num_blocks=40, kernels=kernels)
        prompt = [5, 6, 7, 8, 9]
        load = runner.execute([Chunk(prompt, 0, [0], GREEDY, prompt, 5), Chunk([1, 2], 0, [1])]).expert_load
        assert [sum(layer) for layer in load] == [7 * 2, 1 * 2]
        assert [len(layer) for layer in load] == [5, 5]
        silent = runner.execute([Chunk([1, 2], 0, [1])])
        assert [sum(layer) for layer in silent.expert_load] == [2 * 2, 0]
        assert silent.sampled == (None,)


def test_dense_model_has_no_expert_load(tmp_path: Path) -> None:
    build("qwen2", tmp_path)
    runner = TorchRunner.load(tmp_path, num_blocks=20)
    assert runner.execute([Chunk([1], 0, [0], GREEDY, [1], 1)]).expert_load == ()


@pytest.mark.parametrize("kernels", ["torch", "c"])
def test_a_sequence_whose_cache_is_damaged_has_no_token_and_its_neighbours_have_theirs(
    mixtral: Path, kernels: str
) -> None:
    runner = TorchRunner.load(mixtral, num_blocks=40, kernels=kernels)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    wanted = [Chunk(prompt[-1:], len(prompt) - 1, [i], GREEDY, prompt, 1) for i, prompt in enumerate(prompts)]
    runner.execute([Chunk(prompt, 0, [i]) for i, prompt in enumerate(prompts)])
    whole = runner.execute(wanted).sampled
    runner.cache.memory[0, 1, 0, 1, 0] = torch.nan  # a value of the second sequence's first token
    damaged = runner.execute(wanted).sampled
    assert isinstance(damaged[1], NonFiniteLogits)
    assert (damaged[0], damaged[2]) == (whole[0], whole[2])


def test_cache_in_bytes(mixtral: Path) -> None:
    layout = TorchRunner.load(mixtral, num_blocks=16).layout
    assert layout.block_bytes == 2 * 2 * 2 * 16 * 8 * 4
    assert num_blocks_that_fit(layout, 17 * layout.block_bytes - 1) == 16
    assert TorchRunner.load(mixtral, kv_cache_bytes=20 * layout.block_bytes + 1).num_blocks == 20


def test_cache_dtype(mixtral: Path) -> None:
    assert TorchRunner.load(mixtral, num_blocks=16, kv_dtype="bfloat16").layout.dtype == "bfloat16"
    assert TorchRunner.load(mixtral, num_blocks=16, dtype="bfloat16").layout.dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of auto, float32"):
        TorchRunner.load(mixtral, num_blocks=16, dtype="int8")


def test_too_little_cache_for_one_sequence(mixtral: Path) -> None:
    needed = MAX_TOKENS // 16
    with pytest.raises(CacheDoesNotFit, match=f"{MAX_TOKENS} tokens, which takes {needed} blocks.*--kv-cache-gb"):
        TorchRunner.load(mixtral, num_blocks=needed - 1)


def test_more_cache_than_memory(mixtral: Path) -> None:
    with pytest.raises(CacheDoesNotFit, match=r"takes \d+ bytes .* are available .*lower --kv-cache-gb"):
        TorchRunner.load(mixtral, kv_cache_bytes=1 << 50)


def test_cache_size_is_given_once(mixtral: Path) -> None:
    sizes: dict[str, Any] = {"num_blocks": 16, "kv_cache_bytes": 1 << 20, "kv_cache_share": 0.5}
    for given in ({}, *(dict(two) for two in itertools.combinations(sizes.items(), 2))):
        with pytest.raises(ValueError, match="give one of num_blocks, kv_cache_bytes and kv_cache_share"):
            TorchRunner.load(mixtral, **given)


def test_plain_torch_is_said_and_logged(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(build: object, *, may_round: bool) -> None:
        raise KernelsUnavailable("this CPU lacks avx2")

    monkeypatch.setattr(kernel_backend, "library", unavailable)
    with caplog.at_level(logging.WARNING):
        assert TorchRunner.load(mixtral, num_blocks=16).kernels == "torch"
    assert [record.message for record in caplog.records] == [
        "computing with plain torch, which is several times slower: this CPU lacks avx2"
    ]
    with pytest.raises(KernelsUnavailable):
        TorchRunner.load(mixtral, num_blocks=16, kernels="c")


def test_bfloat16_instructions_choose_the_mixed_kernels(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert TorchRunner.load(mixtral, num_blocks=16, dtype="bfloat16").kernels.endswith(", oneDNN bf16 for many tokens")
    assert TorchRunner.load(mixtral, num_blocks=16).kernels == builds()[0].name


def test_one_fingerprint_per_model(mixtral: Path, tmp_path: Path) -> None:
    build("mixtral", tmp_path, seed=1)
    one, other = (TorchRunner.load(folder, num_blocks=16).layout for folder in (mixtral, tmp_path))
    assert isinstance(one, KVLayout) and (one.difference(other) or "").startswith("model_digest is")
