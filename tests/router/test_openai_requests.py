"""Requests as OpenAI's clients write them: what the service is asked then, and what is refused in whose name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from protos import inference_pb2 as pb
from router.openai_errors import Problem
from router.openai_requests import ChatBody, CompletionBody

HI = [{"role": "user", "content": "hi"}]


def completions(**fields: Any) -> list[pb.GenerateRequest]:
    return CompletionBody.parse(json.dumps({"prompt": "hi", **fields}).encode()).to_requests("r")


def chat(**fields: Any) -> pb.ChatRequest:
    (request,) = ChatBody.parse(json.dumps({"messages": HI, **fields}).encode()).to_requests("r")
    return request


def test_nothing_given_leaves_everything_to_the_service() -> None:
    expected = pb.ChatRequest(request_id="r", messages=[pb.ChatMessage(role="user", content="hi")])
    expected.sampling.SetInParent()
    assert chat() == expected


def test_completions_have_openais_default_length() -> None:
    expected = pb.GenerateRequest(request_id="r", text="hi", sampling=pb.SamplingParams(max_tokens=16))
    assert completions() == [expected]


def test_every_field_arrives() -> None:
    (request,) = completions(
        model="tiny",
        n=3,
        echo=True,
        priority=9,
        prompt_cache_key="s",
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=11,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        logprobs=2,
        max_draft_tokens=0,
        stop=["a", "b"],
        logit_bias={"5": -100, "6": 1.5},
        prompt_logprobs=1,
    )
    sampling = pb.SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=11,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        logprobs=2,
        max_draft_tokens=0,
        stop=["a", "b"],
        logit_bias={5: -100.0, 6: 1.5},
        prompt_logprobs=1,
    )
    assert request == pb.GenerateRequest(
        request_id="r", model="tiny", text="hi", n=3, echo=True, priority=9, session_id="s", sampling=sampling
    )


def test_what_is_written_in_another_way_means_the_same() -> None:
    assert chat(stop="x").sampling.stop == ["x"]
    assert chat(max_completion_tokens=4) == chat(max_tokens=4) == chat(max_tokens=4, max_completion_tokens=4)
    assert chat(top_k=-1) == chat(top_k=0)
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert not chat(logprobs=False).sampling.HasField("logprobs")
    assert chat(logprobs=True).sampling.logprobs == 0 and chat(logprobs=True).sampling.HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages[0].role == "system"


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completions(echo=True, logprobs=3)[0].sampling.prompt_logprobs == 3
    assert not completions(logprobs=3)[0].sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [pb.GenerateRequest(text="ab")]),
        (["a", "b"], [pb.GenerateRequest(text="a"), pb.GenerateRequest(text="b")]),
        ([5, 6], [pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]))]),
        ([[5], [6, 7]], [pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)) for ids in ([5], [6, 7])]),
    ],
)
def test_prompts(prompt: Any, expected: list[pb.GenerateRequest]) -> None:
    asked = completions(prompt=prompt)
    assert [(each.text, each.token_ids) for each in asked] == [(each.text, each.token_ids) for each in expected]
    assert [each.request_id for each in asked] == ["r", "r-1"][: len(asked)]


def test_response_formats_are_json_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "A", "strict": True, "description": "of a", "schema": schema}
    asked = chat(response_format={"type": "json_schema", "json_schema": named})
    assert json.loads(asked.sampling.json_schema) == schema
    assert json.loads(chat(response_format={"type": "json_object"}).sampling.json_schema) == {"type": "object"}
    assert chat(response_format={"type": "text"}).sampling.WhichOneof("grammar") is None


def test_what_makes_no_difference_passes() -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "reasoning_effort": None,
        "stream_options": None,
        "best_of": 1,
    }
    assert chat(**harmless) == chat()
    said: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    assert chat(messages=[said]).messages[0].content == "x"  # as the client's own objects are written


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"tools": [{"type": "function"}]}, "tools", "not served"),
    ({"tools": [1], "parallel_tool_calls": True}, "tools", "not served"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "it must be"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format", "it must be"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format", "it must be"),
    ({"response_format": "json"}, "response_format", "it must be"),
    ({"best_of": 3}, "best_of", "not served"),
    ({"modalities": ["text", "audio"]}, "modalities", "not served"),
    ({"temperature": "1"}, "temperature", '"1"; it must be a valid number'),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"top_p": float("inf")}, "top_p", "finite"),
    ({"n": 1.5}, "n", "valid integer"),
    ({"n": True}, "n", "valid integer"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias", "must be a number"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "valid integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not set"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not a known field"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "no place"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is not set"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [7]}, "messages[0]", "valid dictionary"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name", "not served"),
    ({"messages": [{"role": "user", "text": "x"}]}, "messages[0].text", "not a known field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "only text is served",
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=[str(case[0])[:50] for case in REFUSED])
def test_refused_with_its_name(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(Problem) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message and caught.value.message.startswith(param)


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [], [[]], ["a", 5], [True], [1.5], [2**63], [["a"]]])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(Problem) as caught:
        completions(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"null", b"7", b'{"prompt": "\\ud800"}', b"[" * 5000])
def test_what_is_no_object(body: bytes) -> None:
    with pytest.raises(Problem) as caught:
        CompletionBody.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_too_many_prompts() -> None:
    with pytest.raises(Problem) as caught:
        completions(prompt=["a"] * 129)
    assert "129 prompts; at most 128" in caught.value.message


def test_fields_of_the_service_are_named_as_they_were_written() -> None:
    long = ChatBody.parse(json.dumps({"messages": HI, "max_completion_tokens": 4}).encode())
    assert long.name_of("sampling.max_tokens") == "max_completion_tokens"
    assert long.name_of("sampling.logprobs") == "top_logprobs"
    assert long.name_of("messages[2].role") == "messages[2].role"
    text = CompletionBody.parse(b'{"prompt": "hi"}')
    names = [text.name_of(field) for field in ("text", "token_ids", "sampling.logprobs", "sampling.max_tokens")]
    assert names == ["prompt", "prompt", "logprobs", "max_tokens"]


MANY = 1_000_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        ({"messages": [1] * MANY}, "messages[0]"),
        ({"messages": [{}] * MANY}, "messages[0].role"),
        ({"stream": True, "stream_options": {str(index): 1 for index in range(MANY)}}, "stream_options.0"),
        ({"x" * 10 * MANY: 1}, "x" * 100),
    ],
)
def test_large_nonsense_is_refused_as_fast_as_it_is_read(fields: dict[str, Any], param: str) -> None:
    """The streams of all others stand still meanwhile."""
    body = json.dumps({"messages": HI, **fields}).encode()
    started_at = time.process_time()
    json.loads(body)
    read_s = time.process_time() - started_at
    started_at = time.process_time()
    with pytest.raises(Problem) as caught:
        ChatBody.parse(body)
    assert caught.value.param == param
    assert time.process_time() - started_at < 1.0 + 5 * read_s
