"""Which token a drafter takes where it has logits, so that verification can be exact about it.

Letters: S sequences, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decode.verification import Method
from model.randomness import Purpose, seed_tensor
from model.sampling import Row, choose, largest, noisy_argmax, processed_scores


class DraftSampling:
    """For a drafter whose logits are those of the token ids `vocabulary` [D], ascending (None: of all)."""

    def __init__(self, vocab_size: int, vocabulary: Tensor | None, method: Method) -> None:
        self.vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._method = method

    def keeps_laws(self, row: Row) -> bool:
        """Whether the drafts of this sequence are drawn at random, so that their laws have to be handed over."""
        return self._method is not Method.COUPLED and not row.sampling.is_greedy

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[int | None], dict[int, Tensor]]:
        """A token for each row from `logits` [S, D], and by row the laws [D] of those that were drawn at random.

        None where the logits are not finite: neither the filters nor verification can do anything with them.
        """
        highest, chosen = largest(logits)
        chosen = chosen if self.vocabulary is None else self.vocabulary[chosen]
        likeliest = chosen.where(highest.isfinite(), -1).tolist()  # a maximum carries NaN along
        tokens: list[int | None] = [None if token < 0 else token for token in likeliest]
        special = [index for index, row in enumerate(rows) if not row.is_plain_greedy and tokens[index] is not None]
        laws: dict[int, Tensor] = {}
        if special:
            wide = self._widened(logits[special])
            drawn = [place for place, index in enumerate(special) if self.keeps_laws(rows[index])]
            compared = [place for place, index in enumerate(special) if not self.keeps_laws(rows[index])]
            if compared:
                as_plain = choose(wide[compared], [rows[special[place]] for place in compared])
                for place, token in zip(compared, as_plain.tolist(), strict=True):
                    tokens[special[place]] = token
            if drawn:
                own = [rows[special[place]] for place in drawn]
                scores = processed_scores(wide[drawn], own)
                picked = _draw(scores, own)
                parts = scores.softmax(dim=-1)
                parts = parts if self.vocabulary is None else parts[:, self.vocabulary]
                for place, token, law in zip(drawn, picked, parts, strict=True):
                    tokens[special[place]] = token
                    laws[special[place]] = law
        return tokens, laws

    def likeliest(self, logits: Tensor, rows: Sequence[Row], count: int) -> list[list[tuple[int, float]] | None]:
        """Of each row of `logits` [S, D] at most `count` tokens, with the logarithm of their chance, the highest first.

        Chances are those of a draw, or of a greedy row's softmax; what cannot be drawn is left out. None where the
        logits are not finite.
        """
        is_finite = logits.amax(dim=-1).isfinite().tolist()  # a maximum carries NaN along
        special = [index for index, row in enumerate(rows) if not row.is_plain_greedy and is_finite[index]]
        scores = logits.to(torch.float32, copy=bool(special))
        if special:
            wide = processed_scores(self._widened(logits[special]), [rows[index] for index in special])
            scores[special] = wide if self.vocabulary is None else wide[:, self.vocabulary]
        highest, columns = scores.topk(min(count, scores.shape[1]))
        chances = (highest - log_sum_exp(scores, highest[:, :1])).tolist()
        tokens = (columns if self.vocabulary is None else self.vocabulary[columns]).tolist()
        return [
            [pair for pair in zip(*of_row, strict=True) if pair[1] > -math.inf] if finite else None
            for finite, *of_row in zip(is_finite, tokens, chances, strict=True)
        ]

    def _widened(self, logits: Tensor) -> Tensor:
        """[S, D] -> float32 [S, V], with the tokens that cannot be drafted at -infinity."""
        if self.vocabulary is None:
            return logits.float()
        wide = logits.new_full((len(logits), self._vocab_size), -math.inf, dtype=torch.float32)
        wide[:, self.vocabulary] = logits.float()
        return wide


def log_sum_exp(scores: Tensor, highest: Tensor) -> Tensor:
    """Of each row of `scores` [R, D] with its maximum `highest` [R, 1]: [R, 1]. Where that is not finite it is NaN.

    On a CPU numpy takes a third of torch's time for a few rows.
    """
    if scores.device.type != "cpu":
        return scores.logsumexp(dim=-1, keepdim=True)
    with np.errstate(invalid="ignore"):
        sums = np.exp(scores.numpy() - highest.numpy()).sum(axis=1, keepdims=True)
    return highest + torch.from_numpy(np.log(sums))


def _draw(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """By noise that belongs to where the draft begins and to the place in it: each step draws anew."""
    tokens = torch.empty(len(rows), dtype=torch.int64)
    by_place: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_place.setdefault(len(row.drafted), []).append(index)
    for place, indexes in by_place.items():
        seeds = seed_tensor([rows[index].sampling.seed for index in indexes], scores.device)
        begins = torch.tensor([len(rows[index].history) for index in indexes], device=scores.device)
        part = scores if len(indexes) == len(rows) else scores[indexes]
        tokens[indexes] = noisy_argmax(part, seeds, begins, Purpose.DRAFT, place * scores.shape[1]).cpu()
    picked: list[int] = tokens.tolist()
    return picked
