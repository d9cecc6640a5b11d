"""What OpenAI's clients send, checked and turned into what the service takes.

Types, names and what is not served at all are checked here, limits by the service. A field that nobody knows is
refused, since a misspelt one would silently change nothing; those that can make no difference here are let pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos import inference_pb2 as pb
from router.openai_errors import Problem
from router.openai_fields import Biases, Content, Integer, Prompts, ResponseFormat, Texts

MAX_PROMPTS = 128  # of one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

_IGNORED = {  # about accounts and caches of a service that is not this one
    "metadata",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_EMPTY: tuple[Any, ...] = (None, [], {})
_NOT_SERVED: Mapping[str, tuple[Any, ...]] = {  # and the values with which it asks for nothing
    "audio": _EMPTY,
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": _EMPTY,
    "modalities": (None, ["text"]),
    "prediction": _EMPTY,
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),  # without tools: both are nothing
    "tools": _EMPTY,
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_NOT_SERVED_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "annotations": _EMPTY,
    "audio": _EMPTY,
    "function_call": _EMPTY,
    "name": (None,),
    "refusal": (None,),
    "tool_calls": _EMPTY,
    "tool_call_id": (None,),
}


class Part(BaseModel):
    """Of a request's JSON."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Part):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there is none


class Message(Part):
    role: str
    content: Content = ""

    def to_message(self) -> pb.ChatMessage:
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name for it
        return pb.ChatMessage(role=role, content=self.content)


