"""Muon against torch's own, whose products are in bfloat16, and against a singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decode.muon import Muon, orthogonalized

pytestmark = pytest.mark.usefixtures("one_thread")


def after_steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, target: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        parameter.grad = parameter.detach() - target
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(6, 14), (14, 6), (8, 8)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-6), (torch.float32, 0.02)])
def test_steps_are_torchs(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    start, target = torch.randn(shape), torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    found = after_steps(Muon([ours], 0.1, weight_decay=0.05, dtype=dtype), ours, target)
    torchs = torch.optim.Muon([theirs], 0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    wanted = after_steps(torchs, theirs, target)
    assert not torch.allclose(found, start, atol=0.05)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


def test_orthogonalized_keeps_singular_vectors() -> None:
    torch.manual_seed(2)
    matrix = torch.randn(5, 9)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    singular = u.T @ orthogonalized(matrix) @ v.T
    torch.testing.assert_close(singular, singular.diagonal().diag(), atol=1e-4, rtol=0)
    assert ((singular.diagonal() > 0.6) & (singular.diagonal() < 1.3)).all()
