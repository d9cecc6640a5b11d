"""Children are real Python processes of a few lines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.process import PARENT_PID, ChildProcess, Command, ProcessEnded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def python_child(tmp_path: Path) -> Callable[[str], Command]:
    def command(code: str) -> Command:
        environment = {"PYTHONPATH": str(ROOT)}
        return Command("child", [sys.executable, "-c", textwrap.dedent(code)], tmp_path / "child.log", environment)

    return command


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """A zombie has ended: who adopts orphans here may be slow to bury them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_ends_by_itself(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(python_child("print('one'); print('two'); raise SystemExit(3)"))
    assert await child.wait() == 3
    assert child.last_log_lines(1) == ["two"]
    assert await child.stop(grace_s=0) == 3  # stopping what has ended is no error
    child.kill()


async def test_its_end_is_told_without_a_log_too(python_child: Callable[[str], Command]) -> None:
    """Files that nothing was written to for days are taken out of the folder for temporary ones."""
    child = await ChildProcess.start(python_child("raise SystemExit(3)"))
    child.command.log_path.unlink()
    await child.wait()
    assert child.last_log_lines(1) == []
    assert str(ProcessEnded(child)) == "child ended with exit code 3. It said last:"


async def test_stop_lets_it_finish(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(
        python_child("""
            import signal
            signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), exit(0)))
            print("up", flush=True)
            while True: signal.pause()
        """)
    )
    await until(lambda: child.last_log_lines(1) == ["up"])
    assert await child.stop(grace_s=20) == 0
    assert child.last_log_lines(1) == ["drained"]


DEAF = """
    import signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
    signal.pause()
"""


async def test_stop_kills_the_deaf_and_what_it_started(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(python_child(DEAF))
    await until(lambda: child.last_log_lines(1) != [])
    grandchild = int(child.last_log_lines(1)[0])
    assert is_running(grandchild)
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL
    await until(lambda: not is_running(grandchild))


async def test_stop_ends_one_that_was_paused(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(python_child("import signal; print('up', flush=True); signal.pause()"))
    await until(lambda: child.last_log_lines(1) == ["up"])
    child.send(signal.SIGSTOP)
    assert await child.stop(grace_s=20) == -signal.SIGTERM


async def test_cancelled_stop_kills(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(python_child(DEAF))
    await until(lambda: child.last_log_lines(1) != [])
    stopping = asyncio.create_task(child.stop(grace_s=60))
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await child.wait() == -signal.SIGKILL


class Process:
    """Stands where asyncio's process stands; ends when a test says so."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def send_signal(self, number: int) -> None:
        """It takes a while to end."""

    async def wait(self) -> int:
        self.returncode = await self.end
        return self.returncode


@pytest.mark.parametrize("num_ticks", range(4))
async def test_stop_cancelled_while_the_child_ends_is_cancelled(num_ticks: int, tmp_path: Path) -> None:
    process: Any = Process()
    stopping = asyncio.create_task(ChildProcess(Command("child", (), tmp_path / "log"), process, 0).stop(60))
    for _ in range(3):
        await asyncio.sleep(0)
    process.end.set_result(0)
    process.returncode = 0  # so that nothing is killed
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    was_in_time = stopping.cancel()
    await asyncio.wait([stopping])
    assert stopping.cancelled() == was_in_time


async def test_interrupt_at_the_terminal_reaches_only_the_parent(python_child: Callable[[str], Command]) -> None:
    child = await ChildProcess.start(python_child("import signal; signal.pause()"))
    assert os.getpgid(child.pid) != os.getpgid(0)
    child.kill()
    assert await child.wait() == -signal.SIGKILL


PARENT = """
    import asyncio, signal, sys
    from pathlib import Path
    from deploy.process import ChildProcess, Command

    async def main():
        code = "import signal, deploy.process as p; p.follow_parent(); print('up', flush=True); signal.pause()"
        child = await ChildProcess.start(Command("child", [sys.executable, "-c", code], Path(sys.argv[1])))
        while child.last_log_lines(1) != ["up"]:
            await asyncio.sleep(0.01)
        print(child.pid, flush=True)
        signal.pause()

    asyncio.run(main())
"""


def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path / "child.log")]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_running(child_pid)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child_pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)


def test_no_orphan_when_the_parent_was_quicker_to_die() -> None:
    code = "from deploy.process import follow_parent; follow_parent(); print('alive')"
    environment = {**os.environ, PARENT_PID: "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (-signal.SIGKILL, "")


def test_without_such_a_parent_nothing_is_tied() -> None:
    code = "from deploy.process import follow_parent; follow_parent(); print('alive')"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "alive\n")