class AnswerBody(Part):
    """What chats and completions have in common. top_k and what follows it are named as vLLM does."""

    model: str | None = Field(None, description="The model served; another one is not found.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    stop: Texts = ()
    seed: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases = Field(default_factory=dict)
    response_format: ResponseFormat = None
    prompt_cache_key: str | None = Field(None, description="Requests with the same go where their KV is.")
    top_k: Integer | None = Field(None, description="0 and -1 keep all.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Integer], Field(fail_fast=True)] | None = None
    prompt_logprobs: Integer | None = None
    priority: Integer | None = Field(None, description="0 to 9; higher goes first. Default 5.")
    max_draft_tokens: Integer | None = Field(None, description="Tokens guessed ahead in one step, at most.")

    SERVICE_NAMES: ClassVar[Mapping[str, str]] = {
        "request_id": "x-request-id",
        "session_id": "prompt_cache_key",
        "json_schema": "response_format",
    }

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises Problem, naming the field."""
        try:
            given = pydantic_core.from_json(body)  # NaN passes, so that it can be told where it is
        except ValueError as error:
            raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise Problem(400, "the body must be a JSON object", code="invalid_json")
        try:
            parsed = cls.model_validate(cls._served(given))
        except ValidationError as error:
            raise _problem_of(error) from None
        if parsed.stream_options is not None and not parsed.stream:
            raise Problem(400, "stream_options is given, and stream is not set", param="stream_options")
        if parsed.prompt_logprobs is not None and parsed.stream:
            raise Problem(400, "prompt_logprobs is given, which a streamed answer has no place for", "prompt_logprobs")
        return parsed

    @classmethod
    def _served(cls, given: dict[str, Any]) -> dict[str, Any]:
        ignored = _IGNORED if given.get("tools") else {*_IGNORED, "parallel_tool_calls"}
        given = {name: value for name, value in given.items() if name not in ignored}
        if isinstance(options := given.get("stream_options"), dict):
            given["stream_options"] = _only_served(options, StreamOptions, {}, "stream_options.")
        return _only_served(given, cls, _NOT_SERVED, "")

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def name_of(self, field: str) -> str:
        """How the client wrote a field of the service's message."""
        field = field.removeprefix("sampling.")
        return self.SERVICE_NAMES.get(field, field)

    def sampling(self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> pb.SamplingParams:
        return pb.SamplingParams(
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed % 2**64,  # OpenAI's are signed
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            max_draft_tokens=self.max_draft_tokens,
            stop=self.stop,
            logit_bias=self.logit_bias,
            prompt_logprobs=prompt_logprobs,
            **({} if self.response_format is None else {"json_schema": self.response_format}),
        )


class ChatBody(AnswerBody):
    messages: Annotated[list[Message], Field(fail_fast=True)]
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    @classmethod
    def _served(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = super()._served(given)
        messages = given.get("messages")
        if isinstance(messages, list):
            checked = [
                _only_served(each, Message, _NOT_SERVED_IN_MESSAGES, f"messages[{index}].")
                if isinstance(each, dict)
                else each
                for index, each in enumerate(messages)
            ]
            given = {**given, "messages": checked}
        return given

    def name_of(self, field: str) -> str:
        name = super().name_of(field)
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if name == "logprobs" else name

    def to_requests(self, request_id: str) -> list[pb.ChatRequest]:
        """One. Raises Problem."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs is given, and logprobs is not set", param="top_logprobs")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise Problem(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        request = pb.ChatRequest(
            request_id=request_id,
            model=self.model,
            messages=[message.to_message() for message in self.messages],
            sampling=self.sampling(next(iter(limits), None), logprobs, self.prompt_logprobs),
            n=self.n,
            priority=self.priority,
            session_id=self.prompt_cache_key,
        )
        return [request]


class CompletionBody(AnswerBody):
    prompt: Prompts
    max_tokens: Integer | None = Field(None, description=f"Default {DEFAULT_COMPLETION_TOKENS}.")
    logprobs: Integer | None = None
    echo: bool | None = None

    SERVICE_NAMES: ClassVar[Mapping[str, str]] = {
        **AnswerBody.SERVICE_NAMES,
        "text": "prompt",
        "token_ids": "prompt",
    }

    def to_requests(self, request_id: str) -> list[pb.GenerateRequest]:
        """One for each prompt. Raises Problem."""
        if len(self.prompt) > MAX_PROMPTS:
            told = f"prompt has {len(self.prompt)} prompts; at most {MAX_PROMPTS} are taken"
            raise Problem(400, told, param="prompt")
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        of_prompt = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        sampling = self.sampling(max_tokens, self.logprobs, of_prompt)
        return [
            pb.GenerateRequest(
                request_id=request_id if index == 0 else f"{request_id}-{index}",
                model=self.model,
                sampling=sampling,
                n=self.n,
                echo=self.echo,
                priority=self.priority,
                session_id=self.prompt_cache_key,
                **({"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}),
            )
            for index, prompt in enumerate(self.prompt)
        ]


def _only_served(
    given: dict[str, Any], kind: type[Part], not_served: Mapping[str, tuple[Any, ...]], prefix: str
) -> dict[str, Any]:
    """Without what asks for nothing. Raises Problem for what is not served or not known."""
    for name, value in given.items():
        if name in not_served and value not in not_served[name]:
            raise Problem(400, f"{prefix}{name} is not served here", param=prefix + name, code="unsupported_parameter")
        if name not in kind.model_fields and name not in not_served:
            shown = name[:100]  # to look for what it resembles takes time that grows with it
            similar = difflib.get_close_matches(shown, kind.model_fields, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            told = f"{prefix}{shown} is not a known field{hint}"
            raise Problem(400, told, param=prefix + shown, code="unknown_parameter")
    return {name: value for name, value in given.items() if name in kind.model_fields}


def _problem_of(error: ValidationError) -> Problem:
    """The first thing that is wrong. Of a list nothing after it was looked at: there may be millions."""
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return Problem(400, f"{param} is missing", param, code="missing_required_parameter")
    told = first["msg"].removeprefix("Value error, ").replace("Input should", "it must", 1)
    return Problem(400, f"{param} is {_shown(first['input'])}; {told}", param, code="invalid_type")


def _shown(value: object) -> str:
    try:
        written = pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except ValueError:  # nothing that JSON has
        written = repr(value)
    return written if len(written) <= 60 else f"{written[:60]}..."
