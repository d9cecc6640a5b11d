"""Ctrl-C and SIGTERM for a command that has to put things in order before it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ended_by_signals(again: Callable[[], None]) -> Iterator[None]:
    """The first signal cancels the body, which is then its normal end; every further one calls `again`."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    num_received = 0

    def receive() -> None:
        nonlocal num_received
        num_received += 1
        if num_received == 1:
            task.cancel()
        else:
            again()

    for number in ENDING:
        loop.add_signal_handler(number, receive)
    try:
        yield
    except asyncio.CancelledError:
        if num_received == 0:
            raise
        task.uncancel()
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
