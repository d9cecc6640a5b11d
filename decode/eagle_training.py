"""An EAGLE-3 head as it learns: one decoder layer on the target's hidden states, unrolled as it will be used.

The slot of a token x_p sees x_p and the target's features of the token before it, and predicts x_{p+1}. While drafting,
features of drafted tokens do not exist: the layer's own output stands in for them. So training runs the layer several
times over, each pass on the outputs of the one before ("training-time test", Li et al., EAGLE-3, arXiv 2503.01840).

Letters: B sequences, T tokens, K hidden size, F features, V draft vocabulary, Q query heads, H KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode.head_loss import head_loss, target_law
from model.config import ModelConfig
from model.linear import rms_norm
from model.transformer import inverse_frequencies


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


class EagleAttention(nn.Module):
    """Reads embedding and hidden state side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.q_proj = nn.Linear(2 * size, inner, bias=False)
        self.k_proj = nn.Linear(2 * size, kv, bias=False)
        self.v_proj = nn.Linear(2 * size, kv, bias=False)
        self.o_proj = nn.Linear(inner, size, bias=False)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)

    def forward(self, joined: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Pass j sees pass 0 up to j tokens before its own, then what later passes left for the tokens between."""
        num_tokens, group = joined.shape[1], self.config.num_heads // self.config.num_kv_heads
        queries = self._rotate(self._heads(self.q_proj(joined)))  # [B, Q, T, D]
        keys = self._rotate(self._heads(self.k_proj(joined))).repeat_interleave(group, dim=1)
        values = self._heads(self.v_proj(joined)).repeat_interleave(group, dim=1)
        earlier.append((keys, values))
        later_passes = range(1, len(earlier))
        first_keys, first_values = earlier[0]
        slots = torch.arange(num_tokens, device=joined.device)
        unseen = slots[None, :] > slots[:, None] - (len(earlier) - 1)  # [T, T], of pass 0
        scores = (queries @ first_keys.transpose(2, 3)).float()
        scores = scores.masked_fill(unseen, torch.finfo(torch.float32).min)
        own = []
        for number in later_passes:
            moved = shifted(earlier[number][0], len(earlier) - 1 - number, dim=2)
            own.append((queries * moved).sum(-1, dtype=torch.float32))
        if own:
            scores = torch.cat((scores, torch.stack(own, dim=-1)), dim=-1)
        shares = (scores * self.config.head_dim**-0.5).softmax(dim=-1).to(values.dtype)
        mixed = shares[..., :num_tokens] @ first_values
        for number in later_passes:
            moved = shifted(earlier[number][1], len(earlier) - 1 - number, dim=2)
            mixed = mixed + shares[..., num_tokens + number - 1, None] * moved
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _rotate(self, heads: Tensor) -> Tensor:
        angles = torch.arange(heads.shape[2], device=heads.device)[:, None] * self.frequencies
        cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        real, imaginary = heads.chunk(2, dim=-1)
        return torch.cat((real * cosines - imaginary * sines, imaginary * cosines + real * sines), dim=-1)


class EagleMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class EagleLayer(nn.Module):
    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn = EagleAttention(config)
        self.mlp = EagleMLP(size, intermediate_size)

    def forward(self, embedded: Tensor, hidden: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One pass: [B, T, K] twice -> output [B, T, K], before the norm. Appends its keys and values to `earlier`."""
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        attended: Tensor = hidden + self.self_attn(joined, earlier)
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return output


class EagleModule(nn.Module):
    """Parameters have the names of EAGLE-3 checkpoints."""

    def __init__(self, config: ModelConfig, num_taps: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config, intermediate_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def start(self, features: Tensor) -> Tensor:
        """Features [B, T, F] of all tokens -> hidden input [B, T, K] of the first pass: those of the token before."""
        hidden: Tensor = self.fc(features)
        return shifted(hidden)


def shifted(x: Tensor, count: int = 1, dim: int = 1) -> Tensor:
    """Moved `count` tokens later; zeros come first."""
    if count == 0:
        return x
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, count)), x.narrow(dim, 0, x.shape[dim] - count)), dim=dim)


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [B, T], padded with 0
    features: Tensor  # [B, T, F]
    hidden: Tensor  # [B, T, K] of the target
    learns: Tensor  # [B, T] bool: slots whose next token the target wrote


def eagle_losses(
    module: EagleModule, batch: Batch, embedding: Tensor, head: Tensor, in_draft: Tensor, passes: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Per pass: mean cross-entropy against the target's distribution over the draft vocabulary, and acceptance.

    `head` [V, K] are the target's rows of the draft vocabulary, `in_draft` maps token ids to indexes in it, -1 if
    they are not. Acceptance of pass j is the share of slots where it and all passes before it agree with the target.
    """
    embedded = F.embedding(batch.token_ids, embedding)
    hidden = module.start(batch.features)
    earlier: list[tuple[Tensor, Tensor]] = []
    law = target_law(batch.hidden[batch.learns], head)
    can_be_drafted = in_draft[batch.token_ids.roll(-1, dims=1)] >= 0
    slots = torch.arange(batch.learns.shape[1]).expand_as(batch.learns)
    losses, accepted = [], []
    agrees = torch.ones_like(batch.learns)
    for number in range(passes):
        output = module.midlayer(embedded, hidden, earlier)
        rows = batch.learns & (slots >= number)
        own_law = law[rows[batch.learns]]
        loss, likeliest = head_loss(module.norm(output[rows]), head, own_law)
        losses.append(loss)
        # A draft of pass j at slot p goes on from pass j - 1 at slot p - 1.
        before = shifted(agrees) if number else agrees
        agrees = torch.zeros_like(batch.learns)
        agrees[rows] = (likeliest == own_law.token_ids[:, 0]) & can_be_drafted[rows] & before[rows]
        accepted.append(agrees[rows].float().mean())
        hidden = shifted(output)
    return losses, accepted
