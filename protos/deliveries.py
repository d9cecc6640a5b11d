"""An end for streams whose caller does not read: what is to be sent waits in gRPC, and everything behind it with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import SlowReader

_LOOKS = 8  # in the time a message may wait


class Delivery:
    """Of one call: `since` when a message has been waiting to be taken by gRPC, None while none is."""

    __slots__ = ("_task", "is_given_up", "since")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.since: float | None = None
        self.is_given_up = False

    def give_up(self) -> None:
        self.since, self.is_given_up = None, True
        self._task.cancel()

    def taken_back(self) -> None:
        """The cancellation has been understood; the task goes on, to tell the caller."""
        self._task.uncancel()


class Deliveries:
    """One timer for all streams: a timer for each message would cost more than the message."""

    def __init__(self, unread_s: float) -> None:
        self.unread_s = unread_s
        self._open: set[Delivery] = set()
        self._timer: asyncio.TimerHandle | None = None

    def failure(self) -> SlowReader:
        return SlowReader(f"the stream was ended: a message was not read for {self.unread_s:g} s")

    @contextmanager
    def follow(self) -> Iterator[Delivery]:
        """The current task is cancelled if a delivery of it takes too long."""
        task = asyncio.current_task()
        assert task is not None
        delivery = Delivery(task)
        self._open.add(delivery)
        if self._timer is None:
            self._look_later()
        try:
            yield delivery
        finally:
            self._open.remove(delivery)

    def _look(self) -> None:
        self._timer = None
        late = time.monotonic() - self.unread_s
        for delivery in self._open:
            if delivery.since is not None and delivery.since < late:
                delivery.give_up()
        if self._open:
            self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.unread_s / _LOOKS, self._look)
