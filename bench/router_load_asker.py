"""Asks for many streams at once, and takes little time for it: the load generator of the router's bench.

An HTTP/2 client with no more than a gRPC stream needs. gRPC's own takes as long to read a message as the router does to
pass it on; this one takes a tenth, so that the router is what is measured. Windows are so large that none is renewed.
"""

from __future__ import annotations

import asyncio
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.router_load_worker import Pace, now_us
from protos import decode_pb2
from protos import inference_pb2 as pb

STREAMS_PER_CONNECTION = 64

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_WINDOW_UPDATE = 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_LARGEST_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65535
_INITIAL_WINDOW_SIZE = 4  # the setting
_FRAME = struct.Struct(">HBBBI")  # size in 24 bits, kind, flags, stream
_PREFIX = struct.Struct(">BI")  # of a gRPC message: not compressed, size
_PROMPT = tuple(range(1, 17))
_GENERATE, _DECODE = "/pdserve.v1.Inference/Generate", "/pdserve.v1.Decode/Decode"


class AnswerBroken(Exception):
    """The other side ended a stream or the connection otherwise than with a whole answer."""


@dataclass(slots=True)
class Tally:
    """What came while `is_on`. Latencies are of each token, in microseconds."""

    is_on: bool = False
    num_tokens: int = 0
    num_messages: int = 0
    num_answers: int = 0
    latencies_us: array[int] = field(default_factory=lambda: array("q"))

    def take(self, raw: bytes) -> None:
        if not self.is_on:
            return
        token_ids = pb.GenerateResponse.FromString(raw).token_ids
        if token_ids:
            now = now_us()
            self.num_messages += 1
            self.num_tokens += len(token_ids)
            self.latencies_us.extend(now - made_us for made_us in token_ids)


class Connection(asyncio.Protocol):
    """Keeps `num_streams` answers coming until it is closed: where one ends, the next is asked for."""

    def __init__(self, path: str, num_streams: int, request: Callable[[], bytes], tally: Tally) -> None:
        self._path, self._num_streams, self._request, self._tally = path, num_streams, request, tally
        self._transport: asyncio.Transport | None = None
        self._headers = b""
        self._rest = b""  # a frame that has not come whole
        self._parts: dict[int, bytes] = {}  # by stream: a message that has not
        self._last: dict[int, bytes] = {}  # by stream: the message before
        self._next_stream = 1
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._headers = _header_block(
            (":method", "POST"),
            (":scheme", "http"),
            (":path", self._path),
            (":authority", "bench"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        window = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))
        transport.write(b"".join(self._asked() for _ in range(self._num_streams)))

    def data_received(self, data: bytes) -> None:
        data, at, replies = self._rest + data, 0, list[bytes]()
        while len(data) - at >= _FRAME.size:
            size_high, size_low, kind, flags, stream = _FRAME.unpack_from(data, at)
            begin, end = at + _FRAME.size, at + _FRAME.size + (size_high << 8 | size_low)
            if end > len(data):
                break
            if kind == _DATA:
                self._take(stream, data[begin:end])
            elif kind == _HEADERS and flags & _END_STREAM:
                self._check_whole(stream)
                replies.append(self._asked())
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                replies.append(_frame(kind, _ACK, 0, data[begin:end] if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                self._fail(f"it was ended by frame {kind}: {data[begin:end]!r}")
            at = end
        self._rest = data[at:]
        if replies and self._transport is not None:
            self._transport.write(b"".join(replies))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error}")

    def close(self) -> None:
        self.failed.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _asked(self) -> bytes:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.expect(stream)
        request = self._request()
        body = _PREFIX.pack(0, len(request)) + request
        return _frame(_HEADERS, _END_HEADERS, stream, self._headers) + _frame(_DATA, _END_STREAM, stream, body)

    def expect(self, stream: int) -> None:
        """An answer in this stream."""
        self._parts[stream] = self._last[stream] = b""

    def _take(self, stream: int, payload: bytes) -> None:
        data, at = self._parts[stream] + payload, 0
        while len(data) - at >= _PREFIX.size:
            _, size = _PREFIX.unpack_from(data, at)
            begin, end = at + _PREFIX.size, at + _PREFIX.size + size
            if end > len(data):
                break
            self._last[stream] = raw = data[begin:end]
            self._tally.take(raw)
            at = end
        self._parts[stream] = data[at:]

    def _check_whole(self, stream: int) -> None:
        """The router's last message has the usage, a worker's the reason."""
        del self._parts[stream]
        last = pb.GenerateResponse.FromString(self._last.pop(stream))
        if not last.HasField("usage") and not last.finish_reason:
            self._fail("an answer ended before it was whole")
        elif self._tally.is_on:
            self._tally.num_answers += 1

    def _fail(self, problem: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(AnswerBroken(problem))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _header_block(*fields: tuple[str, str]) -> bytes:
    """Literals that are not indexed (RFC 7541, 6.2.2), none of 127 bytes or more."""
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask for, and between which instants of CLOCK_MONOTONIC to count. `is_straight`: of a worker itself."""

    addresses: tuple[str, ...]
    num_streams: int
    num_tokens: int  # of each answer
    pace: Pace
    begin_s: float
    end_s: float
    is_straight: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    seconds: float
    num_tokens: int
    num_messages: int
    num_answers: int
    cpu_s: float
    latencies_us: Sequence[int]


def ask(load: Load) -> Asked:
    """In a process of its own. Raises AnswerBroken."""
    return asyncio.run(ask_here(load))


async def ask_here(load: Load) -> Asked:
    tally = Tally()
    connections = list[Connection]()
    path, request = (_DECODE, _decode_request) if load.is_straight else (_GENERATE, _generate_request)
    try:
        for first in range(0, load.num_streams, STREAMS_PER_CONNECTION):
            connection = Connection(
                path, min(STREAMS_PER_CONNECTION, load.num_streams - first), lambda: request(load), tally
            )
            connections.append(connection)
            await connection.connect(load.addresses[len(connections) % len(load.addresses)])
        await _until(load.begin_s, connections)
        tally.is_on, began_s, began_cpu_s = True, time.monotonic(), time.process_time()
        await _until(load.end_s, connections)
        cpu_s, seconds = time.process_time() - began_cpu_s, time.monotonic() - began_s
    finally:
        for connection in connections:
            connection.close()
    return Asked(seconds, tally.num_tokens, tally.num_messages, tally.num_answers, cpu_s, tally.latencies_us)


async def _until(at_s: float, connections: Sequence[Connection]) -> None:
    done, _ = await asyncio.wait(
        [connection.failed for connection in connections],
        timeout=at_s - time.monotonic(),
        return_when=asyncio.FIRST_COMPLETED,
    )
    for failed in done:
        failed.result()


def _sampling(load: Load) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=load.num_tokens, seed=load.pace.seed, ignore_eos=True)


def _generate_request(load: Load) -> bytes:
    prompt = pb.TokenIds(ids=_PROMPT)
    return pb.GenerateRequest(token_ids=prompt, sampling=_sampling(load)).SerializeToString()


def _decode_request(load: Load) -> bytes:
    return decode_pb2.DecodeRequest(
        attempt_id="bench",
        token_ids=_PROMPT,
        num_prompt_tokens=len(_PROMPT),
        sampling=_sampling(load),
        prefill_here=True,
    ).SerializeToString()
