"""Other routers under the same load, from environments of their own: Dynamo's frontend over its own mock engine, and
sglang's router over a worker like ours that speaks HTTP.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.router_load_http import HttpLoad, HttpRefused, ask_http
from bench.router_load_http_worker import serve_http_worker
from bench.router_load_sides import closed, cpu_s, serving
from model.cache_folder import default_cache
from model.model_source import resolve_model

MODEL = "demo-dense"  # whose tokenizer the peer needs
NUM_STREAMS, ANSWER_TOKENS = 64, 4000
WARM_S = 3.0
_START_S = 60.0
_END_S = 10.0


class PeerUnusable(Exception):
    """It did not start, or did not answer; the message has what it said last."""


@dataclass(frozen=True, slots=True)
class PeerRate:
    tokens_per_s: float
    cores: float

    @property
    def tokens_per_core_s(self) -> float:
        return self.tokens_per_s / max(1e-9, self.cores)


@contextmanager
def dynamo(python: str) -> Iterator[tuple[int, int]]:
    """Frontend and one mock worker, found through files, tokens over TCP. The frontend's port and process."""
    model = str(resolve_model(MODEL, default_cache()))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        environment = {**os.environ, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": scratch, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        port, log = _free_port(), Path(scratch) / "log"
        frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        mocker = [python, "-m", "dynamo.mocker", "--model-path", model, "--model-name", MODEL]
        mocker += ["--speedup-ratio", "1000000", "--num-gpu-blocks-override", "100000", "--max-num-seqs", "1000"]
        process = stack.enter_context(_process(frontend, environment, log))
        stack.enter_context(_process(mocker, environment, log))
        _wait_for_answer(f"http://127.0.0.1:{port}/v1/models", MODEL, log)
        yield port, process.pid


@contextmanager
def sglang_router(python: str) -> Iterator[tuple[int, int]]:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        worker = stack.enter_context(serving(_serve_worker))
        port, log = _free_port(), Path(scratch) / "log"
        arguments = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--worker-urls", f"http://{worker.address}", "--policy", "round_robin"]
        arguments += ["--prometheus-port", str(_free_port())]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = stack.enter_context(_process(arguments, environment, log))
        _wait_for_answer(f"http://127.0.0.1:{port}/health_generate", "", log)
        yield port, process.pid


async def _serve_worker(connection: Connection) -> None:
    async with await serve_http_worker() as server:
        host, port = server.sockets[0].getsockname()[:2]
        connection.send(f"{host}:{port}")
        await closed(connection)


def http_rate(port: int, pid: int, seconds: float) -> PeerRate:
    """Of `NUM_STREAMS` streams; the CPU time is that of process `pid`."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(os.getpid).result()  # it has started
        begin_s = time.monotonic() + WARM_S
        load = HttpLoad(port, MODEL, NUM_STREAMS, ANSWER_TOKENS, begin_s, begin_s + seconds)
        asking = pool.submit(ask_http, load)
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before_s = cpu_s(pid)
        time.sleep(max(0.0, load.end_s - time.monotonic()))
        took_s = cpu_s(pid) - before_s
        try:
            return PeerRate(asking.result(), took_s / seconds)
        except (HttpRefused, OSError) as error:
            raise PeerUnusable(str(error)) from error


@contextmanager
def _process(arguments: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen(arguments, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for_answer(url: str, text: str, log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if text.encode() in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise PeerUnusable(f"no answer from {url} within {_START_S:.0f} s:\n{log.read_text(errors='replace')[-800:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
