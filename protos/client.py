"""The client of a router: typed, async, in values of its own. Failures are `protos.errors.ServiceError`s."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc.aio

from protos import inference_pb2, inference_pb2_grpc, workers_pb2, workers_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.credentials import Credentials
from protos.errors import Internal, InvalidArgument, Unavailable
from protos.secret import ClusterSecret
from protos.status_values import ROLES, Decision, Status
from protos.tls import TlsFiles
from protos.values import ChatMessage, Chunk, Model, Sampling, Summary

Answer: TypeAlias = AsyncGenerator[Chunk | Summary, None]
"""Chunks as they come, then one Summary. Leaving it early (or `aclose`) cancels the request."""

AnswerCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]"


class PdserveClient:
    """Connects at the first call, and anew after a loss. Use it as an async context manager, or `close` it."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: TlsFiles | None = None,
        secret: ClusterSecret | None = None,
        insecure: bool = False,
    ) -> None:
        """`secret` instead of a key is for processes of the cluster. `insecure`: send either of them unencrypted.

        Raises OSError or ValueError for files that cannot be used, FailedPrecondition if `insecure` would be needed.
        """
        self._nobody_there = f"no router answers at {address}: start one with `pdserve up`, or give its address"
        is_anonymous = not (api_key or tls or secret)
        credentials = None if is_anonymous else Credentials(tls, secret, api_key, insecure=insecure)
        self._channel = open_channel(address, credentials)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._pools = workers_pb2_grpc.PoolsStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        model: str | None = None,
        request_id: str | None = None,
        n: int | None = None,
        echo: bool | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """Continues a text, or token ids, `n` times; with `echo` chunks of the prompt come first.

        `priority`: 0 to 9, higher goes first while requests wait. Requests of one `session_id` go where the last one's
        KV is, unless that is busy.
        """
        with _readable():
            request = inference_pb2.GenerateRequest(
                request_id=request_id,
                model=model,
                sampling=_sampling_message(sampling),
                n=n,
                echo=echo,
                priority=priority,
                session_id=session_id,
            )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
        return _answer(lambda: self._inference.Generate(request, timeout=deadline_s), self._nobody_there)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        sampling: Sampling | None = None,
        model: str | None = None,
        request_id: str | None = None,
        n: int | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """Answers a conversation. `n`, `priority` and `session_id` as for `generate`."""
        with _readable():
            request = inference_pb2.ChatRequest(
                request_id=request_id,
                model=model,
                messages=[message.to_message() for message in messages],
                sampling=_sampling_message(sampling),
                n=n,
                priority=priority,
                session_id=session_id,
            )
        return _answer(lambda: self._inference.Chat(request, timeout=deadline_s), self._nobody_there)

    async def tokenize(
        self, text: str | Sequence[ChatMessage], *, deadline_s: float | None = None
    ) -> list[tuple[int, str]]:
        """The tokens of a text, or of a conversation with its template: ids and how they read."""
        if isinstance(text, str):
            request = inference_pb2.TokenizeRequest(text=text)
        else:
            conversation = inference_pb2.ChatConversation(messages=[message.to_message() for message in text])
            request = inference_pb2.TokenizeRequest(chat=conversation)
        with service_errors(self._nobody_there):
            response = await self._inference.Tokenize(request, timeout=deadline_s)
        return list(zip(response.token_ids, response.tokens, strict=True))

    async def get_model(self, model: str | None = None, *, deadline_s: float | None = None) -> Model:
        with service_errors(self._nobody_there):
            request = inference_pb2.GetModelRequest(model=model)
            return Model.from_message(await self._inference.GetModel(request, timeout=deadline_s))

    async def get_status(self, *, deadline_s: float | None = None) -> Status:
        with service_errors(self._nobody_there):
            request = workers_pb2.GetStatusRequest()
            return Status.from_message(await self._pools.GetStatus(request, timeout=deadline_s))

    async def set_role(self, worker_id: str, role: str, *, deadline_s: float | None = None) -> None:
        """Uses a worker for prefill, decode or both, from the next request on."""
        if role not in ROLES:
            raise InvalidArgument(f"role is {role!r}; it must be one of {', '.join(ROLES)}", field="role")
        with service_errors(self._nobody_there):
            request = workers_pb2.SetRoleRequest(worker_id=worker_id, role=ROLES[role])
            await self._pools.SetRole(request, timeout=deadline_s)

    async def set_draining(self, worker_id: str, draining: bool, *, deadline_s: float | None = None) -> None:
        """Takes a worker's requests away from it, while they run, and gives it no new ones; or takes that back."""
        with service_errors(self._nobody_there):
            request = workers_pb2.SetDrainingRequest(worker_id=worker_id, draining=draining)
            await self._pools.SetDraining(request, timeout=deadline_s)

    async def list_decisions(self, limit: int | None = None, *, deadline_s: float | None = None) -> list[Decision]:
        """Roles and drains that were set, newest first. `limit`: 1 to 1,000, 100 by default."""
        with _readable("limit: ", "limit"):
            request = workers_pb2.ListDecisionsRequest(limit=limit)
        with service_errors(self._nobody_there):
            response = await self._pools.ListDecisions(request, timeout=deadline_s)
        return [Decision.from_message(message) for message in response.decisions]


def _sampling_message(sampling: Sampling | None) -> inference_pb2.SamplingParams | None:
    with _readable("sampling: ", "sampling"):
        return None if sampling is None else sampling.to_message()


@contextmanager
def _readable(before: str = "", field: str = "") -> Iterator[None]:
    """A value that its field cannot hold, as InvalidArgument."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{before}{error}", field=field) from error


async def _answer(start: Callable[[], AnswerCall], nobody_there: str) -> Answer:
    """Checks that no token of any answer is missing or repeated, and that there is an end.

    Raises:
        Internal: it is not so. Unavailable: nobody is there, or is no longer; says after how many tokens.
    """
    call, is_complete = start(), False
    num_tokens: Counter[int] = Counter()  # by choice
    try:
        with service_errors(nobody_there):
            async for message in call:
                if message.HasField("usage"):
                    yield Summary.from_message(message)
                    is_complete = True
                    continue
                num_known = num_tokens[message.choice]
                if message.output_index != num_known:
                    gap = f"the answer has {num_known} tokens and goes on at output_index {message.output_index}"
                    raise Internal(gap)
                num_tokens[message.choice] += len(message.token_ids)
                yield Chunk.from_message(message)
    except Unavailable as error:
        if (
            not num_tokens.total() or type(error) is not Unavailable
        ):  # a subclass is the router's own word, no lost connection
            raise
        number = num_tokens.total()
        told = f"the answer broke off after {number} token{'s' * (number != 1)}: {error}"
        raise Unavailable(told, retry_after_s=error.retry_after_s) from error
    else:
        if not is_complete:
            raise Internal("the answer ended without its summary")
    finally:
        call.cancel()  # nothing happens if it has ended
