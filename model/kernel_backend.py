"""The C kernels as backends: alone, with oneDNN for many tokens, and with weights of eight bits for what is guessed.

They implement `model.backend.Backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from model import huge_pages
from model.attention import AttentionBackend, HeadNorms
from model.config import ModelConfig
from model.kernels.library import AMX, AVX512, Build
from model.kernels.parts import (
    KernelAttention,
    KernelFeedForward,
    KernelLikeliest,
    KernelLinear,
    KernelMoE,
    KernelNorm,
    eight_bit_bytes,
    eight_bit_rows,
    library,
)
from model.kv_cache import PagedKVCache
from model.likeliest import Likeliest
from model.linear import Linear, Norm, TorchLinear
from model.moe import Expert, FeedForward, TorchFeedForward, TorchMoE

Part = TypeVar("Part", Linear, FeedForward)

# Tokens per matrix from which on other products take less time, measured on the feed-forward nets of the demo models.
# oneDNN packs the weights anew at every call; with AMX ours copy them once, which fewer than six tokens do not repay.
MANY_TOKENS = {"avx2": 48, "avx512": 48, "avx512_bf16": 112, "amx": 192}  # for oneDNN, by what ours are compiled for
TILED_TOKENS = 6  # for the kernels with AMX
SIXTEEN_BIT_TOKENS = 9  # from which on to widen eight bits for each tile takes longer than to read sixteen
_EIGHT_BIT_PIECE_BYTES = 16 << 20


class KernelBackend:
    """Float32 activations. Weights stay in place, unless another dtype, narrower than float32, was asked for."""

    activations = torch.float32

    def __init__(self, dtype: torch.dtype, build: Build | None = None, *, may_round: bool = False) -> None:
        self._dtype = dtype
        found, self._library = library(build, may_round=may_round)
        self.name = found.name

    def place(self, weight: Tensor) -> Tensor:
        return weight if self._dtype == torch.float32 else weight.to(self._dtype)

    def placed_bytes(self, weight: Tensor) -> int:
        return weight.nbytes if self._dtype == torch.float32 else weight.numel() * self._dtype.itemsize

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return KernelNorm(self._library, weight, eps)

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        return KernelLinear(self._library, weights, biases)

    def feed_forward(self, expert: Expert) -> FeedForward:
        return KernelFeedForward(self._library, expert)

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward:
        return KernelMoE(self._library, experts, router, num_experts_per_token)

    def attention(
        self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> AttentionBackend:
        return KernelAttention(self._library, config, cache, head_norms)

    def likeliest(self) -> Likeliest:
        return KernelLikeliest(self._library)

    def for_drafts(self) -> KernelBackend:
        return self if self._dtype == torch.float32 else EightBitBackend(self)


class MixedBackend(KernelBackend):
    """The C kernels for few tokens, when reading the weights takes the time, and oneDNN in bfloat16 for many.

    For CPUs with bfloat16 instructions. Without AMX ours round activations, too, which makes eight tokens hardly dearer
    than one; with it the fewest go through the kernels for AVX-512, which read the weights in place. The last bits of a
    token then depend on how many are computed with it: chunks of a prompt, or a batch.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, may_round=True)
        self._many_tokens = MANY_TOKENS[self.name]
        self._fewest = KernelBackend(dtype, AVX512) if self.name == AMX.name else None
        self.name += ", oneDNN bf16 for many tokens"

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        mixed = MixedLinear(super().linear(weights, biases), TorchLinear(weights, biases), self._many_tokens)
        if self._fewest is None:
            return mixed
        return LinearByCount(self._fewest.linear(weights, biases), mixed, TILED_TOKENS)

    def feed_forward(self, expert: Expert) -> FeedForward:
        mixed = MixedFeedForward(super().feed_forward(expert), TorchFeedForward(expert), self._many_tokens)
        if self._fewest is None:
            return mixed
        return FeedForwardByCount(self._fewest.feed_forward(expert), mixed, TILED_TOKENS)

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward:
        def tokens(per_expert: int) -> int:  # of a batch in which an expert gets so many on average
            return per_expert * len(experts) // num_experts_per_token

        weights = experts, router, num_experts_per_token
        mixed = MixedFeedForward(super().mixture(*weights), TorchMoE(*weights), tokens(self._many_tokens))
        if self._fewest is None:
            return mixed
        return FeedForwardByCount(self._fewest.mixture(*weights), mixed, tokens(TILED_TOKENS))


class EightBitBackend(KernelBackend):
    """Reads copies of the weights in eight bits for the fewest tokens: half the bytes, but more work for each token.

    For more tokens it does as `sixteen_bit`, whose kernels it uses, and so it does for mixtures.
    """

    def __init__(self, sixteen_bit: KernelBackend) -> None:
        self._dtype, self._library, self.name = sixteen_bit._dtype, sixteen_bit._library, sixteen_bit.name
        self._sixteen_bit = sixteen_bit
        self._arena = huge_pages.Arena(_EIGHT_BIT_PIECE_BYTES)
        self._copies: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def placed_bytes(self, weight: Tensor) -> int:
        num_rows, num_inputs = weight.shape if weight.ndim == 2 else (0, 0)  # others are not copied
        return self._sixteen_bit.placed_bytes(weight) + eight_bit_bytes(num_rows, num_inputs)

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        fewest = KernelLinear(self._library, [self._in_eight_bits(weight) for weight in weights], biases)
        return LinearByCount(fewest, self._sixteen_bit.linear(weights, biases), SIXTEEN_BIT_TOKENS)

    def feed_forward(self, expert: Expert) -> FeedForward:
        fewest = Expert(*(self._in_eight_bits(weight) for weight in (expert.gate, expert.up, expert.down)))
        return FeedForwardByCount(
            KernelFeedForward(self._library, fewest), self._sixteen_bit.feed_forward(expert), SIXTEEN_BIT_TOKENS
        )

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward:
        return self._sixteen_bit.mixture(experts, router, num_experts_per_token)

    def for_drafts(self) -> KernelBackend:
        return self

    def _in_eight_bits(self, weight: Tensor) -> Tensor:
        """One copy of each weight, however many products it is part of."""
        key = weight.data_ptr(), tuple(weight.shape)
        if key not in self._copies:  # with the weight itself: what has its address later is not it
            self._copies[key] = weight, self._arena.copied(eight_bit_rows(weight))
        return self._copies[key][1]


@dataclass(frozen=True, slots=True)
class ByCount(Generic[Part]):
    few: Part
    many: Part
    num_tokens: int  # from which on they are many

    def part_for(self, x: Tensor) -> Part:
        return self.few if len(x) < self.num_tokens else self.many


class LinearByCount(ByCount[Linear]):
    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self.part_for(x)(x, add_to)


class FeedForwardByCount(ByCount[FeedForward]):
    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        return self.part_for(x)(x, add_to)


class MixedLinear(ByCount[Linear]):
    """Many in bfloat16."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        if self.part_for(x) is self.few:
            return self.few(x, add_to)
        y = self.many(x.bfloat16())
        return y.float() if add_to is None else add_to.add_(y)


class MixedFeedForward(ByCount[FeedForward]):
    """Many in bfloat16."""

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        if self.part_for(x) is self.few:
            return self.few(x, add_to)
        y = torch.zeros_like(x, dtype=torch.bfloat16)
        load = self.many(x.bfloat16(), add_to=y)
        add_to.add_(y)
        return load
