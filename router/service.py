"""The client's side of the router: checks, tokenizes once, relays. One instance serves every request."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import grpc

from model.chat_template import ChatRejected, NoChatTemplate
from model.grammar import GrammarRejected
from protos import inference_pb2 as pb
from protos import tracing
from protos.caller import Caller, current_caller
from protos.calls import Context
from protos.errors import AlreadyExists, FailedPrecondition, InvalidArgument, LimitExceeded, ServiceError, Unavailable
from protos.request_id import current_request_id
from router import metrics
from router.account import Account, accounted
from router.admission import Gate
from router.card import ModelCard
from router.choices import Choices
from router.direct import checked_direct
from router.echo import echoed
from router.history import History
from router.messages import model_message
from router.rate_limits import RateLimits
from router.relay import Relay
from router.request import Request
from router.timeline import RequestClock
from router.validation import (
    Prompt,
    TokenLimit,
    UnresolvedRequest,
    chat_prompt,
    check_chat,
    check_deadline,
    check_generate,
    check_model,
    context_limit,
    resolve,
    text_prompt,
)
from router.workers import WorkerTable

SERVICE = "pdserve.v1.Inference"
_LONGEST_S = 86400.0  # a deadline further off is none: gRPC's times overflow, and calls to workers would end at once


class InferenceService:
    """Answers of Generate and Chat are bytes of GenerateResponse: most of them are the workers' own."""

    def __init__(
        self,
        card: ModelCard,
        table: WorkerTable,
        relay: Relay,
        gate: Gate,
        limits: RateLimits,
        max_prompt_bytes: int,
        *,
        offers_direct: bool = False,
        history: History | None = None,
    ) -> None:
        """`offers_direct`: clients may be sent to the decode workers for their answers."""
        self._history = history or History()
        self._card = card
        self._offers_direct = offers_direct
        self._gate = gate
        self._limits = limits
        self._table = table
        self._relay = relay
        self._max_prompt_bytes = max_prompt_bytes
        self._in_flight: set[str] = set()
        self.is_draining = False

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Of those in flight, how many wait to be placed."""
        return self._gate.num_waiting

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
        """By name, for `protos.serve.GrpcServer.add_handlers`."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        return {
            "Generate": stream(self.Generate, pb.GenerateRequest.FromString),
            "Chat": stream(self.Chat, pb.ChatRequest.FromString),
            "Route": stream(self.Route, pb.RouteRequest.FromString),
            "Tokenize": unary(self.Tokenize, pb.TokenizeRequest.FromString, pb.TokenizeResponse.SerializeToString),
            "GetModel": unary(self.GetModel, pb.GetModelRequest.FromString, pb.Model.SerializeToString),
        }

    def Generate(self, message: pb.GenerateRequest, context: Context) -> AsyncGenerator[bytes, None]:
        return self.generate(message, context.time_remaining())

    def Chat(self, message: pb.ChatRequest, context: Context) -> AsyncGenerator[bytes, None]:
        return self.chat(message, context.time_remaining())

    def Route(self, message: pb.RouteRequest, context: Context) -> AsyncGenerator[bytes, None]:
        return self._answer(
            lambda: checked_direct(self._check_routed(message), is_offered=self._offers_direct),
            context.time_remaining(),
            current_caller.get(),
        )

    def generate(self, message: pb.GenerateRequest, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        """For every door: the serialized messages of one answer. None: no deadline. Closing it cancels."""
        return self._answer(
            lambda: self._check_generate(message),
            remaining_s,
            current_caller.get(),
        )

    def chat(self, message: pb.ChatRequest, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        return self._answer(
            lambda: self._check_chat(message),
            remaining_s,
            current_caller.get(),
        )

    def _check_routed(self, message: pb.RouteRequest) -> UnresolvedRequest:
        match message.WhichOneof("request"):
            case "generate":
                return self._check_generate(message.generate)
            case "chat":
                return self._check_chat(message.chat)
            case _:
                raise InvalidArgument("there is no request: set generate or chat", field="request")

    def _check_generate(self, message: pb.GenerateRequest) -> UnresolvedRequest:
        return check_generate(message, self._card, self._limit(), self._max_prompt_bytes, secrets.token_hex(8))

    def _check_chat(self, message: pb.ChatRequest) -> UnresolvedRequest:
        return check_chat(message, self._card, self._max_prompt_bytes, secrets.token_hex(8))

    async def Tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        match message.WhichOneof("input"):
            case "text":
                prompt = text_prompt(message.text, self._max_prompt_bytes)
            case "chat":
                prompt = chat_prompt(message.chat.messages, self._max_prompt_bytes)
            case _:
                raise InvalidArgument("there is no input: set text or chat", field="input")
        token_ids = await self._tokenized(prompt)
        return pb.TokenizeResponse(token_ids=token_ids, tokens=self._card.tokenizer.token_strings(token_ids))

    async def GetModel(self, message: pb.GetModelRequest, context: Context) -> pb.Model:
        check_model(message.model if message.HasField("model") else None, self._card)
        return self.model()

    def model(self) -> pb.Model:
        """What is served, for every door."""
        return model_message(self._card, self._table.layout, self._context_limit().num_tokens)

    async def _answer(
        self, check: Callable[[], UnresolvedRequest], remaining_s: float | None, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        clock = RequestClock()
        remaining_s = None if remaining_s is not None and remaining_s > _LONGEST_S else remaining_s
        deadline_at = None if remaining_s is None else time.monotonic() + remaining_s
        with _outcome_counted():
            if self.is_draining:
                raise Unavailable("the router is about to stop; ask another one, or again later")
            check_deadline(remaining_s)
            unresolved = check()
            current_request_id.set(unresolved.request_id)
            with (
                self._claimed(unresolved.request_id),
                self._history.follow(unresolved.request_id, caller.tenant, clock, caller.slo_class) as followed,
                _traced(unresolved.request_id) as span,
                self._limits.claimed(caller) as allowance,
            ):
                self._gate.refuse_if_full(caller.tenant, unresolved.priority)
                token_ids = await self._tokenized(unresolved.prompt)
                clock.tokenized()
                span.part("tokenize", clock.received_at, clock.received_at + clock.tokenize_s, tokens=len(token_ids))
                request = resolve(unresolved, token_ids, self._card, self._limit(), secrets.randbits(63))
                await self._check_grammar(request)
                request = replace(request, span=span)
                self._history.arrived(followed, request)
                allowance.take_tokens(request.num_known_tokens, request.max_new_tokens)
                with accounted(allowance, self._gate, request.num_known_tokens) as account:
                    followed.account = account
                    async with aclosing(self._messages(request, clock, deadline_at, account)) as messages:
                        async for raw in messages:
                            followed.last_message = raw
                            yield raw

    def _messages(
        self, request: Request, clock: RequestClock, deadline_at: float | None, account: Account
    ) -> AsyncGenerator[bytes, None]:
        if request.num_choices > 1:
            answer = Choices(self._relay, request, clock, deadline_at, account).messages()
        else:
            answer = self._relay.messages(request, clock, deadline_at, account)
        return echoed(answer, request.token_ids, self._card.tokenizer) if request.echo else answer

    async def _tokenized(self, prompt: Prompt) -> list[int]:
        """In a thread: a long prompt must not hold up the streams."""
        tokenizer = self._card.tokenizer
        if prompt.token_ids:
            return list(prompt.token_ids)
        if not prompt.messages:
            return await asyncio.to_thread(tokenizer.encode, prompt.text)
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, prompt.messages)
        except NoChatTemplate as error:
            raise FailedPrecondition(str(error), field="messages") from None
        except ChatRejected as error:
            raise InvalidArgument(str(error), field="messages") from None

    async def _check_grammar(self, request: Request) -> None:
        """In a thread, as it may take a while; the workers compile it too, but here nothing has been done yet."""
        if (grammar := request.sampling.grammar) is None:
            return
        field = f"sampling.{grammar.kind.value}"
        if self._card.grammars is None:
            raise FailedPrecondition("the router has no tokenizer to compile a grammar with", field=field)
        try:
            matcher = await asyncio.to_thread(self._card.grammars.matcher, grammar)
        except GrammarRejected as error:
            raise InvalidArgument(f"{field}: {error}", field=field) from None
        for choice, token_ids in enumerate(request.emitted):
            num_followed = await asyncio.to_thread(matcher.num_followed, token_ids)
            if num_followed < len(token_ids):
                where = f"emitted[{choice}].ids"
                problem = f"{where}[{num_followed}] is {token_ids[num_followed]}, which {field} rules out"
                raise InvalidArgument(problem, field=where)

    def _context_limit(self) -> TokenLimit:
        return context_limit(self._card, self._table.common.max_context_tokens)

    def _limit(self) -> TokenLimit:
        context = self._context_limit()
        cache = self._table.common.max_sequence_tokens
        if cache is None or cache >= context.num_tokens:
            return context
        return TokenLimit(cache, "the largest KV cache of the workers that decode")

    @contextmanager
    def _claimed(self, request_id: str) -> Iterator[None]:
        if request_id in self._in_flight:
            raise AlreadyExists(f"request_id {request_id!r} is in flight already", field="request_id")
        self._in_flight.add(request_id)
        metrics.IN_FLIGHT.inc()
        try:
            yield
        finally:
            self._in_flight.remove(request_id)
            metrics.IN_FLIGHT.dec()


def _traced(request_id: str) -> tracing.Span:
    return tracing.span("request", tracing.incoming.get(), request_id=request_id)


@contextmanager
def _outcome_counted() -> Iterator[None]:
    outcome = "ok"
    try:
        yield
    except ServiceError as error:
        outcome = error.code.name.lower()
        if isinstance(error, LimitExceeded):
            metrics.REFUSALS.labels("limit").inc()
        raise
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "cancelled"
        raise
    except BaseException:
        outcome = "internal"
        raise
    finally:
        metrics.REQUESTS.labels(outcome).inc()
