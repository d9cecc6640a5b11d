"""Ways to ask for a token, one for each thing the sampler can do, and rows of logits to ask them of."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from model.sampling import Row
from model.sampling_params import SamplingParams

VOCAB = 300
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=100)

FILTERS = {
    "nothing": SAMPLED,
    "cold": replace(SAMPLED, temperature=0.3),
    "hot": replace(SAMPLED, temperature=2.5),
    "top_k": replace(SAMPLED, top_k=7),
    "top_k of one": replace(SAMPLED, top_k=1),
    "top_k beyond the vocabulary": replace(SAMPLED, top_k=10 * VOCAB),
    "top_p": replace(SAMPLED, top_p=0.8),
    "top_p of nearly nothing": replace(SAMPLED, top_p=1e-6),
    "top_p of nearly all": replace(SAMPLED, top_p=0.9999, temperature=3.0),
    "min_p": replace(SAMPLED, min_p=0.05),
    "min_p of one": replace(SAMPLED, min_p=1.0),
    "repetition": replace(SAMPLED, repetition_penalty=1.7),
    "presence": replace(SAMPLED, presence_penalty=1.5),
    "frequency": replace(SAMPLED, frequency_penalty=-0.8),
    "bias": replace(SAMPLED, logit_bias=((1, 3.5), (7, -100.0), (VOCAB - 1, 2.0), (VOCAB + 5, 9.0))),
    "min_tokens": replace(SAMPLED, min_tokens=50, stop_token_ids=(2, 3, 4)),
    "all": SamplingParams(
        max_tokens=100,
        min_tokens=50,
        temperature=0.9,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        stop_token_ids=(2, 3, 4),
        logit_bias=((3, 1.5), (9, -2.0), (11, 4.0)),
    ),
}


def row(sampling: SamplingParams, history: list[int] | None = None, num_prompt_tokens: int = 1) -> Row:
    return Row([1] if history is None else history, num_prompt_tokens, sampling)


def mixed_rows(num_rows: int) -> list[Row]:
    """Of every kind, each with a seed of its own."""
    kinds = [*FILTERS.values(), GREEDY, replace(GREEDY, repetition_penalty=2.0)]
    kinds += [replace(GREEDY, logit_bias=((5, 2.0), (8, -3.0))), replace(SAMPLED, num_logprobs=3)]
    return [
        row(replace(kinds[index % len(kinds)], seed=index), [index, 3, 5, 8], num_prompt_tokens=2)
        for index in range(num_rows)
    ]


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
