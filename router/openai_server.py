"""OpenAI's HTTP interface to the service: routes, credentials, request ids, and answers that end with their client."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from protos import caller, tracing
from protos.errors import ServiceError, Unavailable
from router.answering import Answering, Messages
from router.card import ModelCard
from router.http_call import Call, as_json, event
from router.interleaving import interleaved
from router.measured import Measured
from router.openai_document import document
from router.openai_errors import SERVER, Problem, internal, problem_of
from router.openai_headers import remaining_s_of, request_id_of
from router.openai_requests import AnswerBody, ChatBody, CompletionBody
from router.openai_responses import Answer, ChatForm, CompletionForm, Form, Spelling

logger = logging.getLogger(__name__)

_LAST_WORD_S = 1.0  # for telling a client that the router stops

Handler: TypeAlias = Callable[[Call], Awaitable[None]]


class OpenAIDoor:
    """`app` is the ASGI application. Without an authenticator anybody may ask."""

    def __init__(
        self,
        service: Answering,
        card: ModelCard,
        is_ready: Callable[[], bool],
        authenticator: caller.Authenticator | None = None,
    ) -> None:
        self._service = service
        self._card = card
        self._spelling = Spelling(card.tokenizer)
        self._is_ready = is_ready
        self._authenticator = authenticator
        self._started_at = int(time.time())
        routed = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint(self._chat), methods=["POST"]),
                Route("/v1/completions", self._endpoint(self._complete), methods=["POST"]),
                Route("/v1/models", self._endpoint(self._models), methods=["GET"]),
                Route("/v1/models/{model:path}", self._endpoint(self._model), methods=["GET"]),
                Route("/health", _Endpoint(self._health), methods=["GET"]),
                Route("/ready", _Endpoint(self._ready), methods=["GET"]),
                Route("/openapi.json", _Endpoint(self._document), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _not_routed},
        )
        routed.router.redirect_slashes = False
        self.app = Measured(routed)

    def _endpoint(self, handler: Handler) -> _Endpoint:
        """For those who may ask."""

        async def authenticated(call: Call) -> None:
            who = caller.ANYONE
            if self._authenticator is not None:
                who = self._authenticator.authenticate(call.headers.get("authorization"))
            if caller.Scope.INFER not in who.scopes:
                raise Problem(
                    403, "the key lacks the scope infer: it may not ask for answers", code="permission_denied"
                )
            caller.current_caller.set(who)
            tracing.incoming.set(tracing.headers_of(call.headers.items()))
            await handler(call)

        return _Endpoint(authenticated)

    async def _chat(self, call: Call) -> None:
        body = ChatBody.parse(await call.body())
        form = ChatForm(self._spelling, has_logprobs=bool(body.logprobs))
        remaining_s = remaining_s_of(call.headers)
        streams = [self._service.chat(each, remaining_s) for each in body.to_requests(call.request_id)]
        await call.while_connected(self._answer(call, body, form, streams))

    async def _complete(self, call: Call) -> None:
        body = CompletionBody.parse(await call.body())
        form = CompletionForm(self._spelling, has_logprobs=body.logprobs is not None)
        remaining_s = remaining_s_of(call.headers)
        streams = [self._service.generate(each, remaining_s) for each in body.to_requests(call.request_id)]
        await call.while_connected(self._answer(call, body, form, streams))

    async def _answer(self, call: Call, body: AnswerBody, form: Form, streams: Sequence[Messages]) -> None:
        """Raises Problem, before the first words or after."""
        answer = Answer(form, self._spelling, call.request_id, self._card.name, body.n or 1, body.wants_usage)
        try:
            async with aclosing(interleaved(streams)) as messages:
                async for prompt, raw in messages:
                    pieces = answer.read(prompt, raw)
                    if not body.stream:
                        answer.add(pieces)
                    elif chunks := answer.chunks(pieces):
                        await call.write(b"".join(map(event, chunks)))
        except ServiceError as error:
            raise problem_of(error, body.name_of) from error
        if not body.stream:
            await call.reply(answer.whole())
            return
        if answer.wants_usage:
            await call.write(event(answer.usage_chunk()))
        await call.write(b"data: [DONE]\n\n")
        await call.end()

    async def _models(self, call: Call) -> None:
        await call.reply({"object": "list", "data": [self._model_object()]})

    async def _model(self, call: Call) -> None:
        name = call.path_params["model"]
        if name != self._card.name:
            told = f"model {name[:200]!r} is not served here; {self._card.name!r} is"
            raise Problem(404, told, "model", "model_not_found")
        await call.reply(self._model_object())

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._card.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "pdserve",
            "max_model_len": self._service.model().max_context_tokens,
        }

    async def _health(self, call: Call) -> None:
        await call.reply({"status": "alive"})

    async def _ready(self, call: Call) -> None:
        if self._service.is_draining:
            raise problem_of(Unavailable("the router is about to stop"), str)
        if not self._is_ready():
            raise problem_of(Unavailable("no workers are there that could serve a request together"), str)
        await call.reply({"status": "ready"})

    async def _document(self, call: Call) -> None:
        await call.reply(document())


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An ASGI application of one route, which tells what its handler raises."""

    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, secrets.token_hex(12))
        try:
            call.request_id = request_id_of(call.headers) or call.request_id
            await self.handler(call)
        except ClientDisconnect:
            return
        except Problem as problem:
            await call.fail(problem)
        except ServiceError as error:
            await call.fail(problem_of(error, str))
        except asyncio.CancelledError:  # by the server, which stops: nobody else knows of this task
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await call.fail(_stopped())
        except Exception:
            logger.exception("%s failed", scope["path"])
            await call.fail(internal())


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {
        404: f"there is nothing at {request.url.path[:200]}; docs/openai.md lists what is served",
        405: f"{request.url.path[:200]} does not take {request.method[:20]}",
    }.get(error.status_code, error.detail)
    problem = Problem(error.status_code, told, headers=dict(error.headers or {}))
    return Response(as_json(problem.body), problem.status, problem.headers, "application/json")


def _stopped() -> Problem:
    return Problem(503, "the router stopped before the answer was complete", code="unavailable", type=SERVER)
