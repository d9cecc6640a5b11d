"""OpenAI's own client, against a real router with fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from protos import workers_pb2
from protos.errors import InvalidArgument
from tests.router.asking import FailOnce
from tests.router.fakes import FakeFleet, FakeTokenizer, plain_loop, running_fleet


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with running_fleet(num_prefill=1, num_decode=1, http_port=0) as fleet:
        yield fleet
        await fleet.settled()


@pytest.fixture
async def client(fleet: FakeFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet) as client:
        yield client


def client_of(fleet: FakeFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{fleet.router.http_address}/v1", api_key="any", max_retries=0)


def expected_text(prompt: str, num_tokens: int) -> str:
    return "".join(f"<{token}>" for token in plain_loop(FakeTokenizer().encode(prompt), num_tokens))


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        max_tokens=4,
    )
    prompt = "<system>be brief<user>hi"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected_text(prompt, 4))
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 4, 28)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *said, last = chunks
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "chat.completion.chunk")}
    assert said[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content for chunk in said]
    assert deltas == ["", *(f"<{token}>" for token in plain_loop(FakeTokenizer().encode("<user>hi"), 5))]
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * 5 + ["length"]
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, 5)
    assert all(chunk.usage is None for chunk in said)


async def test_stream_without_usage_has_none(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected_text("hi", 3)
    assert len(chunks) == 3 and not any(chunk.usage for chunk in chunks)


async def test_sync_client(fleet: FakeFleet) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://{fleet.router.http_address}/v1", api_key="any") as client:
            whole = client.completions.create(model="tiny", prompt="hi", max_tokens=3).choices[0].text
            stream = client.completions.create(model="tiny", prompt="hi", max_tokens=3, stream=True)
            return whole, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == (expected_text("hi", 3), expected_text("hi", 3))


async def test_several_prompts_are_answered_in_their_order(client: openai.AsyncOpenAI) -> None:
    prompts = ["hi", "you", "there"]
    whole = await client.completions.create(model="tiny", prompt=prompts, max_tokens=4)
    expected = [expected_text(prompt, 4) for prompt in prompts]
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2 + 3 + 5, 12)
    streamed = ["", "", ""]
    async for chunk in await client.completions.create(model="tiny", prompt=prompts, max_tokens=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


async def test_prompts_as_token_ids(client: openai.AsyncOpenAI) -> None:
    one = await client.completions.create(model="tiny", prompt=[20, 21], max_tokens=2)
    assert one.choices[0].text == "".join(f"<{token}>" for token in plain_loop([20, 21], 2))
    two = await client.completions.create(model="tiny", prompt=[[20, 21], [5]], max_tokens=2)
    assert [choice.text for choice in two.choices] == [
        "".join(f"<{token}>" for token in plain_loop(ids, 2)) for ids in ([20, 21], [5])
    ]


async def test_models(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.owned_by) == ("tiny", "pdserve")
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny' is") as caught:
        await client.models.retrieve("huge/one")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_another_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' is") as caught:
        await client.completions.create(model="gpt-4", prompt="hi")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": 1000}, "max_tokens", "max_tokens is 1000; it must be at most 248"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ({"extra_body": {"top_k": -2}}, "top_k", "top_k is -2"),
        ({"extra_body": {"stop_token_ids": [1000]}}, "stop_token_ids", r"stop_token_ids\[0\] is 1000"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "not served",
        ),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "system, user, assistant"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "is empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the user speaks first"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [{"role": "user", "content": "x" * 1001}]}, "messages", "at most 1000"),
    ],
)
async def test_bad_requests(client: openai.AsyncOpenAI, fields: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await client.chat.completions.create(
            **{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}  # type: ignore[call-overload]
        )
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


async def test_streamed_request_that_is_wrong_is_refused_with_a_status(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        await client.completions.create(model="tiny", prompt="", stream=True)


async def test_leaving_a_stream_ends_the_request_on_the_workers(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    never = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        if num_tokens > 5:
            await never.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    async with await client.completions.create(model="tiny", prompt="hi", max_tokens=20, stream=True) as stream:
        async for _ in stream:
            break
        assert fleet.router.inference.num_in_flight == 1
    await fleet.settled()
    asking = asyncio.create_task(client.completions.create(model="tiny", prompt="hi", max_tokens=20))
    async with asyncio.timeout(5):
        while len(fleet.workers["d0"].decodes) < 2:
            await asyncio.sleep(0.001)
    asking.cancel()  # the client closes its connection
    await fleet.settled()


async def test_error_amid_a_stream(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    FailOnce(InvalidArgument("the worker knows better"), fleet, "d", "decode.token", num_tokens=4)
    said = []
    with pytest.raises(openai.APIError, match="the worker knows better"):
        async for chunk in await client.completions.create(model="tiny", prompt="hi", max_tokens=9, stream=True):
            said.append(chunk.choices[0].text)
    assert "".join(said) == expected_text("hi", 2)


async def test_deadline(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    never = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await never.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    headers = {"x-request-timeout-s": "0.05"}
    with pytest.raises(openai.InternalServerError, match="deadline") as caught:
        await client.completions.create(model="tiny", prompt="hi", extra_headers=headers)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    for wrong in ("0", "-1", "nan", "inf", "1e300", "soon", ""):
        with pytest.raises(openai.BadRequestError, match="x-request-timeout-s is"):
            headers = {"x-request-timeout-s": wrong}
            await client.completions.create(model="tiny", prompt="hi", extra_headers=headers)


async def test_request_ids(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    headers = {"x-request-id": "mine-1"}
    raw = await client.completions.with_raw_response.create(model="tiny", prompt="hi", extra_headers=headers)
    assert raw.headers["x-request-id"] == "mine-1" and raw.parse().id == "cmpl-mine-1"
    assert fleet.workers["d0"].decodes[-1].request_id == "mine-1"
    minted = {(await client.completions.create(model="tiny", prompt="hi"))._request_id for _ in range(2)}
    assert len(minted) == 2
    with pytest.raises(openai.BadRequestError, match="1 to 120 printable ASCII"):
        await client.completions.create(model="tiny", prompt="hi", extra_headers={"x-request-id": "x" * 121})


async def test_request_id_in_flight(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    held = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await held.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    headers = {"x-request-id": "twice"}
    first = await client.completions.create(model="tiny", prompt="hi", stream=True, extra_headers=headers)
    with pytest.raises(openai.ConflictError, match="'twice' is in flight"):
        await client.completions.create(model="tiny", prompt="hi", extra_headers=headers)
    held.set()
    assert len([chunk async for chunk in first]) == 16


async def test_readiness_follows_the_workers() -> None:
    async with running_fleet(http_port=0) as fleet, client_of(fleet) as client:

        async def status(path: str) -> int:
            try:
                await client.get(f"http://{fleet.router.http_address}{path}", cast_to=object)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        assert (await status("/health"), await status("/ready")) == (200, 503)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
        await fleet.add("w", workers_pb2.ROLE_BOTH)
        assert (await status("/health"), await status("/ready")) == (200, 200)


async def test_draining_refuses_what_is_new_and_finishes_what_is_open(
    fleet: FakeFleet, client: openai.AsyncOpenAI
) -> None:
    held = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await held.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=4, stream=True)
    draining = asyncio.create_task(fleet.router.drain())
    async with asyncio.timeout(5):
        while not fleet.router.inference.is_draining:
            await asyncio.sleep(0.001)
    with pytest.raises(openai.InternalServerError, match="about to stop"):
        await client.completions.create(model="tiny", prompt="hi")
    with pytest.raises(openai.InternalServerError, match="about to stop"):
        await client.get(f"http://{fleet.router.http_address}/ready", cast_to=object)
    held.set()
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected_text("hi", 4)
    await draining
    with pytest.raises(openai.APIConnectionError):
        await client.models.list()


async def test_stopping_tells_those_that_are_not_answered(fleet: FakeFleet, client: openai.AsyncOpenAI) -> None:
    never = asyncio.Event()

    async def hold(attempt_id: str, num_tokens: int) -> None:
        await never.wait()

    fleet.workers["d0"].hooks["decode.token"] = hold
    stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
    whole = asyncio.create_task(client.completions.create(model="tiny", prompt="hi"))
    async with asyncio.timeout(5):
        while fleet.router.inference.num_in_flight < 2:
            await asyncio.sleep(0.001)
    assert fleet.router._http is not None
    await fleet.router._http.stop(0.0)
    with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
        _ = [chunk async for chunk in stream]
    with pytest.raises(openai.InternalServerError, match="stopped before the answer was complete"):
        await whole
