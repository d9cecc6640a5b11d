"""Logits to tokens, for a whole batch at once. Which token a row gets depends on its own logits and parameters only.

Order: biases, penalties, min_tokens, grammar, temperature, top-k, top-p, min-p, then the largest of score + Gumbel
noise, which is keyed by (seed, position, token id). A filter keeps every token that ties with the last one it has to
keep. It knows nothing of models or caches. Letters: R rows, F rows with filters, V vocabulary, K tokens that passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.adjusting import adjust
from model.logprobs import token_logprobs
from model.randomness import Purpose, gumbel_noise, seed_tensor
from model.runner import Chunk, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams

if TYPE_CHECKING:
    from model.grammar import Matcher

COLDEST = 1e-6  # temperatures below are taken as this: dividing by them would overflow
_NUMBERS_AT_ONCE = 2**17  # random numbers per tile: more would leave the processor's cache
_FIRST_CANDIDATES = 64  # enough for most top-p rows; more are looked at only where they are needed


@dataclass(frozen=True, slots=True)
class Row:
    """What a row of logits is processed by. The tokens before it are `history` and then `drafted`."""

    history: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    drafted: Sequence[int] = ()  # apart, so that the positions of a draft share their history
    matcher: Matcher | None = None

    @classmethod
    def behind(cls, chunk: Chunk, drafted: Sequence[int] = ()) -> Row:
        assert chunk.sampling is not None, "this chunk wants no token"
        return cls(chunk.history, chunk.num_prompt_tokens, chunk.sampling, drafted, chunk.matcher)

    @property
    def position(self) -> int:
        """Of the token that is wanted."""
        return len(self.history) + len(self.drafted)

    @property
    def must_go_on(self) -> bool:
        return self.position - self.num_prompt_tokens < self.sampling.min_tokens

    @property
    def is_plain_greedy(self) -> bool:
        sampling = self.sampling
        is_adjusted = self.matcher or sampling.logit_bias or sampling.has_penalties or self.must_go_on
        return sampling.is_greedy and not is_adjusted


def sample(logits: Tensor, rows: Sequence[Row]) -> list[SampledToken | NonFiniteLogits]:
    """The next token of each row, or that it has none. `logits` [R, V] is not changed; a -infinity forbids a token.

    A batch of plain greedy rows costs one maximum; only rows that ask for more are copied.
    """
    highest, tokens = largest(logits)
    is_finite = torch.isfinite(highest)  # a maximum carries NaN along
    if not bool(is_finite.all()):
        finite = is_finite.nonzero().flatten().tolist()
        sampled = dict(zip(finite, sample(logits[finite], [rows[index] for index in finite]), strict=True))
        return [sampled.get(index) or NonFiniteLogits("the logits are not finite") for index in range(len(rows))]
    special = [index for index, row in enumerate(rows) if not row.is_plain_greedy]
    if special:
        tokens[special] = choose(logits[special].float(), [rows[index] for index in special])
    logprobs = token_logprobs(logits, tokens, [row.sampling.num_logprobs for row in rows])
    return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens.tolist())]


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indexes [R] of the largest of each row of scores [R, V]: the first of those that tie, or of any NaN.

    On a CPU numpy finds the index with vector instructions, torch without: it takes about seven times as long.
    """
    if scores.device.type != "cpu":
        values, indexes = scores.max(dim=-1)
        return values, indexes
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()  # numpy has no bfloat16
    indexes = torch.from_numpy(wide.numpy().argmax(axis=-1))
    return scores.gather(1, indexes.unsqueeze(1)).squeeze(1), indexes


