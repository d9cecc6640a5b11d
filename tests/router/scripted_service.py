"""A service behind the doors that answers what a test says, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from protos import inference_pb2 as pb
from protos.caller import Authenticator, Caller, current_caller
from protos.errors import ServiceError
from router.http_server import HttpServer
from router.openai_server import OpenAIDoor
from tests.router.fakes import CARD

Step = pb.GenerateResponse | ServiceError
"""What comes next: a message, or the end by an error."""

Script = Callable[[pb.GenerateRequest | pb.ChatRequest], Iterable[Step]]


class ScriptedService:
    """`script` gives the answer to one request."""

    def __init__(self, script: Script) -> None:
        self.is_draining = False
        self.asked: list[pb.GenerateRequest | pb.ChatRequest] = []
        self.remaining_s: list[float | None] = []
        self.callers: list[Caller] = []
        self.num_open = 0
        self.num_sent = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._script = script

    def generate(self, message: pb.GenerateRequest, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        return self._answer(message, remaining_s)

    def chat(self, message: pb.ChatRequest, remaining_s: float | None) -> AsyncGenerator[bytes, None]:
        return self._answer(message, remaining_s)

    def model(self) -> pb.Model:
        return pb.Model(name="tiny", max_context_tokens=256)

    async def _answer(
        self, message: pb.GenerateRequest | pb.ChatRequest, remaining_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        self.asked.append(message)
        self.remaining_s.append(remaining_s)
        self.callers.append(current_caller.get())
        self.num_open += 1
        try:
            for step in self._script(message):
                await asyncio.sleep(0)  # as where messages come from a worker
                if isinstance(step, ServiceError):
                    raise step
                if step.HasField("usage"):
                    await self.may_end.wait()
                self.num_sent += 1
                yield step.SerializeToString()
        finally:
            self.num_open -= 1


@asynccontextmanager
async def served(service: ScriptedService, authenticator: Authenticator | None = None) -> AsyncIterator[HttpServer]:
    door = OpenAIDoor(service, CARD, lambda: True, authenticator)
    server = HttpServer(door.app, "127.0.0.1", 0)
    await server.start()
    try:
        yield server
    finally:
        service.may_end.set()
        await server.stop()


def text(said: str, choice: int = 0, end: str = "") -> pb.GenerateResponse:
    """One token for each message; `end` is how the answer ends with it, if it does."""
    reason = {"": 0, "stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}[end]
    return pb.GenerateResponse(token_ids=[7], text=said, choice=choice, finish_reason=reason)  # type: ignore[arg-type]


def summary(prompt_tokens: int = 3, output_tokens: int = 2, cached: int = 1) -> pb.GenerateResponse:
    prefill = pb.PromptTokens(computed=prompt_tokens - cached, cached=cached)
    usage = pb.Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefill=prefill)
    return pb.GenerateResponse(usage=usage, timeline=pb.Timeline())
