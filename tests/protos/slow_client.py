"""A gRPC client that reads its connection and never its stream: it gives no room for more than a first window."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
WINDOW = 65_535  # bytes of a stream, until the client gives more; what HTTP/2 begins with
INITIAL_WINDOW_SIZE = b"\0\4"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _header(name: str, value: str) -> bytes:
    """A literal in HPACK, without its compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class SlowClient:
    """Makes one call on one connection. Answers pings: the connection is alive."""

    def __init__(self, address: str, method: str, message: bytes | None, window: int = WINDOW) -> None:
        """Without a message it never gets further than the headers of its call."""
        self._address = address
        self._window = window
        names = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "a", "te": "trailers"}
        headers = b"".join(_header(*pair) for pair in (*names.items(), ("content-type", "application/grpc")))
        self._request = frame(HEADERS, END_HEADERS, 1, headers)
        if message is not None:
            self._request += frame(DATA, END_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message)
        self.num_bytes = 0  # of the stream
        self.headers: list[bytes] = []  # as they came: trailers are the last
        self.is_full = asyncio.Event()

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        own = INITIAL_WINDOW_SIZE + self._window.to_bytes(4, "big")
        settings = frame(SETTINGS, 0, 0, own) + frame(SETTINGS, ACK, 0)
        self._writer.write(PREFACE + settings + self._request)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def give_room(self, num_bytes: int) -> None:
        """Reads on."""
        for stream in (0, 1):
            self._writer.write(frame(WINDOW_UPDATE, 0, stream, num_bytes.to_bytes(4, "big")))

    async def trailers(self) -> bytes:
        while len(self.headers) < 2:
            await asyncio.sleep(0.01)
        return self.headers[-1]

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                match head[3]:
                    case 0:
                        self.num_bytes += len(payload)
                        if self.num_bytes == self._window:
                            self.is_full.set()
                    case 1:
                        self.headers.append(payload)
                    case 6 if not head[4] & ACK:
                        self._writer.write(frame(PING, ACK, 0, payload))
