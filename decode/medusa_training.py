"""Medusa heads as they learn: head i guesses the token i + 1 places after the one that the model's own head says next.

Each is a residual block in front of the target's own output rows (Cai et al., Medusa, arXiv 2401.10774).
Letters: B sequences, T tokens, K hidden size, V draft vocabulary, M heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode.eagle_training import Batch, shifted
from decode.head_loss import head_loss, target_law


class MedusaModule(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        linears = [nn.Linear(hidden_size, hidden_size) for _ in range(num_heads)]
        for linear in linears:
            nn.init.zeros_(linear.weight)  # each starts as the target's own head
            nn.init.zeros_(linear.bias)
        self.heads = nn.ModuleList(linears)

    def hidden(self, number: int, hidden: Tensor) -> Tensor:
        """What the output rows read for guess `number`: [..., K] -> [..., K]."""
        return hidden + F.silu(self.heads[number](hidden))


def medusa_losses(
    module: MedusaModule, batch: Batch, head: Tensor, in_draft: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Per head: mean cross-entropy against the target's distribution at the place it guesses, and acceptance.

    As for EAGLE, acceptance of head i is the share of slots where it and all heads before it agree with the target.
    """
    losses, accepted = [], []
    agrees = torch.ones_like(batch.learns)
    for number in range(len(module.heads)):
        ahead = number + 1  # head i at slot p guesses what the target says at slot p + i + 1
        rows = batch.learns & earlier(batch.learns, ahead)
        law = target_law(earlier(batch.hidden, ahead)[rows], head)
        loss, likeliest = head_loss(module.hidden(number, batch.hidden)[rows], head, law)
        losses.append(loss)
        can_be_drafted = in_draft[earlier(batch.token_ids, ahead + 1)[rows]] >= 0
        before = agrees
        agrees = torch.zeros_like(batch.learns)
        agrees[rows] = (likeliest == law.token_ids[:, 0]) & can_be_drafted & before[rows]
        accepted.append(agrees[rows].float().mean())
    return losses, accepted


def earlier(x: Tensor, count: int) -> Tensor:
    """Moved `count` tokens earlier along dimension 1; zeros come last."""
    return shifted(x.flip(1), count).flip(1)
