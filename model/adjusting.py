"""What a request does to its logits before a token is chosen: biases, penalties, min_tokens, its grammar. In place.

Letters: R rows, V vocabulary, N tokens of all rows' texts, each once a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model.sampling_params import SamplingParams
from model.text_counts import CountedText, Counts

if TYPE_CHECKING:
    from model.grammar import Matcher
    from model.sampling import Row


def adjust(scores: Tensor, rows: Sequence[Row]) -> None:
    """Scores [R, V], float32."""
    biased = [index for index, row in enumerate(rows) if row.sampling.logit_bias]
    if biased:
        _bias(scores, biased, [rows[index].sampling for index in biased])
    penalised = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if penalised:
        _penalise(scores, penalised, [rows[index] for index in penalised])
    for index, row in enumerate(rows):
        if row.must_go_on:
            scores[index, [token for token in row.sampling.stop_token_ids if token < scores.shape[1]]] = -math.inf
        if row.matcher is not None:
            _forbid(scores[index], row, row.matcher)


def _forbid(scores: Tensor, row: Row, matcher: Matcher) -> None:
    """What the grammar does not allow, in place; scores [V]."""
    output = [*row.history[row.num_prompt_tokens :], *row.drafted]
    allowed = matcher.allowed(output, len(output) - len(row.drafted), len(scores))
    if allowed is not None:
        scores.masked_fill_(~torch.from_numpy(allowed).to(scores.device), -math.inf)


def _bias(scores: Tensor, indexes: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Of all rows at once. What a model has no logit for is left out."""
    triples = [
        (index, token_id, bias)
        for index, of_row in zip(indexes, params, strict=True)
        for token_id, bias in of_row.logit_bias
        if token_id < scores.shape[1]
    ]
    if triples:
        rows, token_ids, biases = zip(*triples, strict=True)
        places = torch.tensor([rows, token_ids], device=scores.device)
        scores[places[0], places[1]] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)


def _penalise(scores: Tensor, indexes: Sequence[int], rows: Sequence[Row]) -> None:
    """Scores [R, V]: repetition over prompt and output, as Hugging Face; presence and frequency over output, as OpenAI.

    All rows at once, each token of a row's text once: their number is N.
    """
    texts = _counts(rows)
    lens = [len(token_ids) for token_ids, _ in texts]

    def spread(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:  # [R] -> [N]
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(lens)).to(scores.device)

    params = [row.sampling for row in rows]
    places = (
        spread(indexes, torch.int64),
        torch.from_numpy(np.concatenate([token_ids for token_ids, _ in texts])).to(scores.device),
    )
    repetition = spread([p.repetition_penalty for p in params], torch.float32)
    before = scores[places]
    after = torch.where(before < 0, before * repetition, before / repetition)
    after.nan_to_num_(-math.inf, torch.finfo(after.dtype).max, -math.inf)  # a tiny penalty overflows
    counts = torch.from_numpy(np.concatenate([counts for _, counts in texts])).to(scores.device)
    frequency = spread([p.frequency_penalty for p in params], torch.float32)
    presence = spread([p.presence_penalty for p in params], torch.float32)
    after -= frequency * counts + presence * (counts > 0)
    scores[places] = after


def _counts(rows: Sequence[Row]) -> list[Counts]:
    """Of each row. Those of a draft share their history: it is counted once."""
    known: dict[tuple[int, int], CountedText] = {}
    found = []
    for row in rows:
        key = id(row.history), row.num_prompt_tokens
        if key not in known:
            known[key] = CountedText.of(row.history, row.num_prompt_tokens)
        found.append(known[key].with_output(row.drafted))
    return found
