"""Muon: momentum, made orthogonal, for the matrices of a head (Jordan et al., 2024; scaled as in arXiv 2502.16982).

torch's own does the same but always multiplies in bfloat16, which takes twenty times as long where the CPU has no such
products.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pushes singular values towards 1
_NUM_ITERATIONS = 5
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """`dtype` is what products are computed in. Rates are those of AdamW: updates have the same root mean square."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        learning_rate: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(matrices, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, float]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average: Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalized(gradient.lerp(average, group["momentum"]).to(self._dtype))  # Nesterov's
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """The same singular vectors, with singular values of roughly 0.7 to 1.2: a Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
