"""What the transfer thread does next: calls first, then the writes of one stream after the other, in turn. Thread-safe.

A stream that somebody waits for, since its sequence has its first token already, goes before those that are still being
computed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Stream = TypeVar("Stream", bound=Hashable)
Job = Callable[[], None]


class WriteQueue(Generic[Stream]):
    """Any thread puts, one takes. `max_writes` bounds those of each stream: one that is full keeps nobody else back."""

    def __init__(self, max_writes: int) -> None:
        self._max_writes = max_writes
        self._num_writes: Counter[Stream] = Counter()
        self._changed = threading.Condition()
        self._calls: deque[Job] = deque()
        self._awaited: OrderedDict[Stream, deque[tuple[Job, bool]]] = OrderedDict()  # whose turn it is comes first
        self._others: OrderedDict[Stream, deque[tuple[Job, bool]]] = OrderedDict()

    def __len__(self) -> int:
        return self._num_writes.total()

    def put(self, stream: Stream, write: Job, timeout_s: float) -> bool:
        """Behind the other writes of its stream. Waits while there are too many of them; False if it stays so."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_writes[stream] < self._max_writes, timeout_s):
                return False
            self._num_writes[stream] += 1
            self._put(stream, write, is_write=True)
            return True

    def put_end(self, stream: Stream, job: Job) -> None:
        """Behind the writes of its stream, which somebody waits for from now on. However full the queue is."""
        with self._changed:
            if stream in self._others:
                self._awaited[stream] = self._others.pop(stream)
            else:
                self._awaited.setdefault(stream, deque())
            self._put(stream, job, is_write=False)

    def call(self, job: Job) -> None:
        """Before everything but earlier calls."""
        with self._changed:
            self._calls.append(job)
            self._changed.notify_all()

    def get(self, is_ready: Callable[[Stream], bool], timeout_s: float | None) -> Job | None:
        """The next job, of streams that are ready; None if there is none in time."""
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (job := self._take(is_ready)) is None:
                remaining_s = None if give_up_at is None else give_up_at - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    return None
                self._changed.wait(remaining_s)
            return job

    def _put(self, stream: Stream, job: Job, *, is_write: bool) -> None:
        streams = self._awaited if stream in self._awaited else self._others
        streams.setdefault(stream, deque()).append((job, is_write))
        self._changed.notify_all()

    def _take(self, is_ready: Callable[[Stream], bool]) -> Job | None:
        if self._calls:
            return self._calls.popleft()
        for streams in (self._awaited, self._others):
            for stream, jobs in streams.items():
                if is_ready(stream):
                    job, is_write = jobs.popleft()
                    if jobs:
                        streams.move_to_end(stream)
                    else:
                        del streams[stream]
                    if is_write:
                        self._num_writes[stream] -= 1
                        if not self._num_writes[stream]:
                            del self._num_writes[stream]
                        self._changed.notify_all()  # there is room
                    return job
        return None
