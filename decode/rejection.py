"""How much of a randomly drawn draft stands, so that what is emitted keeps the target's law. Chains only.

For draft i of K: p_i is the target's law behind the drafts before it, q_i the drafter's, u_i a uniform number. Once
the drafts that stand are known, one token more is drawn from what the drafter left of the target's law: max(w p - q, 0)
if there is a draft behind them, else p. Letters: R rows, K drafts, V vocabulary, D the drafter's, K + 1 rows a draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft


@dataclass(frozen=True, slots=True)
class Decision:
    num_accepted: int
    weight: float = 1.0  # w


def token_decisions(laws: Tensor, drafts: Sequence[Draft], noise: Sequence[Sequence[float]]) -> list[Decision]:
    """One draft at a time, up to the first that falls: Leviathan et al., ICML 2023, arXiv:2211.17192.

    `laws` [R, V] are the p of all drafts in turn, `noise[b][i]` is u_i of draft b.
    """
    decisions = []
    for ratios, draws in zip(_ratios(laws, drafts), noise, strict=True):
        stands = [draw < chance for draw, chance in zip(draws, token_chances(ratios), strict=False)]
        decisions.append(Decision(stands.index(False) if False in stands else len(stands)))
    return decisions


def token_chances(ratios: Sequence[float]) -> list[float]:
    """Of each draft, from p_i(x_i) / q_i(x_i)."""
    return [min(ratio, 1) for ratio in ratios]


def block_decisions(laws: Tensor, drafts: Sequence[Draft], noise: Sequence[Sequence[float]]) -> list[Decision]:
    """The longest prefix that stands as a whole: Sun et al., ICLR 2025, arXiv:2403.10444. Arguments as above.

    On average at least as long as by tokens: a prefix may stand although one in it would have fallen.
    """
    weights = [prefix_weights(ratios) for ratios in _ratios(laws, drafts)]
    surpluses = iter(_surpluses(laws, drafts, weights))
    decisions = []
    for draft_weights, draws in zip(weights, noise, strict=True):
        num_drafts = len(draft_weights) - 1
        chances = block_chances(draft_weights, list(itertools.islice(surpluses, num_drafts - 1)))
        stands = (count for count in range(num_drafts, 0, -1) if draws[count - 1] < chances[count - 1])
        num_accepted = next(stands, 0)
        decisions.append(Decision(num_accepted, draft_weights[num_accepted]))
    return decisions


def prefix_weights(ratios: Sequence[float]) -> list[float]:
    """w of every prefix, [K + 1]: 1 for the empty one, then min(1, w p_i(x_i) / q_i(x_i))."""
    weights: list[float] = [1]
    for ratio in ratios:
        weights.append(min(weights[-1] * ratio, 1))
    return weights


def block_chances(weights: Sequence[float], surpluses: Sequence[float]) -> list[float]:
    """Of the prefixes of length 1 to K. `surpluses`: sum of max(w p - q, 0) behind each but the longest, [K - 1]."""
    chances = []
    for weight, surplus in zip(weights[1:-1], surpluses, strict=True):
        room = surplus + 1 - weight
        chances.append(1 if room <= 0 else surplus / room)  # 0: the next draft stands for certain. NaN: none does
    return [*chances, weights[-1]]


def leftover(laws: Tensor, draft: Draft, decision: Decision) -> Tensor:
    """What the last token is drawn from [V], not normalised. `laws` [K + 1, V] are this draft's."""
    law = laws[decision.num_accepted]
    if decision.num_accepted == len(draft.token_ids):
        return law
    assert draft.probabilities is not None
    left = _excess(law, draft.probabilities[decision.num_accepted], decision.weight, draft.vocabulary)
    return torch.where(left.sum() > 0, left, law)  # nothing left: p and q are equal but for rounding


def _ratios(laws: Tensor, drafts: Sequence[Draft]) -> list[list[float]]:
    """p_i(x_i) / q_i(x_i) by draft; 0 for a token that the drafter says it cannot have drawn."""
    first_rows = itertools.accumulate((draft.num_rows for draft in drafts[:-1]), initial=0)
    rows = [first + i for draft, first in zip(drafts, first_rows, strict=True) for i in range(len(draft.token_ids))]
    token_ids = torch.tensor([token for draft in drafts for token in draft.token_ids], device=laws.device)
    target = laws[torch.tensor(rows, device=laws.device), token_ids].tolist()
    lengths = [len(draft.token_ids) for draft in drafts]
    drafter = torch.cat([_chosen(*pair) for pair in zip(drafts, token_ids.split(lengths), strict=True)]).tolist()
    ratios = iter([p / q if q > 0 else 0.0 for p, q in zip(target, drafter, strict=True)])
    return [list(itertools.islice(ratios, length)) for length in lengths]


def _chosen(draft: Draft, token_ids: Tensor) -> Tensor:
    """q_i(x_i) [K]."""
    assert draft.probabilities is not None
    columns = token_ids if draft.vocabulary is None else torch.searchsorted(draft.vocabulary, token_ids)
    return draft.probabilities.gather(1, columns.unsqueeze(1)).squeeze(1)


def _surpluses(laws: Tensor, drafts: Sequence[Draft], weights: Sequence[Sequence[float]]) -> list[float]:
    """Behind every prefix that is neither empty nor whole, those of all drafts in turn."""
    parts = []
    for law, draft, weight in zip(laws.split([draft.num_rows for draft in drafts]), drafts, weights, strict=True):
        if len(weight) > 2:
            assert draft.probabilities is not None
            column = torch.tensor(weight[1:-1], dtype=laws.dtype, device=laws.device).unsqueeze(1)
            parts.append(_excess(law[1:-1], draft.probabilities[1:], column, draft.vocabulary).sum(dim=-1))
    return torch.cat(parts).tolist() if parts else []


def _excess(law: Tensor, probabilities: Tensor, weight: Tensor | float, vocabulary: Tensor | None) -> Tensor:
    """max(w p - q, 0) [..., V] of p [..., V] and q [..., D]. In place but for one copy."""
    excess = law * weight
    if vocabulary is None:
        excess -= probabilities
    else:
        excess.index_add_(-1, vocabulary, probabilities, alpha=-1)
    return excess.clamp_(min=0)
