"""Matrix products with the weights of a checkpoint, and the norm before them: the seam, and its plain torch form.

Letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """One or more matrices that share their input; outputs lie side by side."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """[T, K] -> [T, N]. With `add_to` [T, N] the result is added to it in place, and it is returned."""
        ...


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, K]"""
        ...


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weights: Sequence[Tensor]  # each [N_i, K]
    biases: Sequence[Tensor | None]  # each [N_i]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """Root mean square norm, its statistics in float32 whatever the activations are."""

    weight: Tensor  # [K]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
