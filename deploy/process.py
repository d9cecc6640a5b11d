"""Child processes: each in a group of its own, logging to a file, ended for certain. Knows nothing of what they run.

A child that calls `follow_parent` dies with the thread that started it, even when that is killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PARENT_PID = "PDSERVE_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_KILLED_WAIT_S = 10.0
_NUM_LOG_LINES = 8
_LOG_END_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Command:
    """What to run under which name. `environment` is laid over this process's own."""

    name: str
    arguments: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class ChildProcess:
    """One started process. Made by `start`; `wait` or `stop` must be awaited before the loop ends."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, log_start: int) -> None:
        self.command = command
        self._process = process
        self._log_start = log_start  # in bytes; an earlier process of this name wrote what is before

    @classmethod
    async def start(cls, command: Command) -> ChildProcess:
        environment = {**os.environ, **command.environment, PARENT_PID: str(os.getpid())}
        with command.log_path.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches the parent alone, which then drains in order
            )
        return cls(command, process, log_start)

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def send(self, signal_number: signal.Signals) -> None:
        """To the child alone; nothing if it has ended."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal_number)

    def kill(self) -> None:
        """SIGKILL to the child and whatever it started."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> int:
        """Asks with SIGTERM, and kills what is still there after `grace_s`. Returns the exit code."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # one that was stopped could not hear it
        try:
            async with asyncio.timeout(grace_s):  # not wait_for: it may take the child's end for its cancellation
                return await self.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(_KILLED_WAIT_S):
                return await self.wait()
        except asyncio.CancelledError:
            self.kill()
            raise

    def last_log_lines(self, num_lines: int) -> list[str]:
        """Of what this process wrote; the first may lack its beginning."""
        if not self.command.log_path.exists():  # whoever tidies up temporary files may have removed it
            return []
        with self.command.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
        return [line.rstrip() for line in lines[-num_lines:]]


class ProcessEnded(Exception):
    """A process ended that should not have; the message tells how, and what it said last."""

    def __init__(self, process: ChildProcess) -> None:
        lines = process.last_log_lines(_NUM_LOG_LINES)
        super().__init__("\n  ".join([f"{process.name} {_how_it_ended(process.exit_code)}. It said last:", *lines]))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def follow_parent() -> None:
    """Ties this process to the one that started it through `ChildProcess`; without such a parent it does nothing."""
    parent_pid = os.environ.pop(PARENT_PID, None)
    if parent_pid is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent_pid):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
