"""The command line against a cluster of timed workers, and what is left when the cluster ends in one way or another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from deploy.local import ClusterConfig, LocalCluster
from deploy.log_folder import remove_left_behind
from deploy.process import ProcessEnded

ROOT = Path(__file__).resolve().parents[2]
PDSERVE = (sys.executable, "-m", "deploy.cli")
TIMED = ("--runner", "timed", "--num-blocks", "200")


def pdserve(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [*PDSERVE, *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@dataclass(frozen=True)
class Up:
    process: subprocess.Popen[str]
    address: str
    said: str

    @property
    def child_ids(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


@contextmanager
def started_up(tiny_model: Path) -> Iterator[Up]:
    """Killed at the end, if it still runs."""
    command = [
        *PDSERVE,
        "up",
        "--model",
        str(tiny_model),
        "--port",
        "0",
        "--http-port",
        "0",
        "--dashboard-port",
        "0",
        *TIMED,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests run under nohup
    )
    with process:
        try:
            yield _when_it_serves(process)
        finally:
            process.kill()


def _when_it_serves(process: subprocess.Popen[str]) -> Up:
    assert process.stderr is not None
    said, address = "", ""
    while line := process.stderr.readline():
        said += line
        if found := re.search(r"is served at (\S+)\. ", line):
            address = found[1]
        if line.startswith("Ctrl-C stops it"):  # the last one
            return Up(process, address, said)
    raise AssertionError(f"it ended with {process.wait()} and said {said}")


@pytest.fixture(scope="module")
def up(tiny_model: Path) -> Iterator[Up]:
    with started_up(tiny_model) as up:
        yield up


def is_running(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def test_up_says_what_became_ready_and_how_to_call_it(up: Up) -> None:
    ready = [line.split()[:2] for line in up.said.splitlines() if "ready" in line]
    assert ready[0] == ["router", "ready"]
    assert sorted(ready[1:]) == [["dashboard", "ready"], ["decode-0", "ready"], ["prefill-0", "ready"]]
    assert len(up.child_ids) == 4


def test_the_dashboard_that_up_names_shows_its_workers(up: Up) -> None:
    found = re.search(r"^The dashboard.*: (http://\S+)$", up.said, re.MULTILINE)
    assert found
    with httpx2.Client(base_url=found[1], timeout=20) as client, client.stream("GET", "/api/stream") as stream:
        lines = stream.iter_lines()
        while next(lines) != "event: pools":
            pass
        pools = json.loads(next(lines).removeprefix("data: "))["data"]
        assert "<title>pdserve</title>" in client.get("/").text
    assert {worker["worker_id"]: worker["role"] for worker in pools["workers"]} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }


def test_the_curl_line_that_up_prints_works(up: Up) -> None:
    """Pasted as it is into a shell."""
    line = next(line for line in up.said.splitlines() if line.strip().startswith("curl "))
    run = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    answer = json.loads(run.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] >= 1


def test_http_port_in_use(up: Up, tiny_model: Path) -> None:
    port = re.search(r"take http://127.0.0.1:(\d+)/v1", up.said)
    assert port
    run = pdserve("up", "--model", str(tiny_model), "--port", "0", "--http-port", port[1], *TIMED)
    assert run.returncode == 1
    assert f"cannot listen at 127.0.0.1:{port[1]}: Address already in use; choose another --http-port" in run.stderr


def test_generate_streams_text_then_tells_what_it_took(up: Up) -> None:
    run = pdserve("generate", "Once upon a time", "--max-tokens", "12", "--seed", "7", "--router", up.address)
    assert run.returncode == 0, run.stderr
    stages = [line.split()[0] for line in run.stderr.splitlines() if " ms" in line]
    assert {"prefill", "handover", "decode"} <= set(stages)
    assert "decode   16 tokens: 16 received" in run.stderr
    assert "answer   12 tokens" in run.stderr
    again = pdserve("generate", "Once upon a time", "--max-tokens", "12", "--seed", "7", "-q", "--router", up.address)
    assert (again.stdout, again.stderr) == (run.stdout, "")
    assert len(run.stdout) > 1


def test_chat_keeps_what_was_said(up: Up) -> None:
    run = pdserve("chat", "--max-tokens", "4", "--router", up.address, stdin="hello\nand again\n/new\nhello\n/exit\n")
    assert run.returncode == 0, run.stderr
    first, second, third = (int(number) for number in re.findall(r"prefill +(\d+) tokens", run.stderr))
    assert second > first
    assert third == first


def test_piped_prompts_are_answered_and_nothing_else_is_printed(up: Up) -> None:
    arguments = ("--seed", "7", "--max-tokens", "4", "-q", "--router", up.address)
    once = pdserve("chat", "hello", *arguments)
    assert len(once.stdout) > 1
    piped = pdserve("chat", *arguments, stdin="hello\n\n/new\nhello")
    assert (piped.returncode, piped.stderr, piped.stdout) == (0, "", once.stdout * 2)
    after_exit = pdserve("chat", *arguments, stdin="hello\n/exit\nhello\n")
    assert after_exit.stdout == once.stdout


def test_chat_once(up: Up) -> None:
    run = pdserve("chat", "hello", "--max-tokens", "4", "-q", "--router", up.address)
    assert (run.returncode, run.stderr) == (0, "")


def test_errors_of_the_service_are_one_sentence_and_chat_goes_on(up: Up) -> None:
    run = pdserve("generate", "x", "--top-p", "0", "--router", up.address)
    assert run.returncode == 1
    assert re.fullmatch(r"Error: .*top_p.*\n", run.stderr)
    run = pdserve("chat", "--max-tokens", "0", "--router", up.address, stdin="one\ntwo\n")
    assert run.returncode == 1
    assert len(re.findall(r"Error: .*max_tokens", run.stderr)) == 2


def test_deadline_that_passes_is_told_in_seconds(up: Up) -> None:
    slow = ("--ignore-eos", "--max-tokens", "900", "--deadline-s", "0.5", "-q", "--router", up.address)
    for command in ("generate", "chat"):
        run = pdserve(command, "x", *slow)
        assert run.returncode == 1
        assert run.stderr.startswith("Error: the answer was not complete after 0.5 s, as --deadline-s asks: allow more")


def test_stop_id_that_is_none(up: Up) -> None:
    run = pdserve("generate", "x", "--stop-token-id", "-1", "--router", up.address)
    assert (run.returncode, run.stdout) == (1, "")
    assert "stop_token_ids[0] is -1; " in run.stderr


def test_status_and_roles(up: Up) -> None:
    def roles() -> dict[str, str]:
        lines = pdserve("status", "--router", up.address).stdout.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines if line.startswith(("prefill-", "decode-"))}

    assert roles() == {"prefill-0": "prefill", "decode-0": "decode"}
    assert pdserve("role", "decode-0", "both", "--router", up.address).returncode == 0
    assert roles() == {"prefill-0": "prefill", "decode-0": "both"}
    assert pdserve("role", "decode-0", "decode", "--router", up.address).returncode == 0
    unknown = pdserve("role", "decode-9", "both", "--router", up.address)
    assert unknown.returncode == 1
    assert "decode-9" in unknown.stderr


def test_drain(up: Up) -> None:
    drained = pdserve("drain", "decode-0", "--router", up.address)
    assert drained.returncode == 0
    first, rest = drained.stdout.split("\n", 1)
    assert re.fullmatch(r"decode-0 is drained: nothing runs there, after \d\.\d s\. It may be stopped now\.", first)
    assert rest.startswith("No worker that is ready has the role decode")
    status = pdserve("status", "--router", up.address).stdout
    assert re.search(r"^decode-0 +decode +draining ", status, re.MULTILINE)
    undone = pdserve("drain", "decode-0", "--undo", "--router", up.address)
    assert (undone.returncode, undone.stdout) == (0, "decode-0 gets requests again.\n")
    assert re.search(r"^decode-0 +decode +ready ", pdserve("status", "--router", up.address).stdout, re.MULTILINE)
    unknown = pdserve("drain", "decode-9", "--router", up.address)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no worker 'decode-9' is registered" in unknown.stderr


def test_drain_says_what_is_left(up: Up) -> None:
    """There is nobody else who could go on with it."""
    asking = subprocess.Popen(
        [*PDSERVE, "generate", "x", "--ignore-eos", "--max-tokens", "900", "-q", "--router", up.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert asking.stdout is not None
        assert asking.stdout.read(1)
        left = pdserve("drain", "decode-0", "--wait-s", "0.5", "--router", up.address)
        assert left.returncode == 1
        assert left.stdout.startswith("decode-0 gets nothing new, and still has 1 request after 0.")
    finally:
        asking.kill()
        asking.communicate()
    assert pdserve("drain", "decode-0", "--router", up.address).returncode == 0
    assert pdserve("drain", "decode-0", "--undo", "--router", up.address).returncode == 0


def test_port_in_use(up: Up, tiny_model: Path) -> None:
    port = up.address.rpartition(":")[2]
    run = pdserve("up", "--model", str(tiny_model), "--port", port, *TIMED)
    assert run.returncode == 1
    assert f"cannot listen at {up.address}" in run.stderr


def test_killed_worker_is_started_again(up: Up) -> None:
    victim = next(pid for pid in up.child_ids if b"decode-0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(victim, signal.SIGKILL)
    assert up.process.stderr is not None
    said: list[str] = []
    while not (said and re.search(r"decode-0 +ready", said[-1])):
        said.append(up.process.stderr.readline())
        assert said[-1], "it ended"
    assert "was ended by SIGKILL" in "".join(said)
    assert "Starting it again in 0.5 s" in "".join(said)


def test_interrupt_drains_and_leaves_no_process(up: Up) -> None:
    child_ids = up.child_ids
    assert len(child_ids) == 4
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=60) == 0
    assert up.process.stderr is not None
    assert up.process.stderr.read().splitlines()[-1] == "Stopped."
    wait_until_gone(child_ids)


def test_killed_up_takes_its_processes_with_it(tiny_model: Path) -> None:
    with started_up(tiny_model) as up:
        child_ids = up.child_ids
        assert len(child_ids) == 4
        logs = Path(os.readlink(f"/proc/{child_ids[0]}/fd/1")).parent
        up.process.kill()
    wait_until_gone(child_ids)
    assert logs.exists()
    remove_left_behind()
    assert not logs.exists()


def test_closed_terminal_ends_it_in_order(tiny_model: Path) -> None:
    with started_up(tiny_model) as up:
        child_ids = up.child_ids
        logs = Path(os.readlink(f"/proc/{child_ids[0]}/fd/1")).parent
        up.process.send_signal(signal.SIGHUP)
        assert up.process.wait(timeout=60) == 0
    wait_until_gone(child_ids)
    assert not logs.exists()


async def test_process_that_never_comes_up_is_reported_and_nothing_is_left(tiny_model: Path) -> None:
    config = ClusterConfig(str(tiny_model), worker_arguments=(*TIMED, "--block-size", "-1"))
    cluster = LocalCluster(config)
    with pytest.raises(ProcessEnded, match=r"(?s)(prefill|decode)-0 ended with exit code 1.*--block-size is -1"):
        await cluster.start()
    with pytest.raises(ProcessLookupError):
        os.kill(cluster.pid("router"), 0)


async def test_cluster_that_is_not_ready_in_time(tiny_model: Path) -> None:
    config = ClusterConfig(str(tiny_model), worker_arguments=TIMED, start_timeout_s=0.2)
    with pytest.raises(TimeoutError, match="not every process was ready after"):
        async with asyncio.timeout(60), LocalCluster(config):
            pass


def test_demo_answers_once_on_real_workers_and_ends(tiny_model: Path) -> None:
    run = pdserve("demo", "--once", "--model", str(tiny_model), "--prompt", "hello")
    assert run.returncode == 0, run.stderr
    assert run.stdout.lstrip().startswith("> hello\n")
    assert re.search(r"decode +\d+ tokens: \d+ received", run.stdout)
    assert re.search(r"handover +\S*prefill-0", run.stdout)


def test_demo_answers_piped_prompts_within_a_capped_context(tiny_model: Path) -> None:
    """The answer is as long as the context leaves, where nobody said how long: the defaults exceed this one."""
    prompt = len("<|user|>hello\n<|assistant|>")  # one token a character
    command = [*PDSERVE, "demo", "--model", str(tiny_model), "--max-context", "64"]
    run = subprocess.run(command, cwd=ROOT, input=b"hello\n", capture_output=True, timeout=60, check=False)
    said = run.stderr.decode()
    assert run.returncode == 0, said
    assert f"prefill  {prompt} tokens: {prompt} computed" in said
    answered = re.search(r"answer +(\d+) tokens", said)
    assert answered and int(answered[1]) <= 64 - prompt
    assert "> " not in said + run.stdout.decode(errors="replace") and "/new" not in said
