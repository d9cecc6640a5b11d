"""One HTTP call: its body within limits, and its answer, whole or as server-sent events, or what went wrong instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from router.openai_errors import Problem

MAX_BODY_BYTES = 16 * 2**20
_BODY_S = 60.0  # for the whole body to come


class Call:
    """Sends go through uvicorn's flow control: they wait while the reader is behind, and nothing piles up here."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.headers = Headers(scope=scope)
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.is_started = False
        self._request = Request(scope, receive)
        self._receive = receive
        self._send = send

    async def body(self) -> bytes:
        """Raises Problem for one that is no JSON by its type, too large or too slow, and ClientDisconnect."""
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            told = f"the content type is {kind[:100]!r}; it must be application/json"
            raise Problem(415, told, param="content-type", code="unsupported_media_type")
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        parts, num_bytes = [], 0
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in self._request.stream():
                    num_bytes += len(part)
                    if num_bytes > MAX_BODY_BYTES:
                        raise _too_large()
                    parts.append(part)
        except TimeoutError:
            told = f"the body was not complete after {_BODY_S:g} s"
            raise Problem(408, told, code="timeout", headers={"connection": "close"}) from None
        return b"".join(parts)

    async def while_connected(self, work: Coroutine[None, None, None]) -> None:
        """After `body`. Raises what it raises; ends it at once, and raises ClientDisconnect, when the client leaves."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._client_left())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
        if working.cancelled():
            raise ClientDisconnect
        working.result()

    async def reply(self, content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer."""
        body = as_json(content) + b"\n"
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body))}, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, events: bytes) -> None:
        """Some server-sent events, as `event` makes them; the first ones begin the answer."""
        if not self.is_started:
            await self._start(200, {"content-type": "text/event-stream", "cache-control": "no-store"})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """Of events."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, problem: Problem) -> None:
        """As a status, or where events have begun, as the last of them."""
        if self.is_started:
            await self.write(event(problem.body))
            await self.end()
        else:
            await self.reply(problem.body, problem.status, problem.headers)

    async def _client_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str], more: Mapping[str, str] | None = None) -> None:
        self.is_started = True
        own = {**headers, **(more or {}), "x-request-id": self.request_id}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in own.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def event(content: object) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


def as_json(content: object) -> bytes:
    return _encoder.encode(content).encode()


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _too_large() -> Problem:
    told = f"the body is too large; at most {MAX_BODY_BYTES} bytes are taken"
    return Problem(413, told, code="request_too_large", headers={"connection": "close"})
