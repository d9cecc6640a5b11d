"""Logits to tokens, for a whole batch at once. Which token a row gets depends on its own logits and parameters only.

Order: penalties, min_tokens, temperature, top-k, top-p, min-p, then the largest of score + Gumbel noise, where the
noise is keyed by (seed, position, token id). A filter keeps every token that ties with the last one it has to keep. It
knows nothing of models or caches. Letters: R rows, V vocabulary, K tokens that passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model.randomness import Purpose, gumbel_noise, seed_tensor
from model.runner import Chunk, Logprobs, NonFiniteLogits, SampledToken
from model.sampling_params import SamplingParams

COLDEST = 1e-6  # temperatures below are taken as this: dividing by them would overflow
_NUMBERS_AT_ONCE = 2**17  # random numbers per tile: more would leave the processor's cache
_FIRST_CANDIDATES = 64  # enough for most top-p rows; more are looked at only where they are needed


def sample(logits: Tensor, rows: Sequence[Chunk]) -> list[SampledToken | NonFiniteLogits]:
    """The next token of each row, or that it has none. `logits` [R, V] is not changed; a -infinity forbids a token.

    A batch of plain greedy rows costs one maximum; only rows that ask for more are copied.
    """
    highest, tokens = logits.max(dim=-1)
    is_finite = torch.isfinite(highest)  # a maximum carries NaN along
    if not bool(is_finite.all()):
        finite = is_finite.nonzero().flatten().tolist()
        sampled = dict(zip(finite, sample(logits[finite], [rows[index] for index in finite]), strict=True))
        return [sampled.get(index) or NonFiniteLogits("the logits are not finite") for index in range(len(rows))]
    special = [index for index, row in enumerate(rows) if not _is_plain_greedy(row)]
    if special:
        tokens[special] = _choose(logits[special].float(), [rows[index] for index in special])
    logprobs = _logprobs(logits, tokens, [_params(row) for row in rows])
    return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens.tolist())]


def _params(row: Chunk) -> SamplingParams:
    assert row.sampling is not None, "this chunk wants no token"
    return row.sampling


def _must_go_on(row: Chunk) -> bool:
    return len(row.history) - row.num_prompt_tokens < _params(row).min_tokens


def _is_plain_greedy(row: Chunk) -> bool:
    params = _params(row)
    return params.is_greedy and not params.has_penalties and not _must_go_on(row)


def _choose(scores: Tensor, rows: Sequence[Chunk]) -> Tensor:
    """Tokens [R] of rows that are not plain greedy. Overwrites `scores` [R, V]."""
    for index, row in enumerate(rows):
        if _params(row).has_penalties:
            _penalise(scores[index], row)
        if _must_go_on(row):
            scores[index, [token for token in _params(row).stop_token_ids if token < scores.shape[1]]] = -math.inf
    drawn = [index for index, row in enumerate(rows) if not _params(row).is_greedy]
    if len(drawn) == len(rows):
        return _draw(scores, rows)
    tokens = scores.argmax(dim=-1)
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[index] for index in drawn])
    return tokens


def _penalise(scores: Tensor, row: Chunk) -> None:
    """Scores [V]: repetition over prompt and output, as Hugging Face; presence and frequency over output, as OpenAI."""
    params = _params(row)
    history = torch.tensor(row.history, dtype=torch.int64, device=scores.device)
    seen, _ = torch.unique(history, return_counts=True)
    before = scores[seen]
    scores[seen] = torch.where(before < 0, before * params.repetition_penalty, before / params.repetition_penalty)
    written, counts = torch.unique(history[row.num_prompt_tokens :], return_counts=True)
    scores[written] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: Tensor, rows: Sequence[Chunk]) -> Tensor:
    """One draw per row from softmax(scores / temperature), filtered. Overwrites `scores` [R, V]."""
    params = [_params(row) for row in rows]
    scores -= scores.amax(dim=-1, keepdim=True)  # so that the likeliest stays 0 at any temperature
    scores /= _column(scores, [max(p.temperature, COLDEST) for p in params])
    seeds = seed_tensor([p.seed for p in params], scores.device)
    positions = torch.tensor([len(row.history) for row in rows], device=scores.device)
    filtered = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    if not filtered:
        return _noisy_argmax(scores, seeds, positions)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    tokens[filtered] = _filtered_argmax(
        _pick(scores, filtered), seeds[filtered], positions[filtered], [params[index] for index in filtered]
    )
    free = sorted(set(range(len(rows))) - set(filtered))
    if free:
        tokens[free] = _noisy_argmax(scores[free], seeds[free], positions[free])
    return tokens


def _noisy_argmax(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    num_rows, vocab_size = scores.shape
    token_ids = torch.arange(vocab_size, device=scores.device)
    step = num_rows if scores.is_cuda else max(1, _NUMBERS_AT_ONCE // vocab_size)
    winners = []
    for start in range(0, num_rows, step):
        tile = slice(start, start + step)
        noise = gumbel_noise(seeds[tile], positions[tile], Purpose.SAMPLE, token_ids)
        winners.append(noise.add_(scores[tile]).argmax(dim=-1))
    return torch.cat(winners)


def _filtered_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Draws noise for the tokens that passed only, all rows' in one list."""
    num_rows, vocab_size = scores.shape
    row, token_ids = (scores >= _lowest_kept(scores, params)).nonzero(as_tuple=True)  # [K], [K]
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


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> dict[int, Logprobs]:
    """By row, for the rows that asked. Of the logits as the model gave them."""
    wanted = [index for index, p in enumerate(params) if p.num_logprobs is not None]
    if not wanted:
        return {}
    logprobs = logits[wanted].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[wanted].unsqueeze(1)).flatten().tolist()
    counts = [params[index].num_logprobs or 0 for index in wanted]
    top = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return {
        index: Logprobs(chosen[i], tuple(zip(top_ids[i][: counts[i]], top_values[i][: counts[i]], strict=True)))
        for i, index in enumerate(wanted)
    }


def _pick(scores: Tensor, rows: list[int]) -> Tensor:
    """These rows; no copy if they are all rows."""
    return scores if len(rows) == len(scores) else scores[rows]


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)  # [R, 1]
