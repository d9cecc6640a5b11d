"""Which token a drafter takes where it has logits, so that verification can be exact about it.

Letters: S sequences, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decode.verification import Method
from model.likeliest import Likeliest, torch_likeliest
from model.randomness import Purpose, seed_tensor
from model.sampling import Row, choose, largest, noisy_argmax, processed_scores


class DraftSampling:
    """For a drafter whose logits are those of the token ids `vocabulary` [D], ascending (None: of all)."""

    def __init__(
        self, vocab_size: int, vocabulary: Tensor | None, method: Method, likeliest: Likeliest = torch_likeliest
    ) -> None:
        self.vocabulary = vocabulary
        self._token_ids: Sequence[int] = range(vocab_size) if vocabulary is None else vocabulary.tolist()
        self._likeliest = likeliest
        self._vocab_size = vocab_size
        self._method = method

    def keeps_laws(self, row: Row) -> bool:
        """Whether the drafts of this sequence are drawn at random, so that their laws have to be handed over."""
        return self._method is not Method.COUPLED and not row.sampling.is_greedy

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[int | None], dict[int, Tensor]]:
        """A token for each row from `logits` [S, D], and by row the laws [D] of those that were drawn at random.

        None where the logits are not finite, or the scores made of them: verification can do nothing with them.
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
                are_finite = scores.amax(dim=-1).isfinite().tolist()
                picked = _draw(scores, own)
                parts = scores.softmax(dim=-1)
                parts = parts if self.vocabulary is None else parts[:, self.vocabulary]
                for place, token, law, is_finite in zip(drawn, picked, parts, are_finite, strict=True):
                    tokens[special[place]] = token if is_finite else None
                    if is_finite:
                        laws[special[place]] = law
        return tokens, laws

    def likeliest(self, logits: Tensor, rows: Sequence[Row], count: int) -> list[list[tuple[int, float]] | None]:
        """Of each row of `logits` [S, D] at most `count` tokens, with the logarithm of their chance, the highest first.

        Chances are those of a draw, or of a greedy row's softmax; what cannot be drawn is left out. None where the
        logits are not finite.
        """
        special = [index for index, row in enumerate(rows) if not row.is_plain_greedy]
        scores = logits.to(torch.float32, copy=bool(special))
        if special:
            are_finite = scores[special].amax(dim=-1).isfinite().tolist()  # a maximum carries NaN along
            special = [index for index, is_finite in zip(special, are_finite, strict=True) if is_finite]
        if special:
            wide = processed_scores(self._widened(logits[special]), [rows[index] for index in special])
            scores[special] = wide if self.vocabulary is None else wide[:, self.vocabulary]
        columns, chances = self._likeliest(scores, count)
        found = [self._drafted(*of_row) for of_row in zip(columns.tolist(), chances.tolist(), strict=True)]
        filtered = set(special)  # what may be drawn need not be in the draft vocabulary
        return [tokens if tokens or index in filtered else None for index, tokens in enumerate(found)]

    def _drafted(self, columns: Sequence[int], chances: Sequence[float]) -> list[tuple[int, float]]:
        """None of them where a chance is NaN."""
        pairs = zip(columns, chances, strict=True)
        return [(self._token_ids[column], chance) for column, chance in pairs if chance > -math.inf]

    def _widened(self, logits: Tensor) -> Tensor:
        """[S, D] -> float32 [S, V], with the tokens that cannot be drafted at -infinity."""
        if self.vocabulary is None:
            return logits.float()
        wide = logits.new_full((len(logits), self._vocab_size), -math.inf, dtype=torch.float32)
        wide[:, self.vocabulary] = logits.float()
        return wide


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
