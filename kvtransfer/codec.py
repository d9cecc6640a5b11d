"""Sequences on the wire: the messages a worker receives and answers with, and the values it works on.

Prefill and decode build the same `GenerateResponse`, so that the router can pass a worker's bytes on untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.runner import Logprobs, SampledToken
from model.sampling_params import InvalidSampling, SamplingParams
from model.sequence import FinishReason
from protos import inference_pb2 as pb
from protos.errors import InvalidArgument

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def sampling_from_message(message: pb.SamplingParams) -> SamplingParams:
    """Reads parameters that the router resolved: every field is set but `logprobs`, which stays optional.

    Raises:
        InvalidArgument: a value is outside its limits.
    """
    try:
        return SamplingParams(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            seed=message.seed,
            stop_token_ids=tuple(message.stop_token_ids),
            num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        )
    except InvalidSampling as error:
        raise InvalidArgument(f"sampling.{error}", field=f"sampling.{error.field}") from None


def tokens_message(
    output_index: int,
    tokens: Sequence[SampledToken],
    text: str,
    finish_reason: FinishReason | None = None,
) -> pb.GenerateResponse:
    """Some consecutive tokens of one stream; `output_index` is that of the first."""
    message = pb.GenerateResponse(output_index=output_index, token_ids=[token.token_id for token in tokens], text=text)
    for token in tokens:
        if token.logprobs is not None:
            message.logprobs.append(_logprobs_message(token.token_id, token.logprobs))
    if finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[finish_reason]
    return message


def _logprobs_message(token_id: int, logprobs: Logprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=token_id, logprob=logprobs.chosen),
        top=[pb.TokenLogprob(token_id=top_id, logprob=logprob) for top_id, logprob in logprobs.top],
    )
