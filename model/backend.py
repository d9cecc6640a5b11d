"""Which implementation computes the parts of a transformer: plain torch anywhere, or the C kernels on a CPU that has
at least AVX2.

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
from model.kernel_backend import KernelBackend, MixedBackend
from model.kernels.library import KernelsUnavailable
from model.kernels.parts import MAX_GROUP, MAX_HEAD_DIM
from model.kv_cache import PagedKVCache
from model.likeliest import Likeliest, torch_likeliest
from model.linear import Linear, Norm, TorchLinear, TorchNorm
from model.moe import Expert, FeedForward, TorchFeedForward, TorchMoE

logger = logging.getLogger(__name__)

KERNELS = ("auto", "c", "mixed", "torch")


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
