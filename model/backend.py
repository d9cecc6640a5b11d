"""Which implementation computes the parts of a transformer: plain torch anywhere, or the C kernels on a CPU that has
at least AVX2.

A backend makes parts out of weights; the transformer puts them together and knows no backend by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from model import huge_pages
from model.attention import AttentionBackend, HeadNorms, TorchAttention
from model.config import ModelConfig
from model.kernels.library import AMX, AVX512, Build, KernelsUnavailable
from model.kernels.parts import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    KernelAttention,
    KernelFeedForward,
    KernelLikeliest,
    KernelLinear,
    KernelMoE,
    KernelNorm,
    eight_bit_rows,
    library,
)
from model.kv_cache import PagedKVCache
from model.likeliest import Likeliest, torch_likeliest
from model.linear import Linear, Norm, TorchLinear, TorchNorm
from model.moe import Expert, FeedForward, TorchFeedForward, TorchMoE

logger = logging.getLogger(__name__)

Part = TypeVar("Part", Linear, FeedForward)

KERNELS = ("auto", "c", "mixed", "torch")
# Tokens per matrix from which on other products take less time, measured on the feed-forward nets of the demo models.
# oneDNN packs the weights anew at every call; with AMX ours copy them once, which fewer than six tokens do not repay.
MANY_TOKENS = {"avx2": 48, "avx512": 48, "avx512_bf16": 112, "amx": 192}  # for oneDNN, by what ours are compiled for
TILED_TOKENS = 6  # for the kernels with AMX
SIXTEEN_BIT_TOKENS = 9  # from which on to widen eight bits for each tile takes longer than to read sixteen
_EIGHT_BIT_PIECE_BYTES = 16 << 20


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def activations(self) -> torch.dtype: ...

    def place(self, weight: Tensor) -> Tensor:
        """The weight as the parts want it: itself, or a copy on another device or in another dtype."""
        ...

    def placed_bytes(self, weight: Tensor) -> int:
        """Memory that it takes at most once it is placed, copies for some parts included."""
        ...

    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear: ...

    def feed_forward(self, expert: Expert) -> FeedForward: ...

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward: ...

    def attention(
        self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> AttentionBackend: ...

    def likeliest(self) -> Likeliest: ...

    def for_drafts(self) -> Backend:
        """One that is faster where results need not be exact: a drafter's, which are verified."""
        ...


@dataclass(frozen=True, slots=True)
class TorchBackend:
    device: torch.device
    activations: torch.dtype  # and the weights'
    name: str = "torch"

    def place(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.activations)

    def placed_bytes(self, weight: Tensor) -> int:
        return weight.numel() * self.activations.itemsize

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return TorchNorm(weight, eps)

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        return TorchLinear(weights, biases)

    def feed_forward(self, expert: Expert) -> FeedForward:
        return TorchFeedForward(expert)

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward:
        return TorchMoE(experts, router, num_experts_per_token)

    def attention(
        self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> AttentionBackend:
        return TorchAttention(config, cache, head_norms)

    def likeliest(self) -> Likeliest:
        return torch_likeliest

    def for_drafts(self) -> Backend:
        return self


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

    def for_drafts(self) -> Backend:
        return self


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

    def for_drafts(self) -> Backend:
        return EightBitBackend(self._dtype)

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


class EightBitBackend(MixedBackend):
    """Reads copies of the weights in eight bits for the fewest tokens: half the bytes, but more work for each token."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._arena = huge_pages.Arena(_EIGHT_BIT_PIECE_BYTES)

    def placed_bytes(self, weight: Tensor) -> int:
        return super().placed_bytes(weight) + weight.numel()

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        fewest = KernelLinear(self._library, [self._in_eight_bits(weight) for weight in weights], biases)
        return LinearByCount(fewest, super().linear(weights, biases), SIXTEEN_BIT_TOKENS)

    def feed_forward(self, expert: Expert) -> FeedForward:
        fewest = Expert(*(self._in_eight_bits(weight) for weight in (expert.gate, expert.up, expert.down)))
        return FeedForwardByCount(
            KernelFeedForward(self._library, fewest), super().feed_forward(expert), SIXTEEN_BIT_TOKENS
        )

    def _in_eight_bits(self, weight: Tensor) -> Tensor:
        return self._arena.copied(eight_bit_rows(weight))


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


def choose_backend(kernels: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Backend:
    """`kernels` is one of KERNELS: "auto" takes the fastest that can run, and logs why if that is plain torch.

    Raises:
        KernelsUnavailable: "c" or "mixed" was asked for and cannot run here.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type != "cpu"):
        return TorchBackend(device, dtype)
    try:
        _check_kernels_can_run(config, device)
        has_bf16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return MixedBackend(dtype) if kernels == "mixed" or (kernels == "auto" and has_bf16) else KernelBackend(dtype)
    except KernelsUnavailable as error:
        if kernels != "auto":
            raise
        logger.warning("computing with plain torch, which is several times slower: %s", error)
        return TorchBackend(device, dtype)


def _check_kernels_can_run(config: ModelConfig, device: torch.device) -> None:
    if device.type != "cpu":
        raise KernelsUnavailable(f"the model is on {device}")
    if config.head_dim > MAX_HEAD_DIM:
        raise KernelsUnavailable(f"head_dim is {config.head_dim}; at most {MAX_HEAD_DIM} are supported")
    group = config.num_heads // config.num_kv_heads
    if group > MAX_GROUP:
        raise KernelsUnavailable(f"{group} heads share a KV head; at most {MAX_GROUP} are supported")
