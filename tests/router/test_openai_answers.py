"""What the service says, in OpenAI's shapes: choices, probabilities, echoes and errors, read by its own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs

from protos import inference_pb2 as pb
from protos.caller import Authenticator, Caller, Scope
from protos.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unimplemented,
)
from tests.router.fakes import EOS
from tests.router.scripted_service import Script, ScriptedService, Step, served, summary, text

HI: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def asking(*script: Step, **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedService]]:
    async with asking_by(lambda message: script, **options) as both:
        yield both


@asynccontextmanager
async def asking_by(
    script: Script, authenticator: Authenticator | None = None, max_retries: int = 0
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedService]]:
    service = ScriptedService(script)
    async with served(service, authenticator) as server:
        url = f"http://{server.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=max_retries) as client:
            yield client, service
    assert service.num_open == 0


async def test_choices_come_mixed_and_are_told_apart() -> None:
    script = [text("a", 0), text("x", 1), text("y", 1, "stop"), text("b", 0), text("c", 0, "length"), summary(3, 5)]
    async with asking(*script) as (client, service):
        whole = await client.chat.completions.create(model="tiny", messages=HI, n=2)
        told = [(choice.index, choice.message.content, choice.finish_reason) for choice in whole.choices]
        assert told == [(0, "abc", "length"), (1, "xy", "stop")]
        assert service.asked[0].n == 2
        said, ends, openings = ["", ""], ["", ""], [0, 0]
        async for chunk in await client.chat.completions.create(model="tiny", messages=HI, n=2, stream=True):
            (choice,) = chunk.choices
            said[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
            openings[choice.index] += choice.delta.role is not None
        assert (said, ends, openings) == (["abc", "xy"], ["length", "stop"], [1, 1])


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    def script(message: pb.GenerateRequest | pb.ChatRequest) -> Sequence[Step]:
        assert isinstance(message, pb.GenerateRequest)
        return [text(f"{message.text}{choice}", choice, "stop") for choice in (1, 0)] + [summary()]

    async with asking_by(script) as (client, service):
        whole = await client.completions.create(model="tiny", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 4)
    assert [each.n for each in service.asked] == [2, 2]


def logprobs(chosen: int, logprob: float, *top: tuple[int, float]) -> pb.TokenLogprobs:
    tokens = [pb.TokenLogprob(token_id=token_id, logprob=each) for token_id, each in top]
    return pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=chosen, logprob=logprob), top=tokens)


def with_logprobs(*told: pb.TokenLogprobs, end: int = 0) -> pb.GenerateResponse:
    ids = [each.chosen.token_id for each in told]
    said = "".join(f"<{token_id}>" for token_id in ids if token_id != EOS)
    return pb.GenerateResponse(token_ids=ids, text=said, logprobs=told, finish_reason=end)  # type: ignore[arg-type]


LIKELY = [
    with_logprobs(logprobs(7, -0.5, (7, -0.5), (8, -1.5))),
    with_logprobs(logprobs(12, -2.0, (9, -0.25), (12, -2.0)), logprobs(EOS, -1.0, (EOS, -1.0)), end=1),
    summary(),
]


def content_of(told: ChoiceLogprobs | None) -> list[ChatCompletionTokenLogprob]:
    assert told is not None and told.content is not None
    return told.content


async def test_logprobs_of_a_chat() -> None:
    async with asking(*LIKELY) as (client, service):
        whole = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [chunk.choices[0].logprobs async for chunk in stream]
    assert service.asked[0].sampling.logprobs == 2
    content = content_of(whole.choices[0].logprobs)
    assert [(each.token, each.logprob, each.bytes) for each in content] == [
        ("<7>", -0.5, list(b"<7>")),
        ("<12>", -2.0, list(b"<12>")),
        ("t2", -1.0, list(b"t2")),  # a special token, as the vocabulary spells it
    ]
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [("<9>", -0.25), ("<12>", -2.0)]
    assert [token for each in streamed if each for token in each.content or []] == content


async def test_logprobs_of_a_completion() -> None:
    async with asking(*LIKELY) as (client, _):
        whole = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
        streamed = [
            chunk.choices[0].logprobs
            async for chunk in await client.completions.create(model="tiny", prompt="hi", logprobs=2, stream=True)
        ]
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.tokens == ["<7>", "<12>", "t2"] and told.token_logprobs == [-0.5, -2.0, -1.0]
    assert told.top_logprobs == [{"<7>": -0.5, "<8>": -1.5}, {"<9>": -0.25, "<12>": -2.0}, {"t2": -1.0}]
    assert told.text_offset == [0, 3, 7]
    assert [offset for each in streamed if each for offset in each.text_offset or []] == [0, 3, 7]


async def test_pieces_of_characters_are_told_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = {1: b"\xf0\x9f", 3: b"\x8c\x8d"}
    monkeypatch.setattr("tests.router.fakes.FakeTokenizer.token_bytes", lambda self, token_id: pieces[token_id])
    said = pb.GenerateResponse(
        token_ids=[1, 3],
        text="🌍",
        logprobs=[logprobs(1, -1.0), logprobs(3, -1.0)],
        finish_reason=pb.FINISH_REASON_STOP,
    )
    async with asking(said, summary()) as (client, _):
        chat = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
        completion = await client.completions.create(model="tiny", prompt="hi", logprobs=0)
    content = content_of(chat.choices[0].logprobs)
    assert chat.choices[0].message.content == "🌍"
    assert bytes(byte for each in content for byte in each.bytes or []).decode() == "🌍"
    told = completion.choices[0].logprobs
    assert told is not None and told.tokens == [r"bytes:\xf0\x9f", r"bytes:\x8c\x8d"]


ECHOED = [
    pb.GenerateResponse(
        prompt=pb.PromptChunk(
            token_ids=[20, 21],
            text="hi",
            logprobs=[pb.TokenLogprobs(), logprobs(21, -3.0, (22, -0.5), (21, -3.0))],
        )
    ),
    with_logprobs(logprobs(7, -0.5), end=2),
    summary(2, 1),
]


async def test_echo_comes_first_and_its_first_token_has_no_probability() -> None:
    async with asking(*ECHOED) as (client, _):
        whole = await client.completions.create(model="tiny", prompt="hi", echo=True, logprobs=2)
        stream = await client.completions.create(model="tiny", prompt="hi", echo=True, stream=True)
        streamed = [chunk.choices[0].text async for chunk in stream]
    told = whole.choices[0].logprobs
    assert whole.choices[0].text == "hi<7>" and streamed == ["hi", "<7>"]
    assert told is not None and told.tokens == ["<20>", "<21>", "<7>"]
    assert told.token_logprobs == [None, -3.0, -0.5]
    assert told.top_logprobs == [None, {"<22>": -0.5, "<21>": -3.0}, {}]
    assert told.text_offset == [0, 4, 8]


async def test_echo_is_part_of_every_choice() -> None:
    prompt = pb.GenerateResponse(prompt=pb.PromptChunk(token_ids=[20], text="hi"))
    async with asking(prompt, text("b", 1, "stop"), text("a", 0, "stop"), summary()) as (client, _):
        whole = await client.completions.create(model="tiny", prompt="hi", echo=True, n=2)
    assert [choice.text for choice in whole.choices] == ["hia", "hib"]


async def test_prompt_logprobs_as_vllm_tells_them() -> None:
    expected = [
        None,
        {
            "22": {"logprob": -0.5, "rank": 1, "decoded_token": "<22>"},
            "21": {"logprob": -3.0, "rank": 2, "decoded_token": "<21>"},
        },
    ]
    only = pb.GenerateResponse(prompt=pb.PromptChunk(logprobs=ECHOED[0].prompt.logprobs))
    async with asking(only, text("a", end="stop"), summary()) as (client, service):
        extra = {"prompt_logprobs": 2}
        completion = await client.completions.create(model="tiny", prompt="hi", extra_body=extra)
        chat = await client.chat.completions.create(model="tiny", messages=HI, extra_body=extra)
    assert [each.sampling.prompt_logprobs for each in service.asked] == [2, 2]
    assert completion.choices[0].text == "a"
    assert completion.choices[0].model_dump()["prompt_logprobs"] == expected
    assert chat.model_dump()["prompt_logprobs"] == expected


async def test_incomplete_characters_make_no_chunk() -> None:
    script = [text(""), text("é"), text("", end="stop"), summary()]
    async with asking(*script) as (client, _):
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        chunks = [(chunk.choices[0].text, chunk.choices[0].finish_reason) async for chunk in stream]
    assert chunks == [("é", None), ("", "stop")]


class Denied(ServiceError):
    code = grpc.StatusCode.PERMISSION_DENIED


class Unknown(ServiceError):
    code = grpc.StatusCode.UNAUTHENTICATED


ERRORS: list[tuple[ServiceError, type[openai.APIStatusError], int, str | None]] = [
    (InvalidArgument("no"), openai.BadRequestError, 400, None),
    (FailedPrecondition("no"), openai.BadRequestError, 400, None),
    (Unimplemented("no"), openai.BadRequestError, 400, "unsupported"),
    (Unknown("no"), openai.AuthenticationError, 401, "invalid_api_key"),
    (Denied("no"), openai.PermissionDeniedError, 403, "permission_denied"),
    (ResourceExhausted("no"), openai.RateLimitError, 429, "rate_limit_exceeded"),
    (Internal("no"), openai.InternalServerError, 500, "internal"),
    (Aborted("no"), openai.InternalServerError, 503, "aborted"),
    (ServiceError("no"), openai.InternalServerError, 500, "unknown"),
]


@pytest.mark.parametrize(("error", "kind", "status", "code"), ERRORS, ids=[type(case[0]).__name__ for case in ERRORS])
async def test_errors(error: ServiceError, kind: type[openai.APIStatusError], status: int, code: str | None) -> None:
    async with asking(error) as (client, _):
        with pytest.raises(kind, match="no") as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
    assert (caught.value.status_code, caught.value.code) == (status, code)


async def test_retry_delay() -> None:
    async with asking(ResourceExhausted("full", retry_after_s=1.25)) as (client, _):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1250")


async def test_client_waits_and_asks_again_by_itself() -> None:
    answers: list[list[Step]] = [
        [ResourceExhausted("full", retry_after_s=0.001)],
        [text("a", end="stop"), summary()],
    ]
    async with asking_by(lambda message: answers.pop(0), max_retries=1) as (client, _):
        assert (await client.completions.create(model="tiny", prompt="hi")).choices[0].text == "a"


async def test_defect_is_logged_and_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    def script(message: object) -> Sequence[Step]:
        raise RuntimeError("the inside")

    async with asking_by(script) as (client, _):
        with pytest.raises(openai.InternalServerError, match="its log says why") as caught:
            await client.completions.create(model="tiny", prompt="hi")
    assert "the inside" in caplog.text and "the inside" not in str(caught.value)


class Keys:
    """One key may ask, one may not."""

    def authenticate(self, authorization: str | None) -> Caller:
        match authorization:
            case "Bearer secret":
                return Caller(key="k1", tenant="t1", scopes=Scope.INFER)
            case "Bearer reader":
                return Caller(key="k2", scopes=Scope.READ)
        raise Unknown("there is no such key")


async def test_credentials() -> None:
    async with asking(text("a", end="stop"), summary(), authenticator=Keys()) as (client, service):
        await client.completions.create(model="tiny", prompt="hi")
        assert [caller.tenant for caller in service.callers] == ["t1"]
        with pytest.raises(openai.AuthenticationError, match="no such key") as unknown:
            await client.with_options(api_key="wrong").models.list()
        assert unknown.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.PermissionDeniedError, match="lacks the scope infer"):
            await client.with_options(api_key="reader").completions.create(model="tiny", prompt="hi")
        base = str(client.base_url).removesuffix("/v1/")
        assert await client.with_options(api_key="wrong").get(f"{base}/health", cast_to=object) == {"status": "alive"}
        assert len(service.asked) == 1


async def test_first_words_come_before_the_answer_is_complete() -> None:
    async with asking(text("a"), text("b", end="stop"), summary()) as (client, service):
        service.may_end.clear()
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["a", "b"]
        service.may_end.set()
        assert [chunk async for chunk in stream] == []


async def test_events_are_as_the_standard_has_them() -> None:
    async with asking(text("a\nb\u2028", end="stop"), summary()) as (client, _):
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="hi", stream=True)
        assert raw.headers["content-type"] == "text/event-stream"
        body = b"".join([part async for part in raw.http_response.aiter_bytes()])
    event, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert event.startswith(b"data: {") and b"\n" not in event
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == "a\nb\u2028"


async def test_several_prompts_fail_together() -> None:
    def script(message: pb.GenerateRequest | pb.ChatRequest) -> Sequence[Step]:
        assert isinstance(message, pb.GenerateRequest)
        return [InvalidArgument("b is bad")] if message.text == "b" else [text("a"), summary()]

    async with asking_by(script) as (client, service):
        service.may_end.clear()
        with pytest.raises(openai.BadRequestError, match="b is bad"):
            await asyncio.wait_for(client.completions.create(model="tiny", prompt=["a", "b", "c"]), 5)
        assert service.num_open == 0
