"""Both ends of the hand-over as they are, on a network, a transport and two clocks that obey a test.

Real: Sender, Peer, Outgoing, DecodeClient, Receiver and the messages. Made up: the channel, which holds letters back;
the transfer thread, whose writes land when told; memory, which keeps for each address what was written there last.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtransfer.agent import Pieces, Region
from kvtransfer.errors import LeaseExpired, TransferFailed
from kvtransfer.geometry import CacheSpan
from kvtransfer.integrity import Verification
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_options import ReceiverOptions
from kvtransfer.transfer_thread import WriteStream
from model.kv_layout import KVLayout
from protos.errors import ServiceError
from tests.kvtransfer.cache import LAYOUT
from tests.kvtransfer.virtual_loop import VirtualLoop
from tests.kvtransfer.workers import DecodeSide

LEASE_S = 6.0
NOTICE_S = 1.0  # the sender may learn so much later than the receiver that a stream has broken
STRAY_S = 1.0  # a write may land so long after its sender has given it up
GRACE_S = NOTICE_S + STRAY_S
CALLS = ("Reserve", "Commit", "Release", "Attach")
KINDS = (*CALLS, *(f"{call} answer" for call in CALLS), "Check")
PART_BYTES = LAYOUT.layer_block_bytes
Memory = dict[int, object]  # by address of one layer's part of one block


@dataclass(eq=False)
class Letter:
    kind: str
    deliver: Callable[[], None]
    may_be_lost: bool  # what goes over a stream is not, and keeps its order


class Network:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.held_kinds: frozenset[str] = frozenset()
        self.letters: list[Letter] = []

    def send(self, letter: Letter) -> None:
        self.letters.append(letter)
        if letter.kind not in self.held_kinds:
            self.loop.call_soon(self.deliver, letter)

    def deliver(self, letter: Letter) -> None:
        if letter in self.letters:
            self.letters.remove(letter)
            letter.deliver()


class Channel:
    """What `DecodeClient` asks of a gRPC channel. It reaches whoever answers at the address by then."""

    def __init__(self, network: Network, decode: Callable[[], Decode]) -> None:
        self._network = network
        self._decode = decode
        self._calls: set[asyncio.Future[Any]] = set()
        self.streams: list[Stream] = []
        self.is_dead = False

    def unary_unary(self, path: str, **codec: Any) -> Callable[..., Any]:
        return partial(self._call, path.rpartition("/")[2])

    def unary_stream(self, path: str, **codec: Any) -> None:
        """The router's, not ours."""

    def stream_stream(self, path: str, **codec: Any) -> Callable[[AsyncIterator[Any]], Stream]:
        return self._open

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    async def _call(self, method: str, request: Any, timeout: float) -> Any:
        call: asyncio.Future[Any] = self._network.loop.create_future()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if not self.is_dead:
            self._network.send(Letter(method, partial(self._handle, method, request, call), may_be_lost=True))
        try:
            async with asyncio.timeout(timeout):
                return await call
        except TimeoutError:
            raise TransferFailed(f"{method} was not answered") from None

    def _handle(self, method: str, request: Any, call: asyncio.Future[Any]) -> None:
        handler = getattr(self._decode(), method)(request, None)
        self._network.loop.create_task(handler).add_done_callback(partial(self._answer, method, call))

    def _answer(self, method: str, call: asyncio.Future[Any], handled: asyncio.Task[Any]) -> None:
        assert isinstance(handled.exception(), ServiceError | None), handled.exception()
        self._network.send(Letter(f"{method} answer", partial(_settle, call, handled), may_be_lost=True))

    def _open(self, requests: AsyncIterator[Any]) -> Stream:
        stream = Stream(self._network, self._decode(), requests)
        self.streams.append(stream)
        return stream


def _settle(call: asyncio.Future[Any], handled: asyncio.Task[Any]) -> None:
    if call.done():
        return
    if (error := handled.exception()) is not None:
        call.set_exception(error)
    else:
        call.set_result(handled.result())


