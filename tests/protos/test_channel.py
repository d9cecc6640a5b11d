"""A channel waits for a peer that is busy, and not for one that is gone."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import open_channel, service_errors
from protos.errors import Unavailable
from protos.serve import GrpcServer, ServerLimits
from tests.protos.echo import Echo, running_echo

BUSY_S = 0.5
KEEPALIVE_S = 1.0
EMPTY_SETTINGS, SETTINGS_TAKEN = b"\0\0\0\x04\0\0\0\0\0", b"\0\0\0\x04\x01\0\0\0\0"  # frames of HTTP/2


async def test_a_peer_that_is_slow_to_answer_a_connection_is_reached() -> None:
    """On a busy machine a process may not get to it for longer than a connection usually takes."""
    async with running_echo() as (_, server, _):
        host, _, port = server.address.rpartition(":")

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(BUSY_S)
            to_read, to_write = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pump(reader, to_write), pump(to_read, writer))

        async with await asyncio.start_server(pass_on, "127.0.0.1", 0) as busy:
            address, number = busy.sockets[0].getsockname()
            async with open_channel(f"{address}:{number}") as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                answer = await stub.GetModel(inference_pb2.GetModelRequest(model="fine"), timeout=10)
    assert answer.name == "fine"


async def test_a_peer_that_answers_no_ping_is_given_up() -> None:
    """As one does that was stopped, or cut off from the network: it closes nothing."""
    server = GrpcServer("127.0.0.1", 0, limits=ServerLimits(keepalive_s=KEEPALIVE_S))
    server.add(inference_pb2_grpc.add_InferenceServicer_to_server, Echo())
    await server.start()
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EMPTY_SETTINGS + SETTINGS_TAKEN)
        started = time.monotonic()
        async with asyncio.timeout(10 * KEEPALIVE_S):
            while await reader.read(4096):
                pass
        assert time.monotonic() - started >= KEEPALIVE_S
    finally:
        writer.close()
        await server.stop()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(data)
    writer.close()


async def test_a_peer_that_is_gone_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        started = time.monotonic()
        with pytest.raises(Unavailable), service_errors():
            await inference_pb2_grpc.InferenceStub(channel).GetModel(inference_pb2.GetModelRequest(), timeout=10)
        assert time.monotonic() - started < BUSY_S
