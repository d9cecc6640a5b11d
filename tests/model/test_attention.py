"""Both attention backends against a few lines of float64 torch that know nothing of blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.attention import ROWS_AT_ONCE, AttentionBackend, HeadNorms, TorchAttention
from model.config import ModelConfig, RopeConfig
from model.kernels.library import builds
from model.kernels.parts import KernelAttention, library
from model.kv_cache import PagedKVCache
from model.kv_layout import KVLayout
from model.runner import Chunk
from model.step_input import StepInput

BUILDS = {build.name: build for build in builds()}
BACKENDS = ["torch", *BUILDS]


@dataclass
class Case:
    """Sequences with the queries, keys and values of all their tokens, kept apart from the cache under test."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    backend: str
    head_norms: HeadNorms | None = None

    def __post_init__(self) -> None:
        layout = KVLayout("digest", self.dtype, 2, self.num_kv_heads, self.head_dim, self.block_size)
        self.cache = PagedKVCache(layout, 220, torch.device("cpu"))
        self.cache.memory.fill_(math.nan)  # what nobody wrote must not be read
        self.free = random.Random(3).sample(range(220), 220)
        self.frequencies = 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.attention = self._attention()

    def _attention(self) -> AttentionBackend:
        config = ModelConfig(
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=1,
            hidden_size=1,
            intermediate_size=1,
            num_layers=2,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            norm_eps=1e-5,
            rope=RopeConfig(10000.0),
            tie_word_embeddings=False,
            qkv_bias=False,
            output_bias=False,
            qk_norm=self.head_norms is not None,
            num_experts=0,
            num_experts_per_token=0,
            eos_token_ids=(),
        )
        norms = [None, self.head_norms]
        if self.backend == "torch":
            return TorchAttention(config, self.cache, norms)
        return KernelAttention(library(BUILDS[self.backend])[1], config, self.cache, norms)

    def run(
        self, parts: list[tuple[Tensor, int, list[int]]], trees: dict[int, Sequence[int]] | None = None
    ) -> list[Tensor]:
        """Each part is qkv [T, Q + 2 H, D] of a chunk, its start and the blocks of its sequence. Trees are by part."""
        shapes = trees or {}
        chunks = [
            Chunk([0] * len(qkv), start, blocks, parents=shapes.get(index))
            for index, (qkv, start, blocks) in enumerate(parts)
        ]
        step = StepInput.of(chunks, self.block_size, self.frequencies)
        queries = self.attention.store(1, torch.cat([qkv for qkv, _, _ in parts]).flatten(1), step)
        return list(self.attention.attend(1, queries, step).split([len(qkv) for qkv, _, _ in parts]))

    def sequence(self, num_tokens: int, seed: int) -> tuple[Tensor, list[int]]:
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim, generator=generator)
        return qkv, [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def expected(self, qkv: Tensor) -> Tensor:
        """Causal attention over the whole sequence, [T, Q D] in float64."""
        heads = qkv.double()
        queries, keys, values = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.head_norms is not None:
            queries = _normed(queries, self.head_norms.query)
            keys = _normed(keys, self.head_norms.key)
        queries, keys = self._rotated(queries), self._rotated(keys)
        dtype = getattr(torch, self.dtype)
        keys, values = keys.to(dtype).double(), values.to(dtype).double()
        group = self.num_heads // self.num_kv_heads
        outputs = []
        for head in range(self.num_heads):
            scores = queries[:, head] @ keys[:, head // group].T / math.sqrt(self.head_dim)
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            outputs.append(scores.softmax(dim=-1) @ values[:, head // group])
        return torch.stack(outputs, dim=1).flatten(1)

    def _rotated(self, heads: Tensor) -> Tensor:
        """As multiplication of complex numbers, [T, heads, D]."""
        half = self.head_dim // 2
        angles = torch.arange(len(heads))[:, None] * self.frequencies.double()
        turned = (
            torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat((turned.real, turned.imag), dim=-1)


def _normed(heads: Tensor, weight: Tensor) -> Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def close(found: Tensor, expected: Tensor, dtype: str) -> None:
    """A key that was rounded the other way moves a score by 2^-9 of it; otherwise only float32 sums differ."""
    tolerance = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 16, 16), (9, 3, 64, 16), (8, 1, 128, 8), (6, 2, 6, 4), (5, 5, 20, 1), (14, 2, 64, 32), (32, 4, 16, 5)],
)
def test_chunks_and_decode_together(
    backend: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = Case(num_heads, num_kv_heads, head_dim, block_size, dtype, backend)
    first, first_blocks = case.sequence(75, seed=1)
    second, second_blocks = case.sequence(130, seed=2)
    found = [
        case.run([(first[:70], 0, first_blocks), (second[:1], 0, second_blocks)]),
        case.run([(second[1:64], 1, second_blocks), (first[70:71], 70, first_blocks)]),
        case.run([(first[71:73], 71, first_blocks), (second[64:129], 64, second_blocks)]),
        case.run([(first[73:74], 73, first_blocks), (second[129:], 129, second_blocks)]),
        case.run([(first[74:], 74, first_blocks)]),
    ]
    close(torch.cat([found[0][0], found[1][1], found[2][0], found[3][0], found[4][0]]), case.expected(first), dtype)
    close(torch.cat([found[0][1], found[1][0], found[2][1], found[3][1]]), case.expected(second), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 63, 64, 65, 128, 200])
def test_every_context_length(backend: str, num_tokens: int) -> None:
    case = Case(6, 2, 16, 16, "float32", backend)
    qkv, blocks = case.sequence(num_tokens, seed=num_tokens)
    whole = case.run([(qkv, 0, blocks)])[0]
    close(whole, case.expected(qkv), "float32")
    again = case.run([(qkv[-1:], num_tokens - 1, blocks)])[0]
    close(again, case.expected(qkv)[-1:], "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_longer_than_a_piece(backend: str) -> None:
    case = Case(2, 1, 16, 16, "float32", backend)
    qkv, blocks = case.sequence(ROWS_AT_ONCE + 140, seed=4)
    found = case.run([(qkv[:50], 0, blocks)]) + case.run([(qkv[50:], 50, blocks)])
    close(torch.cat(found), case.expected(qkv), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_can_be_stored_without_queries(backend: str, dtype: str) -> None:
    whole, without = Case(6, 2, 16, 4, dtype, backend), Case(6, 2, 16, 4, dtype, backend)
    qkv, blocks = whole.sequence(30, seed=1)
    whole.run([(qkv, 0, blocks)])
    step = StepInput.of([Chunk([0] * 30, 0, blocks)], 4, without.frequencies)
    queries = without.attention.store(1, qkv[:, 6:].flatten(1).contiguous(), step)
    assert queries.shape == (30, 0, 16)
    assert torch.equal(whole.cache.memory.nan_to_num(9.0), without.cache.memory.nan_to_num(9.0))  # NaN where none is
    assert whole.cache.memory[1].isfinite().sum() == 30 * 2 * 2 * 16


TREES: dict[str, tuple[int, ...]] = {
    "comb": (-1, -1, 0, 0, 2, 1, 4, -1),
    "siblings": (-1,) * 9,
    "chain": tuple(range(-1, 20)),
    "as large as may be": tuple(random.Random(node).randrange(-1, node) for node in range(64)),
}


def expected_of_nodes(case: Case, qkv: Tensor, parents: Sequence[int]) -> Tensor:
    """By the path of each: the last rows of qkv are those of nodes."""
    root = len(qkv) - len(parents)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), root + node])
    return torch.stack([case.expected(qkv[[*range(root), *path]])[-1] for path in paths])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_before", [2, 57, 128])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_node_sees_what_is_before_the_tree_and_its_own_path(
    backend: str, num_before: int, parents: tuple[int, ...]
) -> None:
    case = Case(6, 2, 16, 16, "float32", backend)
    plain, plain_blocks = case.sequence(60, seed=1)
    first, first_blocks = case.sequence(num_before + len(parents), seed=2)
    second, second_blocks = case.sequence(1 + len(parents), seed=3)
    start = num_before // 2
    case.run([(first[:start], 0, first_blocks), (plain[:40], 0, plain_blocks)])
    parts = [(plain[40:41], 40, plain_blocks), (first[start:], start, first_blocks), (second, 0, second_blocks)]
    found = case.run(parts, {1: parents, 2: parents})
    close(found[0], case.expected(plain[:41])[40:], "float32")
    close(found[1][: num_before - start], case.expected(first[:num_before])[start:], "float32")
    close(found[1][num_before - start :], expected_of_nodes(case, first, parents), "float32")
    close(found[2][:1], case.expected(second[:1]), "float32")
    close(found[2][1:], expected_of_nodes(case, second, parents), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tree_may_run_in_parts(backend: str, dtype: str) -> None:
    """As it does while it grows: one node, several, and beside a chunk that has none."""
    case = Case(4, 2, 16, 4, dtype, backend)
    parents = TREES["comb"]
    qkv, blocks = case.sequence(10 + len(parents), seed=1)
    plain, plain_blocks = case.sequence(8, seed=2)
    case.run([(qkv[:10], 0, blocks)])
    found, first = [], 0
    for end in (1, 2, 5, 8):
        parts = [(qkv[10 + first : 10 + end], 10 + first, blocks), (plain[first:end], first, plain_blocks)]
        found.append(case.run(parts, {0: parents[:end]}))
        first = end
    close(torch.cat([part[0] for part in found]), expected_of_nodes(case, qkv, parents), dtype)
    close(torch.cat([part[1] for part in found]), case.expected(plain), dtype)


@pytest.mark.parametrize(("num_before", "num_nodes"), [(0, 1), (5, 65)])
def test_a_tree_needs_a_root_and_has_64_nodes_at_most(num_before: int, num_nodes: int) -> None:
    chunk = Chunk([0] * (num_before + num_nodes), 0, range(9), parents=(-1,) * num_nodes)
    with pytest.raises(ValueError, match=f"a tree of {num_nodes} nodes at slot {num_before}: at most 64, behind"):
        StepInput.of([chunk], 16, torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_norms(backend: str) -> None:
    norms = HeadNorms(torch.linspace(0.5, 2.0, 24), torch.linspace(-1.0, 1.0, 24))
    case = Case(4, 2, 24, 8, "float32", backend, norms)
    qkv, blocks = case.sequence(40, seed=5)
    close(case.run([(qkv, 0, blocks)])[0], case.expected(qkv), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend: str) -> None:
    case = Case(2, 1, 16, 16, "float32", backend)
    qkv, blocks = case.sequence(90, seed=6)
    qkv[:, :3] *= 60.0
    found = case.run([(qkv, 0, blocks)])[0]
    assert (found - case.expected(qkv)).abs().max() < 2e-2  # scores near 10,000 have an error near 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_slots_of_the_step_are_written(backend: str) -> None:
    case = Case(4, 2, 16, 4, "bfloat16", backend)
    qkv, blocks = case.sequence(7, seed=7)
    case.run([(qkv, 0, blocks)])
    written = ~case.cache.memory.isnan()  # [L, N, H, 2, B, D]
    expected = torch.zeros_like(written)
    expected[1, blocks[0]] = True
    expected[1, blocks[1], :, :, :3] = True
    assert torch.equal(written, expected)
    values = qkv[:, 6:].to(torch.bfloat16)  # [T, H, D]
    assert torch.equal(case.cache.values(1)[blocks[0]].transpose(0, 1), values[:4])
