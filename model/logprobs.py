"""How likely tokens are under the logits as the model gave them: before biases, penalties, temperature and filters.

Letters: R rows, V vocabulary, C alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from model.prompt_scores import ScoredTokens
from model.runner import Logprobs


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int | None]) -> dict[int, Logprobs]:
    """By row, with `counts[row]` alternatives; none for None. Of the logits as the model gave them."""
    wanted = {index: count for index, count in enumerate(counts) if count is not None}
    if not wanted:
        return {}
    indexes = list(wanted)
    logprobs = logits[indexes].float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[indexes].unsqueeze(1)).flatten().tolist()
    top = logprobs.topk(min(max(wanted.values()), logprobs.shape[1]), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return {
        index: Logprobs(chosen[i], tuple(zip(top_ids[i][:count], top_values[i][:count], strict=True)))
        for i, (index, count) in enumerate(wanted.items())
    }


def scored_tokens(logits: Tensor, tokens: Tensor, count: int) -> ScoredTokens:
    """Of each row the token [R], with `count` alternatives. Takes as much memory as the logits [R, V] again."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return ScoredTokens(
        chosen=logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).cpu().numpy(),
        top_ids=top.indices.cpu().numpy().astype(np.int32),
        top_logprobs=top.values.cpu().numpy(),
    )
