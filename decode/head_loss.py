"""Cross-entropy of a draft head against its target, through output rows that stay as they are.

The wide part, logits over the draft vocabulary, is made a few rows at a time and never kept: its gradient is known as
soon as it is there, since the output rows do not learn. Letters: R slots, K hidden size, V draft vocabulary, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
NUM_LIKELIEST = 16


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """What the target says at each slot: its N likeliest tokens of the draft vocabulary, the likeliest first."""

    token_ids: Tensor  # [R, N], indexes into the draft vocabulary
    shares: Tensor  # [R, N] float32; they sum to 1

    def __getitem__(self, rows: Tensor) -> TargetLaw:
        return TargetLaw(self.token_ids[rows], self.shares[rows])


@torch.no_grad()
def target_law(hidden: Tensor, head: Tensor) -> TargetLaw:
    """Of hidden states [R, K] in front of output rows [V, K]."""
    parts = [(rows @ head.T).float().topk(min(NUM_LIKELIEST, len(head)), dim=-1) for rows in hidden.split(ROWS_AT_ONCE)]
    values, token_ids = (torch.cat(each) for each in zip(*parts, strict=True))
    return TargetLaw(token_ids, values.softmax(dim=-1))


def head_loss(hidden: Tensor, head: Tensor, law: TargetLaw) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, and the likeliest token of each slot [R]."""
    apply: Callable[..., tuple[Tensor, Tensor]] = getattr(_HeadLoss, "apply")  # noqa: B009 - torch leaves it untyped
    loss, likeliest = apply(hidden, head, law.token_ids, law.shares)
    return loss, likeliest


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, token_ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        likeliest = torch.empty(len(hidden), dtype=torch.int64)
        total = torch.zeros(())
        for start in range(0, len(hidden), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = (hidden[part].to(head.dtype) @ head.T).float()
            highest, likeliest[part] = logits.max(dim=-1)
            wanted = (logits.gather(1, token_ids[part]) * shares[part]).sum(dim=-1)
            powers = logits.sub_(highest[:, None]).exp_()
            sums = powers.sum(dim=-1)
            total += (highest + sums.log() - wanted).sum()
            powers /= sums[:, None]
            powers.scatter_add_(1, token_ids[part], -shares[part])
            gradient[part] = (powers.to(head.dtype) @ head).to(gradient.dtype)
        ctx.save_for_backward(gradient.div_(max(1, len(hidden))))
        ctx.mark_non_differentiable(likeliest)
        return total / max(1, len(hidden)), likeliest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None
