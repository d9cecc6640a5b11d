"""What is told while something is waited for: one line written over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import io
import re

import pytest
from rich.console import Console

from deploy.progress import ConsoleProgress, shown


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def console(*, is_terminal: bool, kind: str = "xterm") -> Console:
    terminal = {"TERM": kind}
    return Console(file=io.StringIO(), width=40, highlight=False, force_terminal=is_terminal, _environ=terminal)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("is_terminal", "kind"), [(False, "xterm"), (True, "dumb")])
def test_where_nothing_can_be_written_over_lines_are_sparse_and_short_waits_are_silent(
    is_terminal: bool, kind: str
) -> None:
    out, clock = console(is_terminal=is_terminal, kind=kind), Clock()
    progress = ConsoleProgress(out, clock)
    for _ in range(250):  # 25 s
        progress.waiting("waiting for decode-0: [loading]")
        clock.now_s += 0.1
    progress.waiting("")
    lines = written(out).splitlines()
    assert [line.split("s  ")[1] for line in lines] == ["waiting for decode-0: [loading]"] * 3
    assert [int(line.split()[0]) for line in lines] == [1, 11, 21]
    progress.waiting("again")  # its seconds count from zero
    progress.waiting("")
    assert written(out).splitlines() == lines


def test_on_a_terminal_it_is_one_line_that_fits_and_goes_at_the_end() -> None:
    out, clock = console(is_terminal=True), Clock()
    progress = ConsoleProgress(out, clock)
    progress.waiting("waiting for prefill-0, decode-0: loading demo-moe")
    progress.became("router", "ready")  # draws the line anew, below
    clock.now_s += 7
    progress.waiting("waiting for decode-0")
    progress.became("prefill-0", "ready")
    progress.waiting("")
    shown_lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\r\n]", written(out))]
    assert any(re.search(r"0 s  waiting for prefill-0, deco.*…$", line) for line in shown_lines)
    assert any(line.endswith("7 s  waiting for decode-0") for line in shown_lines)
    assert "  prefill-0   ready" in shown_lines
    assert max(map(len, shown_lines)) <= 40
    assert written(out).endswith("\x1b[2K")  # the line is gone
    assert "\x1b[?25h" in written(out)  # the cursor is back


class Recorder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def became(self, name: str, text: str) -> None:
        raise AssertionError("nothing became of anything")

    def waiting(self, text: str) -> None:
        self.texts.append(text)


async def test_shown_lasts_as_long_as_the_body_and_ends_when_that_fails() -> None:
    recorder, was_described = Recorder(), asyncio.Event()

    async def describe() -> str:
        was_described.set()
        return "patience"

    with pytest.raises(KeyError):
        async with shown(recorder, describe):
            await asyncio.wait_for(was_described.wait(), 5)
            raise KeyError
    assert recorder.texts == ["patience", ""]
