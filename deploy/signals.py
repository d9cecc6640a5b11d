"""Ctrl-C, SIGTERM and a terminal that is closed, for a command that has to put things in order before it ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def ending_signals() -> list[signal.Signals]:
    """Those that end a command: the last is a terminal's that is closed, which nohup has ignored."""
    is_tied_to_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if is_tied_to_terminal else [])]


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

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, receive)
    try:
        yield
    except asyncio.CancelledError:
        if num_received == 0:
            raise
        task.uncancel()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
