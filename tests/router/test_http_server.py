"""Clients that are slow, silent, gone or speak no HTTP: what they may cost, and what they are told."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.http_server import HttpServer
from tests.router.scripted_service import ScriptedService, Step, served, summary, text

BODY = b'{"prompt": "hi", "stream": true}'
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def asking(body: bytes = BODY, headers: bytes = b"") -> bytes:
    return ASK + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def endless(message: object) -> Iterable[Step]:
    return itertools.repeat(text("x" * 10_000))


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def until_open(service: ScriptedService, number: int) -> None:
    async with asyncio.timeout(5):
        while service.num_open != number:
            await asyncio.sleep(0.001)


async def status_and_error(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    status, content = await status_and_content(reader)
    return status, content["error"]


async def status_and_content(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def standing_still(service: ScriptedService) -> int:
    """Returns how many messages were sent when no more are, for longer than a message takes many times over."""
    async with asyncio.timeout(20):
        while True:
            before = service.num_sent
            await asyncio.sleep(0.3)
            if service.num_sent == before:
                return before


async def test_reader_that_is_slow_holds_the_answer_back_and_gets_all_of_it() -> None:
    async with served(service := ScriptedService(endless)) as server, connected(server) as (reader, writer):
        writer.write(asking())
        first = await standing_still(service)
        assert service.num_open == 1 and first * 10_000 < 32 * 2**20  # what sockets of two processes hold
        for _ in range(200):
            await reader.readexactly(100_000)
        assert await standing_still(service) > first
        writer.transport.abort()
        await until_open(service, 0)


async def test_reader_that_takes_nothing_is_ended_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http_server._SILENT_READER_S", 1.0)
    async with served(service := ScriptedService(endless)) as server, connected(server) as (_, writer):
        writer.write(asking())
        await until_open(service, 1)
        await until_open(service, 0)


async def test_client_that_leaves_before_the_first_word_ends_its_request() -> None:
    async with served(service := ScriptedService(lambda message: [summary()])) as server:
        service.may_end.clear()
        async with connected(server) as (_, writer):
            writer.write(asking())
            await until_open(service, 1)
        await until_open(service, 0)


async def test_connections_that_bring_no_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http_server._HEADERS_S", 0.05)
    async with served(ScriptedService(endless)) as server:
        for said in (b"", b"POST /v1/compl", ASK):
            async with connected(server) as (reader, writer):
                writer.write(said)
                assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_headers_may_come_in_pieces_and_connections_are_used_again() -> None:
    service = ScriptedService(lambda message: [text("a", end="stop"), summary()])
    async with served(service) as server, connected(server) as (reader, writer):
        for _ in range(2):
            for byte in asking(b'{"prompt": "hi"}'):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            status, content = await status_and_content(reader)
            assert status == 200 and content["choices"][0]["text"] == "a"


async def test_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http_call._BODY_S", 0.05)
    async with served(ScriptedService(endless)) as server, connected(server) as (reader, writer):
        writer.write(ASK + b"content-length: 100\r\n\r\n{")
        status, error = await status_and_error(reader)
        assert (status, error["code"]) == (408, "timeout")
        assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_bodies_that_are_too_large() -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    async with served(service := ScriptedService(endless)) as server:
        async with connected(server) as (reader, writer):
            writer.write(ASK + b"content-length: 99999999999\r\n\r\n")
            assert (await status_and_error(reader))[0] == 413
        async with connected(server) as (reader, writer):
            writer.write(ASK + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(257):
                writer.write(chunk)
            status, error = await status_and_error(reader)
            assert status == 413 and "at most 16777216 bytes" in str(error["message"])
        assert service.asked == []


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 2**20 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * 200_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        ASK + b"content-length: -1\r\n\r\n",
        ASK + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
    ],
)
async def test_what_is_no_http(said: bytes) -> None:
    async with served(ScriptedService(endless)) as server:
        async with connected(server) as (reader, writer):
            writer.write(said)
            try:
                status, error = await status_and_error(reader)
                assert status == 400 and "no HTTP request" in str(error["message"])
            except ConnectionResetError:  # it came while there was more to send
                assert len(said) > 2**20
        async with connected(server) as (reader, writer):  # the next one is served
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"200"


async def test_wrong_content_types() -> None:
    for kind in (
        b"text/plain",
        b"application/x-www-form-urlencoded",
        b"application/jsonp",
        b"multipart/form-data",
        b"",
    ):
        async with served(ScriptedService(endless)) as server, connected(server) as (reader, writer):
            head = ASK.replace(b"application/json", kind)
            writer.write(head + b"content-length: 2\r\n\r\n{}")
            assert (await status_and_error(reader))[0] == 415


async def test_nothing_there_and_wrong_methods() -> None:
    async with served(ScriptedService(endless)) as server, connected(server) as (reader, writer):
        writer.write(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await status_and_error(reader))[0] == 404
        writer.write(b"DELETE /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await status_and_error(reader))[0] == 405


async def test_websockets_are_not_spoken() -> None:
    async with served(ScriptedService(endless)) as server, connected(server) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"200"


async def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(lambda scope, receive, send: None, "127.0.0.1", port)  # type: ignore[arg-type, return-value]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use; .* --http-port"):
            await server.start()
        await server.stop()


async def test_stopping_does_not_wait_for_a_reader_that_takes_nothing() -> None:
    async with served(service := ScriptedService(endless)) as server, connected(server) as (_, writer):
        writer.write(asking())
        await standing_still(service)
        async with asyncio.timeout(10):
            await server.stop()
        assert service.num_open == 0
