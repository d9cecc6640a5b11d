"""Which implementation computes the parts of a transformer: plain torch on any device, or the C kernels on a CPU with AVX2.

A backend makes parts out of weights; the transformer puts them together and knows no backend by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.attention import AttentionBackend, HeadNorms, TorchAttention
from model.config import ModelConfig
from model.kernels.library import KernelsUnavailable
from model.kernels.parts import (
    MAX_GROUP,
    MAX_HEAD_DIM,
    KernelAttention,
    KernelFeedForward,
    KernelLinear,
    KernelMoE,
    KernelNorm,
    library,
)
from model.kv_cache import PagedKVCache
from model.linear import Linear, Norm, TorchLinear, TorchNorm
from model.moe import Expert, FeedForward, TorchFeedForward, TorchMoE

logger = logging.getLogger(__name__)

KERNELS = ("auto", "avx2", "torch")


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def activations(self) -> torch.dtype: ...

    def place(self, weight: Tensor) -> Tensor:
        """The weight as the parts want it: itself, or a copy on another device or in another dtype."""
        ...

    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear: ...

    def feed_forward(self, expert: Expert) -> FeedForward: ...

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward: ...

    def attention(
        self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> AttentionBackend: ...


@dataclass(frozen=True, slots=True)
class TorchBackend:
    device: torch.device
    activations: torch.dtype  # and the weights'
    name: str = "torch"

    def place(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.activations)

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


class KernelBackend:
    """Float32 activations. Weights stay in place; only a narrower dtype than float32 that differs from theirs rounds them."""

    name = "avx2"
    activations = torch.float32

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._library = library()

    def place(self, weight: Tensor) -> Tensor:
        return weight if self._dtype == torch.float32 else weight.to(self._dtype)

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


def choose_backend(kernels: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Backend:
    """`kernels` is one of KERNELS: "auto" takes the C kernels where they can run, and logs why where they cannot.

    Raises:
        KernelsUnavailable: "avx2" was asked for and cannot run here.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type != "cpu"):
        return TorchBackend(device, dtype)
    try:
        if device.type != "cpu":
            raise KernelsUnavailable(f"the model is on {device}")
        if config.head_dim > MAX_HEAD_DIM or config.num_heads // config.num_kv_heads > MAX_GROUP:
            raise KernelsUnavailable(f"heads are larger than {MAX_HEAD_DIM}, or more than {MAX_GROUP} share a KV head")
        return KernelBackend(dtype)
    except KernelsUnavailable as error:
        if kernels == "avx2":
            raise
        logger.warning("computing with plain torch, which is several times slower: %s", error)
        return TorchBackend(device, dtype)