class Stream:
    """One Attach call. Each end learns of its breaking when told; both queues keep their order."""

    def __init__(self, network: Network, decode: Decode, requests: AsyncIterator[Any]) -> None:
        self._network = network
        self._upwards: asyncio.Queue[Any] = asyncio.Queue()
        self._downwards: asyncio.Queue[Any] = asyncio.Queue()
        self._pending: dict[str, list[Any]] = {"Attach": [], "Attach answer": []}
        self.broken = False
        self._sending = network.loop.create_task(self._send(requests))
        self._serving = network.loop.create_task(self._serve(decode))
        self._serving.add_done_callback(lambda task: task.cancelled() or task.result())

    async def read(self) -> Any:
        return await self._downwards.get()

    def cancel(self) -> None:
        """By the sender. What it sent before still arrives, and then the end."""
        self._sending.cancel()
        if not self.broken:
            self.broken = True
            self._post("Attach", self._upwards, None)

    def sever(self, notice_s: float) -> None:
        """The receiver learns at once, the sender later. Nothing that is under way arrives."""
        self.broken = True
        self._pending = {"Attach": [], "Attach answer": []}
        self._sending.cancel()
        self._upwards.put_nowait(None)
        self._network.loop.call_later(notice_s, self._downwards.put_nowait, None)

    async def _send(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self._post("Attach", self._upwards, request)

    async def _serve(self, decode: Decode) -> None:
        async for answer in decode.Attach(self._received(), None):
            self._post("Attach answer", self._downwards, answer)

    async def _received(self) -> AsyncIterator[Any]:
        while (request := await self._upwards.get()) is not None:
            yield request

    def _post(self, kind: str, queue: asyncio.Queue[Any], message: Any) -> None:
        self._pending[kind].append(message)
        self._network.send(Letter(kind, partial(self._next, kind, queue), may_be_lost=False))

    def _next(self, kind: str, queue: asyncio.Queue[Any]) -> None:
        if self._pending[kind]:
            queue.put_nowait(self._pending[kind].pop(0))


def parts(regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Addresses of what one layer of one block holds: there, and where it comes from."""
    for region in regions:
        for offset in range(0, region.num_bytes, PART_BYTES):
            yield region.remote_address + offset, region.local_address + offset


@dataclass(eq=False)
class MovingWrite:
    """It may land before `until`, though its sender has been told that it failed."""

    stream: WriteStream[Any]
    part: Any
    regions: Sequence[Region]
    local: Memory
    ended: Callable[[Exception | None], None]
    is_reported: bool = False
    until: float = float("inf")


class Transport:
    """The transfer thread of one sender: posts at once, ends a write when told."""

    def __init__(self, memories: Memories, local: Memory, loop: VirtualLoop) -> None:
        self._memories, self._local, self._loop = memories, local, loop
        self._is_dead = False
        self._num_moving: dict[WriteStream[Any], int] = {}
        self._draining: list[tuple[WriteStream[Any], asyncio.Future[None]]] = []

    def die(self) -> None:
        """With its process. What it has posted may land for a while."""
        self._is_dead = True
        self._memories.in_doubt = True
        for write in self._memories.writes:
            if write.local is self._local and not write.is_reported:
                write.is_reported, write.until = True, self._loop.time() + STRAY_S

    def post(self, stream: WriteStream[Any], parts: Iterable[tuple[Any, float]]) -> None:
        for part, _ in parts:
            self._post(stream, part)

    def _post(self, stream: WriteStream[Any], part: Any) -> None:
        if not stream.stopped and not self._is_dead:
            try:
                found = stream.work_out([part])
            except LeaseExpired as error:
                self._fail(stream, error)
                return
            self._num_moving[stream] = self._num_moving.get(stream, 0) + 1
            regions = found.regions() if isinstance(found, Pieces) else found
            write = MovingWrite(stream, part, regions, self._local, lambda error: self._end(write, error))
            self._memories.writes.append(write)
            if not self._memories.are_slow:
                self._memories.land(write)
            if stream.beside is not None:
                stream.beside([part])

    def drain(self, stream: WriteStream[Any]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._draining.append((stream, future))
        self._resolve()
        return future

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        future.set_result(call())
        return future

    async def close(self) -> None:
        assert not any(self._num_moving.values()), "closed while writes move"

    def _end(self, write: MovingWrite, error: Exception | None) -> None:
        stream, num_bytes = write.stream, sum(region.num_bytes for region in write.regions)
        self._num_moving[stream] -= 1
        if error is None:
            stream.sent_bytes += num_bytes
            if stream.arrived is not None:
                stream.arrived([write.part])
        else:
            self._fail(stream, error)
        self._loop.call_soon(self._resolve)

    def _fail(self, stream: WriteStream[Any], error: Exception) -> None:
        stream.stopped = True
        if not stream.has_failed:
            stream.has_failed = True
            self._loop.call_soon(stream.failed, error)

    def _resolve(self) -> None:
        for stream, future in self._draining:
            if not self._num_moving.get(stream) and not future.done():
                future.set_result(None)


class Memories:
    """The memory of every decode process that ever was, by the address it starts at; and what is being written."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.contents: Memory = {}
        self.writes: list[MovingWrite] = []
        self.are_slow = False
        self.in_doubt = False  # something has been written that should not have been, or may be yet

    def land(self, write: MovingWrite, *, wrong: bool = False) -> None:
        """Copies what is there now, not what was when it was posted; or something wrong, of which nobody is told."""
        self.writes.remove(write)
        self.in_doubt |= wrong
        for remote_address, local_address in parts(write.regions):
            self.contents[remote_address] = "wrong" if wrong else write.local.get(local_address)
        if not write.is_reported:
            write.ended(None)

    def fail(self, write: MovingWrite) -> None:
        """Its sender is told so; it may land all the same, for a while."""
        self.in_doubt = True
        if not write.is_reported:
            write.is_reported, write.until = True, self._loop.time() + STRAY_S
            write.ended(TransferFailed("made to fail"))

    def pass_time(self) -> None:
        self.writes = [write for write in self.writes if self._loop.time() < write.until]


class Sums:
    """Checksums of made-up content, as `model.block_sums` has them of bytes."""

    layers, block_bytes = range(LAYOUT.num_layers), LAYOUT.block_bytes

    def __init__(self, memory: Memory, span: CacheSpan, sums: list[int] | None = None) -> None:
        self._memory, self._span, self._sums = memory, span, sums or []

    def start(self, num_blocks: int) -> Sums:
        return Sums(self._memory, self._span, [0] * (2 * num_blocks))

    def add(self, layers: range, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for layer in layers:
            for block_id, slot in zip(block_ids, slots, strict=True):
                found = repr(self._memory.get(self._span.address(layer, block_id)))
                self._sums[2 * slot] += zlib.crc32(f"{layer} {found}".encode())

    def values(self) -> tuple[int, ...]:
        return tuple(self._sums)


def held_verification(sums: Sums, network: Network) -> Verification:
    """Of everything, when the network lets it: in no thread, and as late as any message."""

    async def run(add_up: Callable[..., Any], *what: Any) -> Any:
        may_go_on = asyncio.Event()
        network.send(Letter("Check", may_go_on.set, may_be_lost=False))
        await may_go_on.wait()
        return add_up(*what)

    return Verification(sums, 1.0, run=run)  # type: ignore[arg-type]


class Agent:
    """The sender's. Disconnecting ends what moves as failed, though it may still land."""

    def __init__(self, memories: Memories, owner: Memory) -> None:
        self._memories, self._owner = memories, owner

    def connect(self, name: str, metadata: bytes, device_id: int) -> None:
        pass

    def disconnect(self, name: str) -> None:
        for write in [*self._memories.writes]:
            if write.local is self._owner and write.stream.peer_name == name:
                self._memories.fail(write)


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def metadata(self) -> bytes:
        return b""


@dataclass(eq=False)
class _Region:
    address: int
    array: Any


class Decode(DecodeSide):
    """One process start of the decode worker, on a clock that is `offset_s` ahead of the sender's."""

    def __init__(self, number: int, num_blocks: int, network: Network, memories: Memories, offset_s: float) -> None:
        self._base = (number + 1) << 32
        cache = _Region(self._base, _Shaped((LAYOUT.num_layers, num_blocks)))
        super().__init__(_Named(f"decode-{number}"), cache, epoch=f"d{number}")  # type: ignore[arg-type]
        self.told: list[str] = []
        self.accepted: list[str] = []
        self.given_up: set[str] = set()
        self.granted: dict[str, Any] = {}  # messages, by attempt id
        self.receiver = Receiver(
            self.pool,
            LAYOUT,
            self.epoch,
            options=ReceiverOptions(lease_s=LEASE_S, quarantine_grace_s=GRACE_S),
            failed=lambda attempt_id, error: self.told.append(attempt_id),
            clock=lambda: network.loop.time() + offset_s,
            verification=held_verification(Sums(memories.contents, self.span), network),
        )

    @property
    def span(self) -> CacheSpan:
        return CacheSpan(LAYOUT, self._base, self.pool.num_blocks)

    def block_at(self, address: int) -> set[int]:
        """The block that lies there, if it is one of ours."""
        part, rest = divmod(address - self._base, PART_BYTES)
        is_ours = rest == 0 and 0 <= part < LAYOUT.num_layers * self.pool.num_blocks
        return {part % self.pool.num_blocks} if is_ours else set()

    async def Reserve(self, request: Any, context: Any) -> Any:
        ticket = await super().Reserve(request, context)
        self.granted[request.attempt_id] = ticket
        return ticket

    async def Commit(self, request: Any, context: Any) -> Any:
        answer = await super().Commit(request, context)
        assert request.attempt_id not in self.given_up, "accepted after our own side had given it up"
        self.accepted.append(request.attempt_id)
        return answer


@dataclass
class _Shaped:
    shape: tuple[int, int]


def content(prompt: int, num_tokens: int, index: int, layer: int, layout: KVLayout = LAYOUT) -> tuple[int, ...]:
    """What one layer of one block of a prompt holds once it is computed: the same for every prompt that starts so."""
    return prompt, index, layer, min(num_tokens - index * layout.block_size, layout.block_size)


@dataclass(eq=False)
class Attempt:
    """What the prefill worker does for one attempt of the router's."""

    attempt_id: str
    prompt: int
    num_tokens: int
    reserving: asyncio.Task[Any] | None = None
    local_ids: list[int] = field(default_factory=list)
    num_written_layers: int = 0
    ending: asyncio.Task[Any] | None = None

    @property
    def outgoing(self) -> Any:
        task = self.reserving
        return None if task is None or not task.done() or task.cancelled() or task.exception() else task.result()

    @property
    def is_open(self) -> bool:
        """Whether the prefill worker may still post writes for it."""
        return self.outgoing is not None and self.ending is None
