"""What a client says it has of its answers already: whether they can go on behind that."""

from __future__ import annotations

from collections.abc import Sequence

from model.sampling_params import SamplingParams
from protos.errors import InvalidArgument


def check_emitted(
    emitted: Sequence[Sequence[int]], sampling: SamplingParams, *, num_choices: int, has_seed: bool
) -> None:
    """Raises InvalidArgument where these are not unfinished beginnings of answers, or other tokens would follow."""
    if len(emitted) > num_choices:
        problem = f"emitted has {len(emitted)} answers; it must have at most n, {num_choices}"
        raise InvalidArgument(problem, field="emitted")
    if any(emitted) and not has_seed and sampling.temperature > 0:
        problem = "sampling.seed is not set; with emitted it must be, to what it was: else other tokens would follow"
        raise InvalidArgument(problem, field="sampling.seed")
    for choice, token_ids in enumerate(emitted):
        if len(token_ids) >= sampling.max_tokens:
            raise InvalidArgument(
                f"emitted[{choice}] has {len(token_ids)} tokens; it must have fewer than sampling.max_tokens, "
                f"{sampling.max_tokens}: the answer is complete",
                field=f"emitted[{choice}].ids",
            )
        for index, token_id in enumerate(token_ids):
            if token_id in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
                what = f"emitted[{choice}].ids[{index}] is {token_id}"
                problem = f"{what}, which ends the answer: nothing can follow"
                raise InvalidArgument(problem, field=f"emitted[{choice}].ids")
