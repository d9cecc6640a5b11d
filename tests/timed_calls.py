"""What tests ask of a `TimedWorker` over gRPC, and what it has to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest

from model.timed_runner import expected_tokens
from protos import decode_pb2, inference_pb2, prefill_pb2
from protos.channel import service_errors
from protos.errors import ServiceError
from tests.timed_worker import LAYOUT, VOCAB_SIZE


async def failure_of(call: Any) -> ServiceError:
    """What a streaming call ends with, whatever it said before."""
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(5):
            with service_errors():
                while await call.read() is not grpc.aio.EOF:
                    pass
    return caught.value


async def tokens_of(call: Any) -> list[int]:
    """All the tokens of a Decode call that goes well."""
    with service_errors():
        return [token_id async for message in call for token_id in message.token_ids]


def prompt_of(num_tokens: int, first: int = 0) -> list[int]:
    """Prompts with different `first` have no block in common."""
    return [(first * 37 + 5 * index) % VOCAB_SIZE for index in range(num_tokens)]


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a worker must say if every word of its cache is right."""
    return expected_tokens(prompt, num_tokens, LAYOUT, vocab_size=VOCAB_SIZE)


def sampling(
    max_tokens: int, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=0, top_p=1, repetition_penalty=1, max_tokens=max_tokens, stop_token_ids=stop_token_ids, stop=stop
    )


def prefill_request(
    attempt_id: str,
    prompt: Sequence[int],
    decode: decode_pb2.DecodeTarget | None,
    *,
    max_tokens: int = 4,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id=f"r-{attempt_id}",
        attempt_id=attempt_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=sampling(max_tokens, stop_token_ids, stop),
        decode=decode,
    )


def decode_request(
    attempt_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    prefill_here: bool = False,
    stop: Sequence[str] = (),
) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=f"r-{attempt_id}",
        attempt_id=attempt_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=sampling(max_tokens, stop=stop),
        prefill_here=prefill_here,
    )
