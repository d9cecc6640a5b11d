"""The load generators of the router's bench count what servers send, and the mock workers send what they were asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.router_load import placement_us
from bench.router_load_asker import AnswerBroken, Asked, Connection, Load, Tally, ask_here
from bench.router_load_http import HttpLoad, HttpRefused, ask_http_here
from bench.router_load_http_worker import serve_http_worker
from bench.router_load_worker import MockDecode, Pace, now_us
from decode.bundles import serve_decode
from protos import decode_pb2, decode_pb2_grpc
from protos import inference_pb2 as pb
from protos.channel import open_channel
from protos.serve import GrpcServer

STEP_US = 10_000


@asynccontextmanager
async def mock_worker() -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1", 0)
    serve_decode(server, MockDecode())  # type: ignore[abstract]
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def asked(address: str, num_streams: int, num_tokens: int, pace: Pace) -> Asked:
    now_s = time.monotonic()
    return await ask_here(Load((address,), num_streams, num_tokens, pace, now_s, now_s + 0.5, is_straight=True))


def test_pace_travels_as_a_seed() -> None:
    for pace in (Pace(10, False), Pace(20_000, True)):
        assert Pace.of_seed(pace.seed) == pace


async def test_mock_answers_to_the_token_at_its_pace() -> None:
    request = decode_pb2.DecodeRequest(attempt_id="a", token_ids=[1, 2], num_prompt_tokens=2, prefill_here=True)
    request.sampling.max_tokens, request.sampling.seed = 7, Pace(STEP_US, gathers=True).seed
    began_us = now_us()
    async with mock_worker() as address, open_channel(address) as channel:
        messages = [message async for message in decode_pb2_grpc.DecodeStub(channel).Decode(request)]
    made_us = [token for message in messages for token in message.token_ids]
    assert [token - made_us[0] for token in made_us] == [index * STEP_US for index in range(7)]
    assert began_us < made_us[0] and made_us[-1] <= now_us()
    assert [message.output_index for message in messages] == [made_us.index(one.token_ids[0]) for one in messages]
    assert "".join(message.text for message in messages) == "word " * 7
    assert [message.finish_reason for message in messages][-1] == pb.FINISH_REASON_LENGTH


async def test_asker_keeps_its_streams_going_and_counts_tokens_messages_and_answers() -> None:
    async with mock_worker() as address:
        found = await asked(address, 3, 5, Pace(100, gathers=False))
    assert found.num_messages == found.num_tokens == len(found.latencies_us) > 100
    assert abs(found.num_answers - found.num_tokens / 5) <= 3  # those that were running
    assert min(found.latencies_us) >= 0


async def test_asker_understands_frames_however_they_are_cut() -> None:
    """As a real server sends them, and byte by byte."""
    taken = []
    for size in (1, 7, 10_000):
        tally = Tally(is_on=True)
        connection = Connection("/", 0, lambda: b"", tally)
        connection.expect(1)
        raw = pb.GenerateResponse(token_ids=[5, 6], finish_reason=pb.FINISH_REASON_STOP).SerializeToString()
        message = b"\0" + len(raw).to_bytes(4, "big") + raw
        frames = b"".join(
            len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
            for kind, flags, stream, payload in (
                *((4, 0, 0, b""), (1, 4, 1, b"\x88"), (0, 0, 1, message[:3])),
                *((8, 0, 0, b"\0\0\0\1"), (0, 0, 1, message[3:] + message)),
            )
        )
        for at in range(0, len(frames), size):
            connection.data_received(frames[at : at + size])
        taken.append((tally.num_tokens, tally.num_messages))
        connection.close()
    assert taken == [(4, 2)] * 3


async def test_broken_answer_ends_the_measurement() -> None:
    async with mock_worker() as address:
        connection = Connection("/pdserve.v1.Decode/Nothing", 1, lambda: b"", Tally())
        await connection.connect(address)
        with pytest.raises(AnswerBroken, match="before it was whole"):
            await asyncio.wait_for(asyncio.shield(connection.failed), 5)
        connection.close()


async def test_http_asker_counts_events_of_answer_after_answer() -> None:
    async with await serve_http_worker() as server:
        port = server.sockets[0].getsockname()[1]
        now_s = time.monotonic()
        tokens_per_s = await ask_http_here(HttpLoad(port, "mock", 4, 50, now_s, now_s + 0.5))
        assert tokens_per_s * 0.5 > 4 * 50  # more than one answer each


async def test_http_refusal_ends_the_measurement() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(HttpRefused, match="404"):
            await ask_http_here(HttpLoad(port, "mock", 1, 50, time.monotonic(), time.monotonic() + 5))


def test_placement_is_timed() -> None:
    assert placement_us(4) > 0
