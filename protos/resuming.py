"""One answer over all the streams that it may take: where one breaks off, the next goes on behind what has come.

Any router can do that, also one that knows nothing of the request: it is told the tokens, and which token follows is a
function of the prompt, the sampling with its seed, and the position.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from protos import inference_pb2 as pb
from protos.channel import service_errors
from protos.errors import AlreadyExists, DeadlineExceeded, Internal, Interrupted, ServiceError, Unavailable
from protos.routers import Router, Routers

Asked: TypeAlias = pb.GenerateRequest | pb.ChatRequest
Stream: TypeAlias = AsyncGenerator[pb.GenerateResponse, None]
Ask: TypeAlias = Callable[[Router, Asked, "float | None"], Stream]
"""Has a router answer a request, within so many seconds. Raises ServiceError."""

MAX_RESUMES = 3  # in a row without a token
MAX_REFUSALS = 25  # beside them, where a router has not noticed yet that we are gone: to it the request is in flight
_DELAY_S = 0.1  # doubled with each of them
_MAX_DELAY_S = 1.0


class Resuming:
    """The messages of one answer, or of several to one prompt."""

    def __init__(self, routers: Routers, ask: Ask, request: Asked, deadline_s: float | None) -> None:
        """`request` is changed: it says what has come."""
        self._routers = routers
        self._ask = ask
        self._request = request
        self._deadline_at = None if deadline_s is None else time.monotonic() + deadline_s
        self._remaining_s = deadline_s
        self._num_tokens = Counter({choice: len(each.ids) for choice, each in enumerate(request.emitted)})
        self._has_prompt = False
        self._finished: set[int] = set()  # choices whose last token is there
        self._num_failed = self._num_refused = 0  # in a row
        self._has_failed = False

    async def messages(self) -> Stream:
        """Checks that no token of any answer is missing or repeated, and that there is an end.

        Raises:
            Internal: it is not so. Unavailable: nobody is there, or is no longer; says after how many tokens.
        """
        while True:
            router = self._routers.current
            try:
                async with aclosing(self._ask(router, self._request, self._remaining_s)) as stream:
                    async for message in stream:
                        if message.HasField("usage"):
                            yield message
                            return
                        if not self._is_known(message):
                            self._take(message)
                            yield message
                raise Internal("the answer ended without its summary")
            except ServiceError as error:
                await self._prepare_next(router, error)

    def _is_known(self, message: pb.GenerateResponse) -> bool:
        """What has ended already is asked for with its last tokens once more."""
        if message.HasField("prompt"):
            return self._has_failed and self._has_prompt
        return self._has_failed and message.choice in self._finished

    def _take(self, message: pb.GenerateResponse) -> None:
        if message.HasField("prompt"):
            self._has_prompt = True
            return
        num_known = self._num_tokens[message.choice]
        if message.output_index != num_known:
            raise Internal(f"the answer has {num_known} tokens and goes on at output_index {message.output_index}")
        self._num_tokens[message.choice] += len(message.token_ids)
        self._num_failed = self._num_refused = 0
        if message.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self._finished.add(message.choice)
            return
        while len(self._request.emitted) <= message.choice:
            self._request.emitted.add()
        self._request.emitted[message.choice].ids.extend(message.token_ids)

    async def _prepare_next(self, router: Router, error: ServiceError) -> None:
        """Waits a moment. Raises what the caller is told if there is no next stream."""
        if type(error) is Unavailable:  # a subclass is the router's own word
            self._routers.leave(router)
        is_in_flight = self._has_failed and isinstance(error, AlreadyExists)
        if is_in_flight:
            self._num_refused += 1
        else:
            self._num_failed += 1
        if not (self._num_refused <= MAX_REFUSALS if is_in_flight else self._may_go_on(error)):
            raise self._told(error)
        self._has_failed = True
        num_in_vain = self._num_failed + self._num_refused - len(self._routers)
        delay_s = 0.0 if num_in_vain < 0 else min(_MAX_DELAY_S, _DELAY_S * 2**num_in_vain)
        if self._deadline_at is not None:
            self._remaining_s = self._deadline_at - time.monotonic() - delay_s
            if self._remaining_s <= 0:
                raise DeadlineExceeded(
                    f"the deadline passed after {_tokens(self._num_tokens.total())}; {error}"
                ) from error
        await asyncio.sleep(delay_s)

    def _may_go_on(self, error: ServiceError) -> bool:
        if type(error) not in (Unavailable, Interrupted):
            return False
        has_tokens = self._num_tokens.total() > 0
        if self._has_prompt and not has_tokens:
            return False
        if has_tokens or isinstance(error, Interrupted):
            return self._num_failed < MAX_RESUMES + len(self._routers)
        return self._num_failed < len(self._routers)

    def _told(self, error: ServiceError) -> ServiceError:
        num_tokens = self._num_tokens.total()
        if not num_tokens or type(error) is not Unavailable:
            return error
        told = Unavailable(
            f"the answer broke off after {_tokens(num_tokens)}: {error}", retry_after_s=error.retry_after_s
        )
        told.__cause__ = error
        return told


def _tokens(number: int) -> str:
    return f"{number} token{'s' * (number != 1)}"


async def generated(router: Router, request: Asked, timeout_s: float | None) -> Stream:
    """Through the router."""
    chats, inference = isinstance(request, pb.ChatRequest), router.inference
    call = (inference.Chat if chats else inference.Generate)(request, timeout=timeout_s)  # type: ignore[arg-type]
    try:
        with service_errors(router.nobody_there):
            async for message in call:
                yield message
    finally:
        call.cancel()  # nothing happens if it has ended
