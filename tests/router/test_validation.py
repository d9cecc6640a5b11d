"""What is refused, with the field and the limit named, and what a request that is taken means."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.sampling_params import SamplingParams
from protos import inference_pb2 as pb
from protos.errors import DeadlineExceeded, InvalidArgument, NotFound
from router.request import Request
from router.validation import (
    Prompt,
    TokenLimit,
    UnresolvedRequest,
    check_chat,
    check_deadline,
    check_generate,
    context_limit,
    resolve,
)
from tests.router.fakes import CARD, EOS, MAX_CONTEXT, VOCAB_SIZE

LIMIT = TokenLimit(MAX_CONTEXT, "the model's context")
IDS = tuple(range(10, 20))


def generate(max_bytes: int = 100, limit: TokenLimit = LIMIT, **fields: Any) -> UnresolvedRequest:
    return check_generate(pb.GenerateRequest(**fields), CARD, limit, max_bytes, "minted")


def chat(*messages: tuple[str, str], max_bytes: int = 100) -> UnresolvedRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return check_chat(pb.ChatRequest(messages=turns), CARD, max_bytes, "minted")


def resolved(ids: tuple[int, ...] = IDS, limit: TokenLimit = LIMIT, **sampling: Any) -> Request:
    unresolved = UnresolvedRequest("r", Prompt("text", text="x"), pb.SamplingParams(**sampling))
    return resolve(unresolved, ids, CARD, limit, drawn_seed=42)


@pytest.mark.parametrize(
    "fields, field, problem",
    [
        ({}, "prompt", "there is no prompt: set text or token_ids"),
        ({"text": ""}, "text", "text is empty"),
        ({"text": "x" * 101}, "text", "text has 101 bytes of text; at most 100 are taken"),
        ({"text": "ü" * 51}, "text", "text has 102 bytes"),
        ({"token_ids": pb.TokenIds()}, "token_ids", "token_ids is empty"),
        ({"token_ids": pb.TokenIds(ids=[1, -1])}, "token_ids", r"token_ids\[1\] is -1; 'tiny' has token ids 0 to 999"),
        ({"token_ids": pb.TokenIds(ids=[VOCAB_SIZE])}, "token_ids", r"token_ids\[0\] is 1000"),
        (
            {"token_ids": pb.TokenIds(ids=[-1] * 256)},
            "token_ids",
            "token_ids has 256 tokens; the model's context holds",
        ),
        ({"text": "x", "request_id": ""}, "request_id", "it must be 1 to 128 printable characters"),
        ({"text": "x", "request_id": "a\n"}, "request_id", r"request_id is 'a\\n'"),
        ({"text": "x", "request_id": "a" * 129}, "request_id", "1 to 128"),
        ({"text": "x", "priority": -1}, "priority", "priority is -1; it must be 0 to 9"),
        ({"text": "x", "priority": 10}, "priority", "priority is 10; it must be 0 to 9"),
        ({"text": "x", "n": 0}, "n", "n is 0; it must be 1 to 16"),
        ({"text": "x", "n": 17}, "n", "n is 17; it must be 1 to 16"),
        ({"text": "x", "session_id": ""}, "session_id", "it must be 1 to 128 printable characters"),
        ({"text": "x", "session_id": "é" * 129}, "session_id", "1 to 128"),
        ({"text": "x", "session_id": "a\t"}, "session_id", r"session_id is 'a\\t'"),
    ],
)
def test_generate_is_refused(fields: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        generate(**fields)
    assert caught.value.field == field


def test_limit_is_the_least_of_model_and_workers_and_its_reason_is_told() -> None:
    assert context_limit(CARD, None) == context_limit(CARD, MAX_CONTEXT) == context_limit(CARD, 9999) == LIMIT
    capped = context_limit(CARD, 32)
    assert capped.num_tokens == 32
    for refuse in (
        lambda: generate(limit=capped, token_ids=pb.TokenIds(ids=[5] * 32)),
        lambda: resolved((5,) * 32, capped),
    ):
        with pytest.raises(InvalidArgument, match=r"has 32 tokens; the context .* with --max-context holds 32, "):
            refuse()
    assert resolved((5,) * 31, capped).sampling.max_tokens == 1


@pytest.mark.parametrize(
    "messages, field, problem",
    [
        ([], "messages", "messages is empty"),
        ([("user", "hi"), ("robot", "x")], "messages[1].role", "is 'robot'; it must be one of system, user, assistant"),
        ([("", "hi")], "messages[0].role", "is ''"),
        ([("system", "x"), ("user", "")], "messages[1].content", r"messages\[1\].content is empty"),
        ([("user", "x")] * 4097, "messages", "messages has more than 4096 messages"),
        ([("user", "x" * 60), ("user", "y" * 60)], "messages", "messages has 120 bytes"),
    ],
)
def test_chat_is_refused(messages: list[tuple[str, str]], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem) as caught:
        chat(*messages)
    assert caught.value.field == field


def test_other_model_is_not_found_and_the_one_served_is_named() -> None:
    with pytest.raises(NotFound, match="model 'gpt' is not served here; 'tiny' is") as caught:
        generate(text="x", model="gpt")
    assert caught.value.field == "model"
    with pytest.raises(NotFound):
        generate(text="x", model="")
    assert generate(text="x", model="tiny").request_id == "minted"


@pytest.mark.parametrize(
    "sampling, field, limit",
    [
        ({"temperature": -1.0}, "temperature", "is -1.0; it must be 0 .greedy. to 100"),
        ({"temperature": math.nan}, "temperature", "is nan"),
        ({"temperature": math.inf}, "temperature", "is inf"),
        ({"top_k": -1}, "top_k", "0 .all. or more"),
        ({"top_p": 0.0}, "top_p", "is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p", "above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p", "is nan"),
        ({"min_p": 1.5}, "min_p", "0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "is 0.0; it must be 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty", "-2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "-2 to 2"),
        ({"max_tokens": 0}, "max_tokens", "is 0; it must be at least 1"),
        ({"max_tokens": -5}, "max_tokens", "at least 1"),
        ({"max_tokens": 247}, "max_tokens", "is 247; it must be at most 246: the model's context holds 256 tokens"),
        ({"max_tokens": 2**40}, "max_tokens", "at most 246"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "0 to max_tokens .5."),
        ({"min_tokens": 247}, "min_tokens", "0 to max_tokens .246."),
        ({"min_tokens": -1}, "min_tokens", "is -1"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "token ids 0 to 999"),
        ({"stop_token_ids": list(range(3, 70))}, "stop_token_ids", "at most 64"),
        ({"stop": ["x"] * 17}, "stop", "has 17 texts; at most 16"),
        ({"stop": ["x"] * 999}, "stop", "at most 16"),
        ({"stop": ["x", ""]}, "stop", "has a text of 0 bytes; each must have 1 to 256"),
        ({"stop": ["é" * 129]}, "stop", "has a text of 258 bytes; each must have 1 to 256"),
        ({"logit_bias": {VOCAB_SIZE: 1}}, "logit_bias", "has token id 1000; 'tiny' has token ids 0 to 999"),
        ({"logit_bias": {-1: 1}}, "logit_bias", "has token id -1; 'tiny' has token ids 0 to 999"),
        ({"logit_bias": {7: 1, 8: math.nan}}, "logit_bias", "is nan for token id 8; it must be -100 to 100"),
        ({"logit_bias": {7: -100.5}}, "logit_bias", "is -100.5 for token id 7; it must be -100 to 100"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "is 21; it must be 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "is -1; it must be 0 to 20"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": -1}, "logprobs", "0 to 20"),
    ],
)
def test_sampling_is_refused(sampling: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as caught:
        resolved(**sampling)
    assert caught.value.field == f"sampling.{field}"
    assert str(caught.value).startswith(f"sampling.{field}")


@pytest.mark.parametrize("num_tokens", [MAX_CONTEXT, MAX_CONTEXT + 1, 10_000])
def test_prompt_beyond_the_context_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=f"text has {num_tokens} tokens; the model's context holds 256") as caught:
        resolved((5,) * num_tokens)
    assert caught.value.field == "text"


def test_prompt_that_leaves_room_for_one_token_is_taken() -> None:
    assert resolved((5,) * (MAX_CONTEXT - 1)).sampling.max_tokens == 1


def test_what_limits_is_named() -> None:
    limit = TokenLimit(32, "the largest KV cache of the workers that decode")
    with pytest.raises(InvalidArgument, match="at most 22: the largest KV cache of the workers that decode holds 32"):
        resolved(limit=limit, max_tokens=23)
    assert resolved(limit=limit).sampling.max_tokens == 22


def test_no_tokens_is_no_prompt() -> None:
    with pytest.raises(InvalidArgument, match="text has no tokens"):
        resolved(())


def test_defaults() -> None:
    assert resolved().sampling == SamplingParams(
        max_tokens=MAX_CONTEXT - len(IDS),
        min_tokens=0,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=42,
        stop_token_ids=(EOS,),
        num_logprobs=None,
    )


def test_zero_is_a_value() -> None:
    sampling = resolved(temperature=0.0, seed=0, logprobs=0, top_k=0).sampling
    assert (sampling.temperature, sampling.seed, sampling.num_logprobs) == (0.0, 0, 0)


def test_end_tokens_join_the_stop_tokens_unless_they_are_ignored() -> None:
    assert resolved(stop_token_ids=[7, EOS, 7]).sampling.stop_token_ids == (7, EOS)
    assert resolved(stop_token_ids=[7], ignore_eos=True).sampling.stop_token_ids == (7,)
    assert resolved(ignore_eos=False).sampling.stop_token_ids == (EOS,)


def test_what_is_not_sampling_is_carried_and_have_defaults() -> None:
    def carried(message: UnresolvedRequest) -> tuple[int, str, int, bool]:
        request = resolve(message, IDS, CARD, LIMIT, drawn_seed=0)
        return request.priority, request.session_id, request.num_choices, request.echo

    user = pb.ChatMessage(role="user", content="hi")
    spoken = pb.ChatRequest(messages=[user], priority=9, session_id="é" * 128, n=16)
    assert carried(generate(text="x")) == (5, "", 1, False)
    assert carried(generate(text="x", priority=0, session_id="s-1", n=1, echo=True)) == (0, "s-1", 1, True)
    assert carried(check_chat(spoken, CARD, 100, "minted")) == (9, "é" * 128, 16, False)


def test_scores_of_a_prompt_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.validation.MAX_PROMPT_SCORES", len(IDS) * 4)
    assert resolved(prompt_logprobs=3).sampling.num_prompt_logprobs == 3
    with pytest.raises(InvalidArgument, match="is 4, for a prompt of 10 tokens; at most 40 logprobs") as caught:
        resolved(prompt_logprobs=4)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_deadline() -> None:
    check_deadline(None)
    check_deadline(0.001)
    for past in (0.0, -1.0):
        with pytest.raises(DeadlineExceeded):
            check_deadline(past)


anything = st.floats() | st.none()
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300) | st.none()


@given(
    st.fixed_dictionaries(
        {
            "temperature": anything,
            "top_p": anything,
            "min_p": anything,
            "repetition_penalty": anything,
            "presence_penalty": anything,
            "frequency_penalty": anything,
            "top_k": numbers,
            "max_tokens": numbers,
            "min_tokens": numbers,
            "logprobs": numbers,
            "seed": st.integers(0, 2**64 - 1) | st.none(),
        }
    ),
    st.integers(1, 300),
)
def test_whatever_comes_is_refused_by_field_or_fits_the_context(sampling: dict[str, Any], num_tokens: int) -> None:
    try:
        request = resolved((5,) * num_tokens, **sampling)
    except InvalidArgument as error:
        assert error.field == "text" or error.field.removeprefix("sampling.") in sampling
        return
    params = request.sampling
    assert 1 <= params.max_tokens <= MAX_CONTEXT - num_tokens
    assert all(math.isfinite(value) for value in (params.temperature, params.top_p, params.repetition_penalty))
    given_max = sampling["max_tokens"]
    assert given_max is None or params.max_tokens == given_max
