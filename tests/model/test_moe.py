"""Routing and mixing against a loop over tokens that is as plain as the definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.moe import Expert, TorchFeedForward, TorchMoE, route


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPERTS = [
    Expert(random(7, 4, seed=3 * i), random(7, 4, seed=3 * i + 1), random(4, 7, seed=3 * i + 2)) for i in range(6)
]
ROUTER = random(6, 4, seed=99)


def by_hand(token: Tensor, expert: Expert) -> Tensor:
    gate = expert.gate @ token
    return expert.down @ (gate / (1 + torch.exp(-gate)) * (expert.up @ token))


def test_route_takes_the_likeliest_and_shares_sum_to_one() -> None:
    shares, chosen = route(random(20, 4, seed=1), ROUTER, 3)
    probabilities = F.softmax(random(20, 4, seed=1) @ ROUTER.T, dim=-1)
    for row in range(20):
        best = sorted(range(6), key=lambda expert: -float(probabilities[row, expert]))[:3]
        assert chosen[row].tolist() == best
        total = sum(float(probabilities[row, expert]) for expert in best)
        expected = torch.tensor([float(probabilities[row, expert]) / total for expert in best])
        torch.testing.assert_close(shares[row].float(), expected)


def test_mixture_adds_what_the_experts_of_each_token_give() -> None:
    x, before = random(20, 4, seed=1), random(20, 4, seed=2)
    shares, chosen = route(x, ROUTER, 2)
    total = before.clone()
    load = TorchMoE(EXPERTS, ROUTER, 2)(x, add_to=total)
    assert load is not None
    for row in range(20):
        parts = [float(shares[row, i]) * by_hand(x[row], EXPERTS[int(chosen[row, i])]) for i in range(2)]
        torch.testing.assert_close(total[row], before[row] + parts[0] + parts[1], atol=1e-5, rtol=1e-5)
    assert load.tolist() == [int((chosen == expert).sum()) for expert in range(6)]


def test_dense_net_adds_and_has_no_load() -> None:
    x, total = random(3, 4, seed=1), torch.zeros(3, 4, dtype=torch.float64)
    assert TorchFeedForward(EXPERTS[0])(x, add_to=total) is None
    torch.testing.assert_close(total, torch.stack([by_hand(token, EXPERTS[0]) for token in x]))
