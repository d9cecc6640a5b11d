"""The sides of bench.goodput that are vLLM's: two instances, a core each, behind a round robin, or as one for prefill
and one for decode over its NIXL connector, as its own proxies do it: the first token is prefilled and thrown away.

Instances speak OpenAI's HTTP, and are the same for both sides. They stand still while others are measured: vLLM's
processes poll when they are idle.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench.goodput_figures import Answer
from bench.goodput_requests import Request
from bench.goodput_sides import NotAtRest
from deploy.free_port import free_port
from deploy.log_folder import LogFolder
from deploy.process import ChildProcess, Command, ProcessEnded
from deploy.progress import Progress, shown

_HOST, _MODEL = "127.0.0.1", "bench"
_START_S, _END_S, _REST_S, _POLL_S = 300.0, 15.0, 60.0, 0.2
_LONGEST_LINE = 1 << 24  # a list of blocks comes in one
_IN_USE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
_WANTS_DECODE_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


class HttpFailed(Exception):
    """It answered something else than 200, or not to the end."""


class Instance:
    """One vLLM server. `port` is of its HTTP interface."""

    def __init__(self, process: ChildProcess, port: int) -> None:
        self.process, self.port = process, port

    def send(self, number: signal.Signals) -> None:
        """To all its processes."""
        if self.process.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    async def is_up(self) -> bool:
        try:
            async with asyncio.timeout(5.0), _asked(self.port, "/health"):
                return True
        except (OSError, HttpFailed, TimeoutError):
            return False

    async def num_requests(self) -> int:
        """Raises HttpFailed, OSError or TimeoutError."""
        async with asyncio.timeout(10.0), _asked(self.port, "/metrics") as lines:
            values = [line.rpartition(b" ")[2] async for line in lines if line.decode().startswith(_IN_USE)]
        return round(sum(map(float, values)))

    async def whole(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer in one piece. Raises HttpFailed or OSError."""
        async with _asked(self.port, "/v1/completions", asked) as lines:
            async for line in lines:
                if line.startswith(b"{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        raise HttpFailed("an answer without content")

    async def streamed(self, asked: Mapping[str, Any]) -> list[tuple[float, int]]:
        """When each message came, and its tokens. Raises HttpFailed or OSError."""
        messages = []
        async with _asked(self.port, "/v1/completions", asked) as lines:
            async for line in lines:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    if choices is None:
                        raise HttpFailed(line.decode(errors="replace"))
                    num_tokens = sum(len(choice.get("token_ids") or ()) for choice in choices)
                    if num_tokens:
                        messages.append((time.monotonic(), num_tokens))
        return messages


class VllmSide:
    """Answers with both instances; `splits`: the first one prefills for the second one."""

    def __init__(self, name: str, instances: Sequence[Instance], *, splits: bool) -> None:
        self.name = name
        self._instances = instances
        self._splits = splits
        self._num_asked = 0

    async def get_ready(self) -> None:
        for instance in self._instances:
            instance.send(signal.SIGCONT)
        give_up_at, num_left = time.monotonic() + _REST_S, math.nan
        while num_left:
            for instance in self._instances:
                if instance.process.exit_code is not None:
                    raise ProcessEnded(instance.process)
            with suppress(HttpFailed, OSError, TimeoutError):
                num_left = sum([await instance.num_requests() for instance in self._instances])
            if num_left and time.monotonic() > give_up_at:
                raise NotAtRest(f"{self.name}: {num_left} requests in flight")
            await asyncio.sleep(_POLL_S)

    async def leave(self) -> None:
        for instance in self._instances:
            instance.send(signal.SIGSTOP)

    async def ask(self, request: Request, deadline_s: float) -> Answer:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                messages = await (self._hand_over(request) if self._splits else self._in_turn(request))
        except (OSError, HttpFailed, TimeoutError, KeyError, ValueError) as error:
            return Answer.failed(type(error).__name__)
        return Answer.of(asked_at, messages, request.num_output_tokens, len(request.prompt) if self._splits else 0)

    async def _in_turn(self, request: Request) -> list[tuple[float, int]]:
        self._num_asked += 1
        return await self._instances[self._num_asked % len(self._instances)].streamed(_body(request))

    async def _hand_over(self, request: Request) -> list[tuple[float, int]]:
        prefill, decode = self._instances
        asked = {**_body(request), "max_tokens": 1, "min_tokens": 1, "stream": False}
        prefilled = await prefill.whole({**asked, "kv_transfer_params": _WANTS_DECODE_ELSEWHERE})
        return await decode.streamed({**_body(request), "kv_transfer_params": prefilled["kv_transfer_params"]})


@asynccontextmanager
async def vllm_instances(
    python: str, model: Path, step_tokens: int, progress: Progress
) -> AsyncIterator[list[Instance]]:
    """One for each core of the first two. Raises ProcessEnded or TimeoutError if one does not start."""
    folder = LogFolder()
    try:
        async with AsyncExitStack() as stack:
            instances = []
            for core in sorted(os.sched_getaffinity(0))[:2]:
                command, port = _command(python, model, step_tokens, core, folder.path)
                process = await ChildProcess.start(command)
                stack.push_async_callback(process.stop, _END_S)
                instances.append(Instance(process, port))
            async with asyncio.timeout(_START_S), shown(progress, _starting):
                for instance in instances:
                    while not await instance.is_up():
                        if instance.process.exit_code is not None:
                            raise ProcessEnded(instance.process)
                        await asyncio.sleep(_POLL_S)
            try:
                yield instances
            finally:
                for instance in instances:
                    instance.send(signal.SIGCONT)
    finally:
        folder.remove()


async def _starting() -> str:
    return "waiting for two instances of vLLM"


def _command(python: str, model: Path, step_tokens: int, core: int, logs: Path) -> tuple[Command, int]:
    port = free_port(_HOST, 0)
    arguments = (
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", _MODEL),
        *("--host", _HOST, "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"),
        *("--max-num-batched-tokens", str(step_tokens), "--kv-transfer-config", json.dumps(_CONNECTOR)),
    )
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(_HOST, 0)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # which vLLM asks for, and its package brings
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    return Command(f"vllm-{core}", arguments, logs / f"vllm-{core}.log", environment), port


def _body(request: Request) -> dict[str, Any]:
    count = request.num_output_tokens
    sizes = {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "temperature": 0}
    return {"model": _MODEL, "prompt": list(request.prompt), "stream": True, "return_token_ids": True, **sizes}


@asynccontextmanager
async def _asked(port: int, path: str, body: Mapping[str, Any] | None = None) -> AsyncIterator[AsyncIterator[bytes]]:
    """The lines of an answer, marks of chunks among them. Its connection is its own, and the request ends with it."""
    reader, writer = await asyncio.open_connection(_HOST, port, limit=_LONGEST_LINE)
    try:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise HttpFailed((status + await reader.read(500)).decode(errors="replace"))
        yield reader
    finally:
        writer.close()
