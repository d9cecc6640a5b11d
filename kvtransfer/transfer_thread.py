"""The one thread that talks to a transfer agent: it posts writes, polls them, and tells the event loop.

Streams share it in turn, see `kvtransfer.write_queue`. Posting may copy for milliseconds, so it happens neither on the
event loop nor on the compute thread. It knows streams of writes, not tickets.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvtransfer import metrics
from kvtransfer.agent import PeerUnreachable, Pieces, Region, TransferAgent, Write, WriteState
from kvtransfer.errors import TransferFailed
from kvtransfer.ticket import AS_IS
from kvtransfer.transfer_meter import TransferMeter
from kvtransfer.write_queue import Batch, Item, WriteQueue
from protos.errors import ServiceError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """`stall_s`: a write has failed that moves for longer while no other to its peer ends: a stopped peer would keep
    it moving for ever, and on a slow link many take their turns. `most_s` bounds it in any case.

    The agent makes progress every `progress_s` at least while something moves or others may write to us, and else every
    `idle_progress_s`.

    A peer that `max_moving_bytes` are on their way to gets nothing more until some of them have arrived: what is posted
    cannot be taken back, nor overtaken.
    """

    stall_s: float = 10.0
    most_s: float = 60.0
    poll_s: float = 0.0002
    progress_s: float = 0.001
    idle_progress_s: float = 0.01
    max_queued_writes: int = 4096
    max_batch_bytes: int = 32 << 20
    max_moving_bytes: int = 256 << 20


@dataclass(slots=True, eq=False)
class WriteStream(Generic[Item]):
    """The writes of one hand-over, in parts. `failed` is called on the event loop, once, when one of them fails.

    `work_out` says, on the transfer thread, what is to be copied for parts that are about to be posted as one write.
    `beside` does for them, in one thread for all streams, what is no business of the transport and takes time: the
    write has not ended before it has. Setting `stopped` keeps what is queued from being posted; what was posted runs on
    to its end.

    The others are called on the transfer thread: `arrived` for parts that are in the peer's memory; `ended` for parts
    whose write has ended, well or not, or could not be posted once they were worked out; `has_room` before anything is
    posted, and while there is none, nothing is: only the end of a write can make room. It must not raise.
    """

    peer_name: str
    failed: Callable[[Exception], None]
    work_out: Callable[[Sequence[Item]], Sequence[Region] | Pieces]
    beside: Callable[[Sequence[Item]], None] | None = None
    arrived: Callable[[Sequence[Item]], None] | None = None
    ended: Callable[[Sequence[Item]], None] = lambda _: None
    has_room: Callable[[], bool] = lambda: True
    coding: str = AS_IS  # what the metrics call it
    stopped: bool = False
    sent_bytes: int = 0
    # the transfer thread's own:
    has_failed: bool = False
    num_moving: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Posted:
    write: Write
    stream: WriteStream[Any]
    parts: Sequence[Any]
    posted_at: float
    beside: Future[None] | None


class TransferThread:
    """Started by the constructor, on a running event loop; `close` ends it. Every call of the agent is made on it."""

    def __init__(self, agent: TransferAgent, *, options: TransferOptions | None = None) -> None:
        self._agent = agent
        self._options = options or TransferOptions()
        self._loop = asyncio.get_running_loop()
        self._queue = WriteQueue[WriteStream[Any], Any](self._options.max_queued_writes, self._options.max_batch_bytes)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="beside-transfer")
        self._moving: list[_Posted] = []
        self._done_at: dict[str, float] = {}  # by peer: when a write to it last ended well
        self.meter = TransferMeter()
        self._progressed_at = 0.0
        self._closing = False
        self.is_written_to: Callable[[], bool] = lambda: False  # whether others may write to us just now
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def post(self, stream: WriteStream[Item], parts: Iterable[tuple[Item, float]]) -> None:
        """Queues parts to be written, each with its number of bytes: infinite, if it shall go alone. Any thread may
        call it.

        Waits while the queue is full. Raises TransferFailed if it stays so."""
        if not self._queue.put(stream, parts, self._options.stall_s):
            raise TransferFailed(f"{self._options.max_queued_writes} writes are queued and none has been posted")

    def drain(self, stream: WriteStream[Any]) -> asyncio.Future[None]:
        """Done when every write of the stream that was queued before has ended, well or not. It goes first from now."""
        drained: asyncio.Future[None] = self._loop.create_future()
        self._queue.put_end(stream, partial(self._drain, stream, drained))
        return drained

    def run(self, call: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Makes a call of the agent, before any write that is queued."""
        result: asyncio.Future[_Result] = self._loop.create_future()
        self._queue.call(partial(self._call, call, result))
        return result

    async def close(self) -> None:
        """Ends the thread once it has made the calls that are queued. Writes are left to the agent's own end."""
        self._queue.call(self._close)
        await self._loop.run_in_executor(None, self._thread.join)
        await self._loop.run_in_executor(None, self._beside.shutdown)

    def _run(self) -> None:
        while not self._closing:
            found = self._queue.get(self._may_post, self._pause_s())
            if isinstance(found, Batch):
                self._post(found.stream, found.parts)
            elif found is not None:
                found()
            self._poll()
            self._progress()

    def _pause_s(self) -> float:
        if self._moving:
            return self._options.poll_s
        try:
            is_busy = self.is_written_to()
        except Exception:
            logger.exception("whether others write to us is not known")
            is_busy = True
        return self._options.progress_s if is_busy else self._options.idle_progress_s

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._progressed_at >= self._options.progress_s:
            self._progressed_at = now
            try:
                self._agent.progress()
            except Exception:  # an agent's own failure shows in its writes; the thread is needed for others
                logger.exception("the transport could not make progress")

    def _may_post(self, stream: WriteStream[Any]) -> bool:
        is_below = self.meter.moving_bytes(stream.peer_name) < self._options.max_moving_bytes
        return stream.stopped or (is_below and stream.has_room())

    def _close(self) -> None:
        self._closing = True

    def _post(self, stream: WriteStream[Item], parts: Sequence[Item]) -> None:
        if stream.stopped:
            return
        started, began_at, beside = time.perf_counter(), time.monotonic(), None
        try:
            what = stream.work_out(parts)
            beside = None if stream.beside is None else self._beside.submit(stream.beside, parts)
            write = self._agent.write(stream.peer_name, what)
        except Exception as error:  # a wrong write ends its own stream, not the thread that all others need
            if beside is not None:
                wait([beside])  # it reads what the stream's owner lets go of when it has drained
            self._tell(stream.ended, stream, parts)
            self._fail(stream, _why_not_posted(stream.peer_name, error))
            return
        metrics.WRITE_SECONDS.inc(time.perf_counter() - started)
        metrics.WRITES.inc()
        metrics.DESCRIPTORS.inc(len(what))
        stream.num_moving += 1
        self.meter.began(stream.peer_name, write.num_bytes, began_at)
        metrics.MOVING_BYTES.inc(write.num_bytes)
        self._moving.append(_Posted(write, stream, parts, time.monotonic(), beside))

    def _poll(self) -> None:
        if self._moving:
            now = time.monotonic()
            self._moving = [posted for posted in self._moving if not self._has_ended(posted, now)]
            if not self._moving:
                self._done_at.clear()

    def _has_ended(self, posted: _Posted, now: float) -> bool:
        stream, state = posted.stream, _poll_safely(posted.write)
        if state is WriteState.MOVING:
            if self._has_stalled(posted, now):  # it still counts as moving: only the peer's disconnection ends it
                self._fail(
                    stream, TransferFailed(f"a write to {stream.peer_name} stalled for {self._options.stall_s} s")
                )
            return False
        if posted.beside is not None:
            if not posted.beside.done():
                return False
            if (error := posted.beside.exception()) is not None:
                logger.error("what goes beside a write to %s failed", stream.peer_name, exc_info=error)
                self._fail(stream, TransferFailed(f"what goes beside a write to {stream.peer_name} failed: {error!r}"))
        if state is WriteState.DONE:
            self._done_at[stream.peer_name] = now
            stream.sent_bytes += posted.write.num_bytes
            metrics.SENT_BYTES.labels(stream.coding).inc(posted.write.num_bytes)
            if stream.arrived is not None:
                self._tell(stream.arrived, stream, posted.parts)
        else:
            self._fail(
                stream, TransferFailed(f"a write of {posted.write.num_bytes} bytes to {stream.peer_name} failed")
            )
        self._tell(stream.ended, stream, posted.parts)
        stream.num_moving -= 1
        self.meter.ended(stream.peer_name, posted.write.num_bytes, well=state is WriteState.DONE)
        metrics.MOVING_BYTES.dec(posted.write.num_bytes)
        if stream.num_moving == 0:
            self._resolve(stream)
        return True

    def _tell(
        self, of_parts: Callable[[Sequence[Item]], None], stream: WriteStream[Item], parts: Sequence[Item]
    ) -> None:
        try:
            of_parts(parts)
        except Exception as error:  # likewise its own stream's end
            logger.exception("what belongs to a write to %s failed", stream.peer_name)
            self._fail(stream, error)

    def _has_stalled(self, posted: _Posted, now: float) -> bool:
        moved_at = max(posted.posted_at, self._done_at.get(posted.stream.peer_name, posted.posted_at))
        return now - moved_at > self._options.stall_s or now - posted.posted_at > self._options.most_s

    def _drain(self, stream: WriteStream[Any], drained: asyncio.Future[None]) -> None:
        stream.waiting.append(drained)
        if stream.num_moving == 0:
            self._resolve(stream)

    def _resolve(self, stream: WriteStream[Any]) -> None:
        for drained in stream.waiting:
            self._loop.call_soon_threadsafe(_set_result, drained, None)
        stream.waiting.clear()

    def _call(self, call: Callable[[], _Result], result: asyncio.Future[_Result]) -> None:
        try:
            value = call()
        except Exception as error:  # belongs to whoever awaits the result
            self._loop.call_soon_threadsafe(_set_exception, result, error)
        else:
            self._loop.call_soon_threadsafe(_set_result, result, value)

    def _fail(self, stream: WriteStream[Any], error: Exception) -> None:
        stream.stopped = True
        if not stream.has_failed:
            stream.has_failed = True
            metrics.FAILED_WRITES.inc()
            self._loop.call_soon_threadsafe(stream.failed, error)


def _why_not_posted(peer_name: str, error: Exception) -> Exception:
    if isinstance(error, PeerUnreachable):
        return TransferFailed(f"{peer_name} cannot be written to: {error}")
    if not isinstance(error, ServiceError):
        logger.exception("a write to %s could not be posted", peer_name)
    return error


def _poll_safely(write: Write) -> WriteState:
    try:
        return write.poll()
    except Exception:  # an agent's own failure ends this write, not the thread that all others need
        logger.exception("a write of %d bytes could not be polled", write.num_bytes)
        return WriteState.FAILED


def _set_result(future: asyncio.Future[_Result], value: _Result) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[_Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
