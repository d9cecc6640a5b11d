"""A sequence on the wire: what a worker is sent of it, and the tokens that it answers with.

Here because both services need it and neither may import the other: they build the same `GenerateResponse`, so that
the router can pass a worker's bytes on untouched. The messages of the hand-over itself are in `kvtransfer.messages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Items

from kvtransfer.ticket import HandoverTarget
from model.grammar import GrammarRejected, Grammars
from model.prompt_scores import PromptScores
from model.runner import Logprobs, SampledToken
from model.sampling_params import Grammar, GrammarKind, InvalidSampling, SamplingParams
from model.sequence import FinishReason, Sequence
from protos import decode_pb2, prefill_pb2
from protos import inference_pb2 as pb
from protos.errors import InvalidArgument

_SCORES_AT_ONCE = 4096  # logprobs of one message: about 60 kB
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def sequence_from_message(
    message: prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest, *, vocab_size: int, block_size: int
) -> Sequence:
    """The sequence that a worker is asked for. What it is must hold here: a step that fails ends all who share it.

    Raises:
        InvalidArgument: names the field and its limits.
    """
    if not message.attempt_id:
        raise InvalidArgument("attempt_id is empty", field="attempt_id")
    check_token_ids("token_ids", message.token_ids, vocab_size)
    num_tokens, num_prompt_tokens = len(message.token_ids), message.num_prompt_tokens
    if not 1 <= num_prompt_tokens <= num_tokens:
        raise InvalidArgument(
            f"num_prompt_tokens is {num_prompt_tokens}; it must be 1 to {num_tokens}, the number of token_ids",
            field="num_prompt_tokens",
        )
    sampling = sampling_from_message(message.sampling)
    if sampling.logit_bias:
        check_token_ids("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    if num_tokens - num_prompt_tokens >= sampling.max_tokens:
        raise InvalidArgument(
            f"token_ids has {num_tokens - num_prompt_tokens} tokens of output already; sampling.max_tokens is "
            f"{sampling.max_tokens}",
            field="token_ids",
        )
    return Sequence(message.attempt_id, list(message.token_ids), num_prompt_tokens, sampling, block_size)


def target_from_message(message: decode_pb2.DecodeTarget, field: str) -> HandoverTarget:
    """Raises InvalidArgument if something is empty; `field` is where the message stands."""
    if not (message.worker_id and message.address and message.epoch):
        raise InvalidArgument("worker_id, address and epoch of the decode worker must not be empty", field=field)
    return HandoverTarget(message.worker_id, message.address, message.epoch)


def check_token_ids(field: str, token_ids: Items[int], vocab_size: int) -> None:
    """Raises InvalidArgument if there is none, or one that the model does not have."""
    if not token_ids:
        raise InvalidArgument(f"{field} is empty; a sequence has at least one token", field=field)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(
                f"{field} has {token_id}; this worker's model has token ids 0 to {vocab_size - 1}", field=field
            )


def sampling_from_message(message: pb.SamplingParams) -> SamplingParams:
    """Reads parameters that the router resolved: every field is set but the three that stay optional.

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
            max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
            stop=tuple(message.stop),
            logit_bias=tuple(message.logit_bias.items()),
            num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            grammar=grammar_from_message(message),
        )
    except InvalidSampling as error:
        raise InvalidArgument(f"sampling.{error}", field=f"sampling.{error.field}") from None


def grammar_from_message(message: pb.SamplingParams) -> Grammar | None:
    kind = message.WhichOneof("grammar")
    return None if kind is None else Grammar(GrammarKind(kind), getattr(message, kind))


async def follow_grammar(sequence: Sequence, grammars: Grammars) -> None:
    """Gives the sequence its matcher, if it needs one. Raises InvalidArgument."""
    grammar = sequence.sampling.grammar
    if grammar is None:
        return
    try:
        sequence.matcher = await asyncio.to_thread(grammars.matcher, grammar)
    except GrammarRejected as error:
        raise InvalidArgument(
            f"sampling.{grammar.kind.value}: {error}", field=f"sampling.{grammar.kind.value}"
        ) from None


def check_followed(sequence: Sequence) -> None:
    """At the end of an answer. Raises InvalidArgument if it could not be kept to its grammar."""
    if sequence.matcher is not None and sequence.matcher.problem and sequence.sampling.grammar is not None:
        field = f"sampling.{sequence.sampling.grammar.kind.value}"
        raise InvalidArgument(f"{field} could not be followed to its end: {sequence.matcher.problem}", field=field)


def tokens_message(
    output_index: int,
    tokens: Items[SampledToken],
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


def scores_for(sequence: Sequence) -> PromptScores | None:
    """What its prompt is to be scored into, if that was asked for."""
    count = sequence.sampling.num_prompt_logprobs
    return None if count is None else PromptScores(count, sequence.num_prompt_tokens)


def prompt_messages(token_ids: Items[int], scores: PromptScores) -> Iterator[pb.GenerateResponse]:
    """The scores of a prompt's tokens, in messages of some thousand numbers. The first token has none."""
    entries = [pb.TokenLogprobs()]
    for token_id, logprobs in zip(token_ids[1 : scores.num_prompt_tokens], scores, strict=True):
        if len(entries) * (1 + scores.num_alternatives) >= _SCORES_AT_ONCE:
            yield pb.GenerateResponse(prompt=pb.PromptChunk(logprobs=entries))
            entries = []
        entries.append(_logprobs_message(token_id, logprobs))
    yield pb.GenerateResponse(prompt=pb.PromptChunk(logprobs=entries))


def _logprobs_message(token_id: int, logprobs: Logprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=token_id, logprob=logprobs.chosen),
        top=[pb.TokenLogprob(token_id=top_id, logprob=logprob) for top_id, logprob in logprobs.top],
    )
