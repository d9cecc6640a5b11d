"""The client against a server that answers as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.client import PdserveClient
from protos.errors import DeadlineExceeded, Internal, InvalidArgument, Unavailable
from protos.serve import GrpcServer
from protos.values import ChatMessage, Chunk, Sampling, Summary, TokenLogprobs

Messages = list[pb.GenerateResponse]

SUMMARY = pb.GenerateResponse(
    output_index=2,
    request_id="r1",
    usage=pb.Usage(
        prompt_tokens=9,
        output_tokens=2,
        prefill=pb.PromptTokens(computed=5, cached=4),
        decode=pb.DecodeStats(received_tokens=6, cached_tokens=3, recomputed_tokens=1, num_preemptions=7, num_steps=8),
        num_resumes=1,
        num_retries=2,
        disaggregated=True,
    ),
    timeline=pb.Timeline(
        stages=[pb.Stage(name="decode", worker_id="d0", start_s=0.5, duration_s=0.25)],
        ttft_s=0.5,
        tpot_s=0.125,
        total_s=1.0,
    ),
)


class Scripted(inference_pb2_grpc.InferenceServicer):
    def __init__(self, messages: Messages, delay_s: float = 0.0, ends_with: Exception | None = None) -> None:
        self.messages = messages
        self.ends_with = ends_with
        self.delay_s = delay_s
        self.requests: list[pb.GenerateRequest | pb.ChatRequest] = []
        self.closed = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for message in self._say(request):
            yield message

    async def Route(self, request: pb.RouteRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        raise NotImplementedError
        yield

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for message in self._say(request):
            yield message

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[5, 6], tokens=["a", request.WhichOneof("input") or ""])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.Model:
        return pb.Model(name="tiny", max_context_tokens=64, vocab_size=100, eos_token_ids=[2])

    async def _say(self, request: pb.GenerateRequest | pb.ChatRequest) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        try:
            for message in self.messages:
                if message.output_index >= sum(len(each.ids) for each in request.emitted) or message.HasField("usage"):
                    yield message
                await asyncio.sleep(self.delay_s)
            if self.ends_with is not None:
                raise self.ends_with
        finally:
            self.closed.set()


@asynccontextmanager
async def talking_to(service: Scripted) -> AsyncIterator[PdserveClient]:
    server = GrpcServer("127.0.0.1", 0)
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, service)
    await server.start()
    try:
        async with PdserveClient(server.address) as client:
            yield client
    finally:
        await server.stop()


def tokens(output_index: int, *token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(output_index=output_index, token_ids=token_ids, **fields)


async def test_answer_comes_as_values() -> None:
    top = [pb.TokenLogprob(token_id=7, logprob=-0.5), pb.TokenLogprob(token_id=8, logprob=-2.0)]
    logprobs = [pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=7, logprob=-0.5), top=top)]
    first = tokens(0, 7, text="He", logprobs=logprobs)
    last = tokens(1, 8, text="llo", finish_reason=pb.FINISH_REASON_STOP)
    async with talking_to(Scripted([first, last, SUMMARY])) as client:
        parts = [part async for part in client.generate("x")]
    assert parts[:2] == [
        Chunk(0, (7,), "He", (TokenLogprobs(7, -0.5, ((7, -0.5), (8, -2.0))),), None),
        Chunk(1, (8,), "llo", (), "stop"),
    ]
    summary = parts[2]
    assert isinstance(summary, Summary) and summary.request_id == "r1"
    usage = summary.usage
    assert (usage.prompt_tokens, usage.prefill_computed_tokens, usage.prefill_cached_tokens) == (9, 5, 4)
    assert (usage.decode_received_tokens, usage.decode_cached_tokens, usage.decode_recomputed_tokens) == (6, 3, 1)
    assert (usage.num_resumes, usage.num_retries, usage.num_preemptions, usage.num_steps) == (1, 2, 7, 8)
    assert usage.disaggregated
    (stage,) = summary.timeline.stages
    assert (stage.name, stage.worker_id, stage.start_s, stage.duration_s) == ("decode", "d0", 0.5, 0.25)


@pytest.mark.parametrize("second", [tokens(2, 8), tokens(0, 8)], ids=["gap", "repeat"])
async def test_gap_and_repeat_are_seen(second: pb.GenerateResponse) -> None:
    async with talking_to(Scripted([tokens(0, 7), second, SUMMARY])) as client:
        with pytest.raises(Internal, match=f"has 1 tokens and goes on at output_index {second.output_index}"):
            async for _ in client.generate("x"):
                pass


async def test_gaps_are_looked_for_in_each_of_several_answers() -> None:
    both = [tokens(0, 7), tokens(0, 8, choice=1), tokens(1, 9, 10, choice=1), tokens(1, 8), SUMMARY]
    async with talking_to(Scripted(both)) as client:
        parts = [part async for part in client.generate("x", n=2)]
    chunks = [part for part in parts if isinstance(part, Chunk)]
    assert [(chunk.choice, chunk.token_ids) for chunk in chunks] == [(0, (7,)), (1, (8,)), (1, (9, 10)), (0, (8,))]
    async with talking_to(Scripted([tokens(0, 7), tokens(1, 8, choice=1), SUMMARY])) as client:
        with pytest.raises(Internal, match="has 0 tokens and goes on at output_index 1"):
            async for _ in client.generate("x", n=2):
                pass


async def test_answer_without_an_end_is_seen() -> None:
    async with talking_to(Scripted([tokens(0, 7)])) as client:
        with pytest.raises(Internal, match="without its summary"):
            async for _ in client.generate("x"):
                pass


async def test_request_says_what_was_set_and_nothing_else() -> None:
    service = Scripted([SUMMARY])
    sampling = Sampling(temperature=0.0, seed=0, stop_token_ids=[3], max_tokens=4)
    async with talking_to(service) as client:
        async for _ in client.generate([5, 6], sampling=sampling, request_id="r1", priority=0):
            pass
        async for _ in client.chat([ChatMessage("user", "hi")], model="tiny", session_id="s1"):
            pass
    generate, chat = service.requests
    assert generate == pb.GenerateRequest(
        request_id="r1",
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=pb.SamplingParams(temperature=0.0, seed=0, stop_token_ids=[3], max_tokens=4),
        priority=0,
    )
    assert chat.request_id and chat.sampling.HasField("seed")  # so that another router could go on with it
    chat.ClearField("request_id")
    chat.ClearField("sampling")
    assert chat == pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="hi")], session_id="s1")


async def test_empty_token_ids_are_not_no_prompt() -> None:
    service = Scripted([SUMMARY])
    async with talking_to(service) as client:
        async for _ in client.generate([]):
            pass
    (request,) = service.requests
    assert isinstance(request, pb.GenerateRequest) and request.WhichOneof("prompt") == "token_ids"


async def leave(client: PdserveClient) -> None:
    answer = client.generate("x")
    await anext(answer)
    await answer.aclose()


async def be_cancelled(client: PdserveClient) -> None:
    async def read() -> None:
        async for _ in client.generate("x"):
            started.set()

    started = asyncio.Event()
    reading = asyncio.create_task(read())
    await started.wait()
    reading.cancel()
    await asyncio.wait([reading])


@pytest.mark.parametrize("how", [leave, be_cancelled])
async def test_leaving_cancels_the_request(how: Callable[[PdserveClient], Any]) -> None:
    service = Scripted([tokens(0, 7)] * 2, delay_s=30)
    async with talking_to(service) as client:
        await how(client)
        await asyncio.wait_for(service.closed.wait(), 5)


async def test_deadline() -> None:
    service = Scripted([tokens(0, 7)], delay_s=30)
    async with talking_to(service) as client:
        with pytest.raises(DeadlineExceeded):
            async for _ in client.generate("x", deadline_s=0.05):
                pass
        await asyncio.wait_for(service.closed.wait(), 5)


async def test_deadline_in_the_past_starts_nothing() -> None:
    service = Scripted([tokens(0, 7)])
    async with talking_to(service) as client:
        with pytest.raises(DeadlineExceeded):
            await anext(client.generate("x", deadline_s=-1.0))
    assert service.requests == []


async def test_nobody_there() -> None:
    async with PdserveClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            await client.get_model()
        assert caught.value.retryable


@pytest.mark.parametrize(("output", "begins"), [([tokens(0, 7)], "the answer broke off after 1 token: "), ([], "gone")])
async def test_router_that_is_lost_during_an_answer(output: list[Any], begins: str) -> None:
    async with talking_to(Scripted(output, ends_with=Unavailable("gone"))) as client:
        with pytest.raises(Unavailable) as caught:
            async for _ in client.generate("x"):
                pass
        assert str(caught.value).startswith(begins) and caught.value.retryable


@pytest.mark.parametrize("sampling", [Sampling(seed=-1), Sampling(top_k=2**70), Sampling(stop="ab")])
async def test_value_that_no_field_holds_is_told_before_sending(sampling: Sampling) -> None:
    async with PdserveClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument) as caught:
            client.generate("x", sampling=sampling)
        assert caught.value.field == "sampling"


async def test_tokenize_and_model() -> None:
    async with talking_to(Scripted([])) as client:
        assert await client.tokenize("x") == [(5, "a"), (6, "text")]
        assert await client.tokenize([ChatMessage("user", "x")]) == [(5, "a"), (6, "chat")]
        model = await client.get_model()
        assert (model.name, model.max_context_tokens, model.eos_token_ids) == ("tiny", 64, (2,))


async def test_role_that_is_none_is_told_before_sending() -> None:
    async with PdserveClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match="role is 'chef'; it must be one of prefill, decode, both"):
            await client.set_role("p0", "chef")
