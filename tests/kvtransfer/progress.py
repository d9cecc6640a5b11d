"""For agents that no transfer thread looks after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtransfer.agent import TransferAgent


@contextmanager
def making_progress(agent: TransferAgent) -> Iterator[None]:
    """As a worker's transfer thread does."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.001):
            agent.progress()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
