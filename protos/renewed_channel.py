"""A channel that shows credentials with each call, and that connects anew when its certificates have been replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio

from protos.credentials import Metadata
from protos.tls import Pems
from protos.watched import Watched

Connect: TypeAlias = Callable[[Pems | None], grpc.aio.Channel]


class RenewedChannel(grpc.aio.Channel):
    """Calls go by the newest connection; an earlier one is closed when its last call has ended.

    gRPC's own call credentials are for TLS only, and its interceptors cost something for every message of a stream.
    """

    def __init__(self, connect: Connect, metadata: Callable[[], Metadata], pems: Watched[Pems] | None) -> None:
        self._connect = connect
        self._pems = pems
        self.metadata = metadata
        self._line = self._connected()
        self._earlier: set[_Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def line(self) -> _Line:
        """The connection for the next call."""
        if self._pems is not None and self._pems.value is not self._line.pems:
            earlier, self._line = self._line, self._connected()
            self._earlier.add(earlier)
            self._close_if_unused(earlier)
        return self._line

    def ended(self, line: _Line) -> None:
        line.num_calls -= 1
        self._close_if_unused(line)

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(line.channel.close(grace) for line in (self._line, *self._earlier)), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._line.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._line.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.line().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", arguments, options)

    def _connected(self) -> _Line:
        pems = None if self._pems is None else self._pems.value
        return _Line(self._connect(pems), pems)

    def _close_if_unused(self, line: _Line) -> None:
        if line in self._earlier and line.num_calls == 0:
            self._earlier.remove(line)
            task = asyncio.get_running_loop().create_task(line.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Line:
    """One connection, made with these certificates."""

    def __init__(self, channel: grpc.aio.Channel, pems: Pems | None) -> None:
        self.channel = channel
        self.pems = pems
        self.num_calls = 0


class _Method:
    """Stands for gRPC's multi-callable of the four kinds."""

    def __init__(self, owner: RenewedChannel, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._owner = owner
        self._make: Callable[[grpc.aio.Channel], Callable[..., Any]] = lambda channel: getattr(channel, kind)(
            *arguments, **options
        )
        self._line: _Line | None = None
        self._start: Callable[..., Any] | None = None

    def __call__(self, *request: Any, metadata: Metadata | None = None, **options: Any) -> Any:
        line = self._owner.line()
        if self._start is None or line is not self._line:
            self._line, self._start = line, self._make(line.channel)
        call = self._start(*request, metadata=(*(metadata or ()), *self._owner.metadata()), **options)
        line.num_calls += 1
        call.add_done_callback(lambda _: self._owner.ended(line))
        return call
