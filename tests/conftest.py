"""For every test: a clean environment before, and after the last one nothing left running."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before gRPC is imported: it prints a line for every peer's end

_SETTLE_S = 5.0


@pytest.fixture(autouse=True)
def _without_pdserve_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who runs the tests has set for their own pdserve must not change them."""
    for name in os.environ:
        if name.startswith("PDSERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For small tensors on a busy machine: threads would mostly wait for each other."""
    import torch  # most tests do without

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    deadline = time.monotonic() + _SETTLE_S
    while (left := _children() + _threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the tests left behind: {', '.join(left)}"


def _children() -> list[str]:
    """Descendants by /proc; a process whose parent died meanwhile is no longer ours to see."""
    found, ids = [], [os.getpid()]
    while ids:
        pid = ids.pop()
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                ids.append(int(child))
                found.append(f"process {child} ({_command_line(child)})")
    return found


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "just ended"


def _threads() -> list[str]:
    main = threading.main_thread()
    return [f"thread {thread.name}" for thread in threading.enumerate() if thread is not main and not thread.daemon]
