"""A world of a few tokens: a model whose logits depend on the last two, a drafter like it, and the loop over both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft
from decode.verification import Method, Verdict, verify
from model.randomness import Purpose, seed_tensor
from model.runner import Chunk, SampledToken
from model.sampling import Row, noisy_argmax, processed_scores, sample
from model.sampling_params import SamplingParams

PROMPT = (1, 0, 2)
Drafter = Callable[[Sequence[Chunk]], list[Draft]]


@dataclass(frozen=True)
class Markov:
    table: Tensor  # [V, V, V]: logits behind the last two tokens

    @classmethod
    def random(cls, vocab: int, seed: int, spread: float = 1.5) -> Markov:
        return cls(torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread)

    def like(self, other: Markov, share: float) -> Markov:
        return Markov(self.table * share + other.table * (1 - share))

    def logits(self, histories: Sequence[Sequence[int]]) -> Tensor:
        last = torch.tensor([history[-2:] for history in histories])
        return self.table[last[:, 0], last[:, 1]]

    def rows(self, chunks: Sequence[Chunk], drafts: Sequence[Draft]) -> Tensor:
        pairs = zip(chunks, drafts, strict=True)
        return self.logits([(*chunk.history, *path) for chunk, draft in pairs for path in draft.paths()])


def chunk_of(history: Sequence[int], sampling: SamplingParams) -> Chunk:
    return Chunk(history[-1:], len(history) - 1, (0,), sampling, history, len(PROMPT))


def random_drafter(
    model: Markov, method: Method, length_of: Callable[[Chunk], int], vocabulary: Tensor | None = None
) -> Drafter:
    """Draws from its own law after the request's processing, as drafters do: with DRAFT noise, or the target's own."""

    def drafter(chunks: Sequence[Chunk]) -> list[Draft]:
        lengths = [length_of(chunk) for chunk in chunks]
        drafted: list[tuple[int, ...]] = [()] * len(chunks)
        laws: list[Tensor] = []
        seeds = seed_tensor([Row.behind(chunk).sampling.seed for chunk in chunks])
        begin = torch.tensor([len(chunk.history) for chunk in chunks])
        for i in range(max(lengths)):
            logits = model.logits([(*chunk.history, *path) for chunk, path in zip(chunks, drafted, strict=True)])
            if vocabulary is not None:
                unknown = torch.ones(logits.shape[1], dtype=torch.bool).index_fill_(0, vocabulary, False)
                logits = logits.masked_fill(unknown, -math.inf)
            rows = [Row.behind(chunk, path) for chunk, path in zip(chunks, drafted, strict=True)]
            scores = processed_scores(logits, rows)
            if method is Method.COUPLED:
                tokens = noisy_argmax(scores, seeds, begin + i)
            else:
                tokens = noisy_argmax(scores, seeds, begin, Purpose.DRAFT, i * logits.shape[1])
            tokens = torch.where(torch.tensor([r.sampling.is_greedy for r in rows]), scores.argmax(dim=-1), tokens)
            drafted = [(*path, token) for path, token in zip(drafted, tokens.tolist(), strict=True)]
            laws.append(scores.softmax(dim=-1) if vocabulary is None else scores.softmax(dim=-1)[:, vocabulary])
        stacked = torch.stack(laws, dim=1) if laws else torch.empty(len(chunks), 0, 0)
        return [
            Draft(path[:length], law[:length], vocabulary)
            for path, law, length in zip(drafted, stacked, lengths, strict=True)
        ]

    return drafter


def fixed_drafter(path: Sequence[int], parents: Sequence[int] | None = None) -> Drafter:
    return lambda chunks: [Draft(path, parents=parents)] * len(chunks)


def generate(
    model: Markov, params: Sequence[SamplingParams], drafter: Drafter, method: Method, num_tokens: int
) -> tuple[list[tuple[int, ...]], list[Verdict]]:
    """Step after step, all sequences in one batch, until each has `num_tokens`. Also all verdicts."""
    histories = [list(PROMPT) for _ in params]
    verdicts: list[Verdict] = []
    end = len(PROMPT) + num_tokens
    while active := [index for index, history in enumerate(histories) if len(history) < end]:
        chunks = [chunk_of(tuple(histories[index]), params[index]) for index in active]
        drafts = drafter(chunks)
        for index, verdict in zip(active, verify(model.rows(chunks, drafts), chunks, drafts, method), strict=True):
            assert verdict is not None
            histories[index] += verdict.token_ids
            verdicts.append(verdict)
    return [tuple(history[len(PROMPT) : end]) for history in histories], verdicts


def plain_loop(model: Markov, params: SamplingParams, num_tokens: int) -> tuple[int, ...]:
    """Without drafts, without verification."""
    history = list(PROMPT)
    for _ in range(num_tokens):
        (sampled,) = sample(model.logits([history]), [Row(tuple(history), len(PROMPT), params)])
        assert isinstance(sampled, SampledToken)
        history.append(sampled.token_id)
    return tuple(history[len(PROMPT) :])


def law_of_next(model: Markov, history: Sequence[int], params: SamplingParams) -> list[float]:
    """Written out from the definitions, in Python's own numbers."""
    scores: list[float] = model.logits([history])[0].tolist()
    written = history[len(PROMPT) :]
    for token in set(history):
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(written):
        scores[token] -= params.presence_penalty + params.frequency_penalty * written.count(token)
    if len(written) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = -math.inf
    masses = [math.exp(score / params.temperature) for score in scores]
    order = sorted(range(len(masses)), key=lambda token: -masses[token])
    if params.top_k:
        order = order[: params.top_k]
    total = sum(masses[token] for token in order)
    before = itertools.accumulate((masses[token] / total for token in order), initial=0.0)
    order = [token for token, mass in zip(order, before, strict=False) if mass < params.top_p]
    order = [token for token in order if masses[token] >= params.min_p * masses[order[0]]]
    total = sum(masses[token] for token in order)
    return [masses[token] / total if token in order else 0.0 for token in range(len(masses))]


def law_of_outputs(model: Markov, params: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        laws = {
            (*output, token): mass * chance
            for output, mass in laws.items()
            for token, chance in enumerate(law_of_next(model, (*PROMPT, *output), params))
            if chance > 0
        }
    return laws
