"""What a person sees who sits at a terminal: waiting, line editing, draining."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.terminal import ROOT, Terminal, on_terminal

TIMED = ("--runner", "timed", "--num-blocks", "200")


@pytest.fixture(scope="module")
def up(tiny_model: Path) -> Iterator[Terminal]:
    with on_terminal("up", "--model", str(tiny_model), "--port", "0", *TIMED) as terminal:
        yield terminal


@pytest.fixture(scope="module")
def address(up: Terminal) -> str:
    shown = up.read_until(r"is served at \S+\. (?s:.*)Ctrl-C stops it")
    assert re.search(r"\d s  waiting for router, prefill-0, decode-0: starting", shown)
    assert re.search(r"\d s  waiting for .*prefill-0", shown)
    found = re.search(r"is served at (\S+)\. ", shown)
    assert found
    return found[1]


def test_prompts_can_be_edited_and_called_back(address: str) -> None:
    with on_terminal("chat", "--max-tokens", "4", "--router", address) as chat:
        assert "/new forgets" in chat.read_until("\n> ")
        chat.type("hexlo\x1b[D\x1b[D\x1b[D\x04l\n")  # three to the left, one deleted, another written
        chat.read_until(r"answer +4 tokens\s+> ")
        chat.type("\x1b[A")  # the line before
        chat.read_until("hello")
        chat.type("\n")
        chat.read_until(r"answer +4 tokens\s+> ")
        chat.type("/fly\n")
        chat.read_until(r"There is no /fly\.(?s:.*)\n> ")
        chat.type("\x04")
        assert chat.wait() == 0


def test_ctrl_c_stops_an_answer_and_not_the_talk(address: str) -> None:
    with on_terminal("chat", "--ignore-eos", "--max-tokens", "900", "--router", address) as chat:
        chat.read_until("\n> ")
        chat.type("hello\n")
        chat.read_until(r"hello\s+\S")  # of the answer
        chat.type("\x03")
        chat.read_until(r"Stopped\.\s+> ")
        chat.type("/exit\n")
        assert chat.wait() == 0


def test_draining_is_told_and_a_second_ctrl_c_ends_it(up: Terminal, address: str) -> None:
    command = [sys.executable, "-m", "deploy.cli"]
    generate = [*command, "generate", "x", "--ignore-eos", "--max-tokens", "1000", "-q", "--router", address]
    with subprocess.Popen(generate, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None and asking.stderr is not None
        assert asking.stdout.read(1)  # the answer has begun
        up.type("\x03")
        up.read_until(r"Draining: 1 request running \(Ctrl-C again stops at once\)")
        status = subprocess.run([*command, "status", "--router", address], cwd=ROOT, capture_output=True, text=True)
        assert "1 request in flight; router draining, up for" in " ".join(status.stdout.split())
        late = subprocess.run(
            [*command, "generate", "x", "--router", address], cwd=ROOT, capture_output=True, text=True
        )
        assert late.stderr == "Error: the router is about to stop; ask another one, or again later\n"
        up.type("\x03")
        up.read_until(r"Stopped\.", within_s=10)
        assert up.wait() == 0
        assert asking.wait(10) == 1
        assert asking.stderr.read().startswith("Error: ")
