"""The feed-forward net: SwiGLU, alone or as a mixture of experts of which every token uses a few. Seam and torch form.

Letters: T tokens, K hidden size, I intermediate size, E experts, P = T * experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Expert:
    gate: Tensor  # [I, K]
    up: Tensor  # [I, K]
    down: Tensor  # [K, I]


class FeedForward(Protocol):
    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        """[T, K] -> added in place to `add_to` [T, K]. Returns how many tokens each expert got, [E]; None if dense."""
        ...


@dataclass(frozen=True, slots=True)
class TorchFeedForward:
    expert: Expert

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        add_to.add_(_swiglu(x, self.expert))
        return None


@dataclass(frozen=True, slots=True)
class TorchMoE:
    experts: Sequence[Expert]
    router: Tensor  # [E, K]
    num_experts_per_token: int

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor | None:
        weights, chosen = route(x, self.router, self.num_experts_per_token)
        load = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        order = chosen.flatten().argsort(stable=True)  # [P], by expert
        tokens = order // self.num_experts_per_token
        shares = weights.flatten()[order, None]  # [P, 1]
        first = 0
        for expert, count in zip(self.experts, load.tolist(), strict=True):
            if count:
                rows = slice(first, first + count)
                y = _swiglu(x[tokens[rows]], expert) * shares[rows]
                add_to.index_add_(0, tokens[rows], y.to(add_to.dtype))
            first += count
        return load


def route(x: Tensor, router: Tensor, num_experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Shares (they sum to 1) and ids of the most likely experts of each token, both [T, experts per token]."""
    probabilities = F.linear(x, router).float().softmax(dim=-1)
    shares, chosen = probabilities.topk(num_experts_per_token, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True), chosen


def _swiglu(x: Tensor, expert: Expert) -> Tensor:
    return F.linear(F.silu(F.linear(x, expert.gate)) * F.linear(x, expert.up), expert.down)
