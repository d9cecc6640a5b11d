"""Asks an OpenAI HTTP server for many streams at once, over bare sockets: the load generator for the router's peers.

Each event with a text counts as a token: that is how the peers send them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

_EVENT, _ANSWER_END = b"data: {", b"data: [DONE]"
_CHUNKS_END = b"0\r\n\r\n"


class HttpRefused(Exception):
    """The server said something else than 200, or hung up."""


@dataclass(frozen=True, slots=True)
class HttpLoad:
    """Between two instants of CLOCK_MONOTONIC, as `router_load_asker.Load`."""

    port: int
    model: str
    num_streams: int
    num_tokens: int  # of each answer
    begin_s: float
    end_s: float

    @property
    def request(self) -> bytes:
        asked = {"model": self.model, "prompt": "one two three", "max_tokens": self.num_tokens, "stream": True}
        body = json.dumps({**asked, "ignore_eos": True, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


class _Tally:
    is_on = False
    num_events = 0


class _Stream(asyncio.Protocol):
    """Answer after answer on one connection."""

    def __init__(self, request: bytes, tally: _Tally, failed: asyncio.Future[None]) -> None:
        self._request, self._tally, self._failed = request, tally, failed
        self._transport: asyncio.Transport | None = None
        self._seen = b""  # a mark may have come in part
        self._is_head = True

    async def connect(self, port: int) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._seen + data
        if self._is_head:
            self._is_head = False
            if b" 200 " not in data[:20]:
                self._fail(data[:300].decode(errors="replace"))
        num_events = data.count(_EVENT)
        if self._tally.is_on:
            self._tally.num_events += num_events
        if (at := data.find(_ANSWER_END)) >= 0 and _CHUNKS_END in data[at:] and self._transport is not None:
            self._seen, self._is_head = b"", True
            self._transport.write(self._request)
        else:
            last = max(data.rfind(_EVENT) + len(_EVENT), 0) if num_events else 0
            self._seen = data[at:] if at >= 0 else data[max(last, len(data) - len(_ANSWER_END)) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, problem: str) -> None:
        if not self._failed.done():
            self._failed.set_exception(HttpRefused(problem))


def ask_http(load: HttpLoad) -> float:
    """Tokens/s. In a process of its own. Raises HttpRefused."""
    return asyncio.run(ask_http_here(load))


async def ask_http_here(load: HttpLoad) -> float:
    tally = _Tally()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    streams = [_Stream(load.request, tally, failed) for _ in range(load.num_streams)]
    try:
        for stream in streams:
            await stream.connect(load.port)
        await _until(load.begin_s, failed)
        tally.is_on, began_s = True, time.monotonic()
        await _until(load.end_s, failed)
        return tally.num_events / (time.monotonic() - began_s)
    finally:
        failed.cancel()
        for stream in streams:
            stream.close()


async def _until(at_s: float, failed: asyncio.Future[None]) -> None:
    done, _ = await asyncio.wait([failed], timeout=at_s - time.monotonic())
    for one in done:
        one.result()
