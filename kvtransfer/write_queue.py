"""What the transfer thread does next: calls first, then the writes of one stream after the other, in turn. Thread-safe.

A stream that somebody waits for, since its sequence has its first token already, goes before those that are still being
computed. What a stream has queued meanwhile is taken together, up to a bound: each write that is posted costs time
beyond that of its bytes, and others wait for their turn.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Stream = TypeVar("Stream", bound=Hashable)
Item = TypeVar("Item")
Job: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Batch(Generic[Stream, Item]):
    """Parts to be written at once, in the order they were put."""

    stream: Stream
    parts: list[Item]


@dataclass(frozen=True, slots=True)
class _Queued(Generic[Item]):
    part: Item
    num_bytes: float
    is_last: bool  # of those that were put together


class WriteQueue(Generic[Stream, Item]):
    """Any thread puts, one takes. `max_puts` bounds each stream: one that is full keeps nobody else back. Parts that
    are put together count once.

    A batch of more than one part has at most `max_batch_bytes`.
    """

    def __init__(self, max_puts: int, max_batch_bytes: int) -> None:
        self._max_puts = max_puts
        self._max_batch_bytes = max_batch_bytes
        self._num_puts: Counter[Stream] = Counter()
        self._changed = threading.Condition()
        self._calls: deque[Job] = deque()
        self._awaited: OrderedDict[Stream, deque[_Queued[Item] | Job]] = OrderedDict()  # whose turn it is comes first
        self._others: OrderedDict[Stream, deque[_Queued[Item] | Job]] = OrderedDict()

    def __len__(self) -> int:
        return self._num_puts.total()

    def put(self, stream: Stream, parts: Iterable[tuple[Item, float]], timeout_s: float) -> bool:
        """Parts, each with its number of bytes, behind the others of their stream. Waits while it is full; False if it
        stays so."""
        sized = list(parts)
        if not sized:
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_puts[stream] < self._max_puts, timeout_s):
                return False
            for number, (part, num_bytes) in enumerate(sized, start=1):
                self._put(stream, _Queued(part, num_bytes, is_last=number == len(sized)))
            self._num_puts[stream] += 1
            self._changed.notify_all()
            return True

    def put_end(self, stream: Stream, job: Job) -> None:
        """Behind the parts of its stream, which somebody waits for from now on. However full the queue is."""
        with self._changed:
            if stream in self._others:
                self._awaited[stream] = self._others.pop(stream)
            else:
                self._awaited.setdefault(stream, deque())
            self._put(stream, job)
            self._changed.notify_all()

    def call(self, job: Job) -> None:
        """Before everything but earlier calls."""
        with self._changed:
            self._calls.append(job)
            self._changed.notify_all()

    def get(self, is_ready: Callable[[Stream], bool], timeout_s: float | None) -> Batch[Stream, Item] | Job | None:
        """What is next, parts only of streams that are ready; None if there is nothing in time."""
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (found := self._take(is_ready)) is None:
                remaining_s = None if give_up_at is None else give_up_at - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
            return found

    def _put(self, stream: Stream, queued: _Queued[Item] | Job) -> None:
        streams = self._awaited if stream in self._awaited else self._others
        streams.setdefault(stream, deque()).append(queued)

    def _take(self, is_ready: Callable[[Stream], bool]) -> Batch[Stream, Item] | Job | None:
        if self._calls:
            return self._calls.popleft()
        for streams in (self._awaited, self._others):
            for stream, queued in streams.items():
                if not isinstance(queued[0], _Queued) or is_ready(stream):  # an end needs nobody's room
                    found = self._next(stream, queued)
                    if queued:
                        streams.move_to_end(stream)
                    else:
                        del streams[stream]
                    return found
        return None

    def _next(self, stream: Stream, queued: deque[_Queued[Item] | Job]) -> Batch[Stream, Item] | Job:
        """The end that is first, or the parts before it."""
        parts, num_bytes = list[Item](), 0.0
        while queued:
            first = queued[0]
            if not isinstance(first, _Queued):
                if not parts:
                    queued.popleft()
                    return first
                break
            num_bytes += first.num_bytes
            if parts and num_bytes > self._max_batch_bytes:
                break
            parts.append(first.part)
            self._num_puts[stream] -= first.is_last
            queued.popleft()
        if not self._num_puts[stream]:
            del self._num_puts[stream]
        self._changed.notify_all()  # there may be room
        return Batch(stream, parts)
