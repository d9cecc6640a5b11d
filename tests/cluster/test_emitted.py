"""An answer that goes on elsewhere behind any of its tokens is the unbroken one: its text, its logprobs, its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy.local import LocalCluster
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import InvalidArgument
from tests.cluster.test_sampling import PROMPT, config
from tests.cluster.tiny_model import TinyModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 40
SAMPLED = pb.SamplingParams(temperature=0.9, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.05)
SCHEMA = '{"type":"object","properties":{"a":{"type":"string","maxLength":12}},"required":["a"]}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inference(tiny_moe: TinyModel) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    settings = config(tiny_moe, 1, 1)
    async with LocalCluster(settings) as cluster, open_channel(cluster.router_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def answer(
    inference: inference_pb2_grpc.InferenceStub, sampling: pb.SamplingParams, emitted: list[int]
) -> list[pb.GenerateResponse]:
    """Without its summary."""
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling, emitted=[pb.TokenIds(ids=emitted)])
    messages = [message async for message in inference.Generate(request, timeout=60)]
    assert messages[-1].HasField("usage")
    return messages[:-1]


def tokens_of(messages: list[pb.GenerateResponse]) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def text_of(messages: list[pb.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


async def check_everywhere(inference: inference_pb2_grpc.InferenceStub, sampling: pb.SamplingParams) -> str:
    """Returns the text."""
    whole = await answer(inference, sampling, [])
    logprobs = [each.chosen.logprob for message in whole for each in message.logprobs]
    num_cuts = 0
    for place in range(1, len(whole)):
        before = whole[:place]
        rest = await answer(inference, sampling, tokens_of(before))
        num_before = len(tokens_of(before))
        assert rest[0].output_index == num_before
        assert tokens_of(before + rest) == tokens_of(whole)
        assert text_of(before + rest) == text_of(whole)
        assert rest[-1].finish_reason == whole[-1].finish_reason
        told = [each.chosen.logprob for message in rest for each in message.logprobs]
        assert told == pytest.approx(logprobs[num_before:], abs=1e-3)
        num_cuts += 1
    assert num_cuts >= 5
    return text_of(whole)


async def test_characters_cut_anywhere_and_logprobs(inference: inference_pb2_grpc.InferenceStub) -> None:
    sampling = pb.SamplingParams(logprobs=2)
    sampling.MergeFrom(SAMPLED)
    await check_everywhere(inference, sampling)
    told = [message.text for message in await answer(inference, sampling, [])]
    assert "" in told[:-1] and any(not text.isascii() for text in told)  # tokens end amid characters


async def test_stop_texts_cut_anywhere(inference: inference_pb2_grpc.InferenceStub) -> None:
    text = text_of(await answer(inference, SAMPLED, []))
    stopped = pb.SamplingParams(stop=[text[-9:-3], text[4:6] + "never"])
    stopped.MergeFrom(SAMPLED)
    assert await check_everywhere(inference, stopped) == text[: text.find(text[-9:-3])]


async def test_grammar(inference: inference_pb2_grpc.InferenceStub) -> None:
    sampling = pb.SamplingParams(temperature=1.0, seed=5, max_tokens=60, json_schema=SCHEMA)
    assert (await check_everywhere(inference, sampling)).startswith("{")


async def test_beginning_that_its_grammar_rules_out(inference: inference_pb2_grpc.InferenceStub) -> None:
    sampling = pb.SamplingParams(temperature=1.0, seed=5, max_tokens=60, json_schema=SCHEMA)
    begun = tokens_of(await answer(inference, sampling, []))[:1]
    says = r"emitted\[0\].ids\[1\] is .*, which sampling.json_schema rules out"
    with pytest.raises(InvalidArgument, match=says) as caught, service_errors():
        await answer(inference, sampling, begun * 2)
    assert caught.value.field == "emitted[0].ids"
