"""Which implementation computes the parts of a transformer: plain torch on any device, or the AVX2 kernels on a CPU.

A backend makes parts out of weights; the transformer puts them together and knows no backend by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.attention import AttentionBackend, HeadNorms, TorchAttention
from model.config import ModelConfig
from model.kv_cache import PagedKVCache
from model.linear import Linear, Norm, TorchLinear, TorchNorm
from model.moe import Expert, FeedForward, TorchFeedForward, TorchMoE


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def activations(self) -> torch.dtype: ...

    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear: ...

    def feed_forward(self, expert: Expert) -> FeedForward: ...

    def mixture(self, experts: Sequence[Expert], router: Tensor, num_experts_per_token: int) -> FeedForward: ...

    def attention(
        self, config: ModelConfig, cache: PagedKVCache, head_norms: Sequence[HeadNorms | None]
    ) -> AttentionBackend: ...


@dataclass(frozen=True, slots=True)
class TorchBackend:
    activations: torch.dtype  # those of the weights too
    name: str = "torch"

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
