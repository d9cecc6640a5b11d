"""A mock worker that speaks OpenAI's HTTP, for routers that only pass it on: equal in pace to the one that speaks gRPC.

What was made while the last chunk was being written comes as one chunk, an event for each token.
"""

from __future__ import annotations

import asyncio
import json

from bench.router_load_worker import now_us

_STEP_US = 500
_EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"mock",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_ABOUT = {"model_path": "mock", "served_model_name": "mock", "object": "list", "data": [{"id": "mock"}]}


async def serve_http_worker() -> asyncio.Server:
    return await asyncio.start_server(_serve, "127.0.0.1", 0)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            if head.startswith("POST"):
                await _stream(writer, json.loads(body)["max_tokens"])
            else:
                about = json.dumps(_ABOUT).encode()
                length = f"Content-Length: {len(about)}\r\n\r\n".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + length + about)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # it has gone
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(_STREAM_HEAD)
    first_step, index = now_us() // _STEP_US, 0
    while index < num_tokens:
        due = min(now_us() // _STEP_US - first_step, num_tokens)
        if due <= index:
            await asyncio.sleep(((first_step + index + 1) * _STEP_US - now_us()) / 1e6)
            continue
        writer.write(_chunk(_EVENT * (due - index)))
        await writer.drain()
        index = due
    writer.write(_chunk(_DONE) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
