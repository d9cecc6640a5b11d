"""What a client says it has of an answer already: whether the answer can go on behind that."""

from __future__ import annotations

from collections.abc import Sequence

from model.sampling_params import SamplingParams
from protos.errors import InvalidArgument


def check_emitted(token_ids: Sequence[int], sampling: SamplingParams, *, num_choices: int, has_seed: bool) -> None:
    """Raises InvalidArgument where this is not the unfinished beginning of one answer, or other tokens would follow."""
    if not token_ids:
        return
    if num_choices > 1:
        raise InvalidArgument(f"n is {num_choices}; with emitted it must be 1: it is of one answer", field="n")
    if not has_seed and sampling.temperature > 0:
        problem = (
            "sampling.seed is not set; with emitted it must be what it was, or the answer would not go on as it began"
        )
        raise InvalidArgument(problem, field="sampling.seed")
    if len(token_ids) >= sampling.max_tokens:
        raise InvalidArgument(
            f"emitted has {len(token_ids)} tokens; it must have fewer than sampling.max_tokens, {sampling.max_tokens}: "
            "the answer is complete",
            field="emitted",
        )
    for index, token_id in enumerate(token_ids):
        if token_id in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
            raise InvalidArgument(
                f"emitted[{index}] is {token_id}, which ends the answer: nothing can follow", field="emitted"
            )