def processed_scores(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Float32 [R, V]: a row's token is drawn from its softmax, a greedy row's is its argmax. `logits` is not changed.

    Tokens that are forbidden or filtered out are -infinity. The logits must be finite, as `sample` demands.
    """
    scores = logits.to(torch.float32, copy=True)
    adjust(scores, rows)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawn:
        params = [rows[index].sampling for index in drawn]
        part = _pick(scores, drawn)
        _cool(part, params)
        if any(map(_has_filter, params)):
            part.masked_fill_(part < _lowest_kept(part, params), -math.inf)
        if part is not scores:
            scores[drawn] = part
    return scores


def choose(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """Tokens [R] of rows that are not plain greedy, from their logits. Overwrites `scores` [R, V], float32."""
    adjust(scores, rows)
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if len(drawn) == len(rows):
        return _filter_and_draw(scores, rows)
    tokens = largest(scores)[1]
    if drawn:
        tokens[drawn] = _filter_and_draw(scores[drawn], [rows[index] for index in drawn])
    return tokens


def _cool(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Temperature, in place."""
    scores -= scores.amax(dim=-1, keepdim=True)  # so that the likeliest stays 0 at any temperature
    scores /= _column(scores, [max(p.temperature, COLDEST) for p in params])


def _has_filter(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1.0 or params.min_p)


def _filter_and_draw(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """One draw per row from softmax(scores / temperature), filtered. Overwrites `scores` [R, V]."""
    params = [row.sampling for row in rows]
    _cool(scores, params)
    filtered = [index for index, p in enumerate(params) if _has_filter(p)]
    if not filtered:
        return draw(scores, rows)
    part = _pick(scores, filtered)
    return draw(scores, rows, part >= _lowest_kept(part, [params[index] for index in filtered]))


def draw(scores: Tensor, rows: Sequence[Row], kept: Tensor | None = None) -> Tensor:
    """Tokens [R] from softmax(scores), by the noise that belongs to each row's position.

    `kept` [F, V] says which tokens of the rows with filters passed; without it, those above -infinity did.
    """
    seeds = seed_tensor([row.sampling.seed for row in rows], scores.device)
    positions = torch.tensor([row.position for row in rows], device=scores.device)
    filtered = [index for index, row in enumerate(rows) if _has_filter(row.sampling)]
    if not filtered:
        return noisy_argmax(scores, seeds, positions)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    part = _pick(scores, filtered)
    kept = part > -math.inf if kept is None else kept
    tokens[filtered] = _argmax_of_kept(part, kept, seeds[filtered], positions[filtered])
    free = sorted(set(range(len(rows))) - set(filtered))
    if free:
        tokens[free] = noisy_argmax(scores[free], seeds[free], positions[free])
    return tokens


def noisy_argmax(
    scores: Tensor, seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.SAMPLE, first_index: int = 0
) -> Tensor:
    """Draws [R] from softmax(scores): the largest of score + noise, token t's noise being indexed first_index + t."""
    num_rows, vocab_size = scores.shape
    indexes = torch.arange(first_index, first_index + vocab_size, device=scores.device)
    step = num_rows if scores.is_cuda else max(1, _NUMBERS_AT_ONCE // vocab_size)
    winners = []
    for start in range(0, num_rows, step):
        tile = slice(start, start + step)
        noise = gumbel_noise(seeds[tile], positions[tile], purpose, indexes)
        winners.append(largest(noise.add_(scores[tile]))[1])
    return torch.cat(winners)


def _argmax_of_kept(scores: Tensor, kept: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws noise for the tokens that passed only, all rows' in one list."""
    num_rows, vocab_size = scores.shape
    row, token_ids = kept.nonzero(as_tuple=True)  # [K], [K]
    noise = gumbel_noise(seeds[row], positions[row], Purpose.SAMPLE, token_ids.unsqueeze(1)).squeeze(1)
    noisy = noise + scores[row, token_ids]
    best = noisy.new_full((num_rows,), -math.inf).scatter_reduce_(0, row, noisy, "amax")
    winners = torch.where(noisy == best[row], token_ids, vocab_size)
    return token_ids.new_full((num_rows,), vocab_size).scatter_reduce_(0, row, winners, "amin")


def _lowest_kept(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The lowest score [R, 1] that passes all filters; scores [R, V] have their maximum at 0."""
    vocab_size = scores.shape[1]
    lowest = _column(scores, [math.log(p.min_p) if p.min_p else -math.inf for p in params])
    by_rank = [index for index, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if by_rank:
        ranks = torch.tensor([params[index].top_k for index in by_rank], device=scores.device).unsqueeze(1)
        likeliest = _pick(scores, by_rank).topk(int(ranks.max()), dim=-1).values
        rank_floor = torch.full_like(lowest, -math.inf)
        rank_floor[by_rank] = likeliest.gather(1, ranks - 1)
    else:
        rank_floor = None
    by_mass = [index for index, p in enumerate(params) if p.top_p < 1.0]
    if by_mass:
        kept = _pick(scores, by_mass)
        if rank_floor is not None:
            kept = kept.masked_fill(kept < rank_floor[by_mass], -math.inf)
        mass_floor = _mass_floor(kept, _column(scores, [params[index].top_p for index in by_mass]))
        lowest[by_mass] = torch.maximum(lowest[by_mass], mass_floor)
    return lowest if rank_floor is None else torch.maximum(lowest, rank_floor)


def _mass_floor(scores: Tensor, top_p: Tensor) -> Tensor:
    """The score [R, 1] of the last token needed to reach the mass `top_p` [R, 1]; the first one is always needed."""
    probs = scores.softmax(dim=-1)  # row by row, so that a row's sums do not depend on the batch
    floor = torch.empty_like(top_p)
    pending = torch.arange(len(probs), device=probs.device)
    num_candidates = _FIRST_CANDIDATES
    while len(pending):
        candidates = probs if len(pending) == len(probs) else probs[pending]
        likeliest = candidates.topk(min(num_candidates, probs.shape[1]), dim=-1)
        needed = likeliest.values.cumsum(dim=-1) - likeliest.values < top_p[pending]  # by the mass that is likelier
        last = likeliest.indices.gather(1, needed.sum(dim=-1, keepdim=True) - 1)
        floor[pending] = scores[pending, last.squeeze(1)].unsqueeze(1)
        pending = pending[needed[:, -1]] if num_candidates < probs.shape[1] else pending[:0]
        num_candidates *= 8
    return floor


def _pick(scores: Tensor, rows: list[int]) -> Tensor:
    """These rows; no copy if they are all rows."""
    return scores if len(rows) == len(scores) else scores[rows]


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)  # [R, 1]
