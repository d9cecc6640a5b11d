"""The processes of the router's load bench: routers, mock workers, and those who ask. All end with the bench."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from bench.router_load_asker import Asked, Load, ask
from bench.router_load_worker import serve_worker
from deploy.process import PARENT_PID, follow_parent
from protos import workers_pb2
from protos.serve import GrpcServer
from router.card import ModelCard
from router.config import RouterConfig
from router.server import Router

_START_S = 30.0
_END_S = 5.0
_SPAWN = multiprocessing.get_context("spawn")


class NoTokenizer:
    """Prompts are token ids here."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[object]) -> list[int]:
        raise NotImplementedError

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        raise NotImplementedError

    num_leading_spaces = 0

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError


CARD = ModelCard("mock", "Mock", 1_000_000, 1000, (0,), NoTokenizer())


@dataclass(frozen=True, slots=True)
class Side:
    """A process that serves at `address`."""

    address: str
    pid: int

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")


def cpu_s(pid: int) -> float:
    """So far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    """What those who asked saw together, and what the sides that they asked took for it meanwhile."""

    asked: Sequence[Asked]
    side_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(one.num_tokens / one.seconds for one in self.asked)

    @property
    def answers_per_s(self) -> float:
        return sum(one.num_answers / one.seconds for one in self.asked)

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.asked)

    @property
    def tokens_per_message(self) -> float:
        return self.num_tokens / max(1, sum(one.num_messages for one in self.asked))

    @property
    def side_cores(self) -> float:
        return self.side_cpu_s / self.asked[0].seconds

    @property
    def tokens_per_core_s(self) -> float:
        return self.num_tokens / max(1e-9, self.side_cpu_s)

    @property
    def asker_cores(self) -> float:
        return sum(one.cpu_s / one.seconds for one in self.asked)

    def latency_ms(self, share: float) -> float:
        latencies = sorted(latency for one in self.asked for latency in one.latencies_us)
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] / 1000 if latencies else float("nan")


class Bench:
    """`num_routers` routers, one prefill worker and `num_decode` decode workers, and some processes that ask."""

    def __init__(self, stack: ExitStack, num_routers: int, num_decode: int, num_askers: int) -> None:
        self.routers = [stack.enter_context(serving(_serve_router)) for _ in range(num_routers)]
        addresses = [router.address for router in self.routers]
        roles = [workers_pb2.ROLE_PREFILL, *[workers_pb2.ROLE_DECODE] * num_decode]
        names = [f"w{number}" for number in range(len(roles))]
        workers = [
            stack.enter_context(serving(_serve_worker, *one, addresses)) for one in zip(names, roles, strict=True)
        ]
        self.decode = workers[1:]
        self._num_askers = num_askers
        self._pool = stack.enter_context(ProcessPoolExecutor(num_askers, _SPAWN, initializer=follow_parent))
        list(self._pool.map(os.path.exists, ["/"] * num_askers))  # they have started

    def measure(
        self,
        load: Callable[[int, float, float], Load],
        sides: Sequence[Side],
        *,
        num_streams: int,
        warm_s: float,
        seconds: float,
    ) -> Measured:
        """`load` is given a share of the streams, and from when to when to count. `sides` are those it asks."""
        begin_s = time.monotonic() + warm_s
        num_askers = min(self._num_askers, num_streams)
        shares = [num_streams // num_askers + (n < num_streams % num_askers) for n in range(num_askers)]
        asking = [self._pool.submit(ask, load(share, begin_s, begin_s + seconds)) for share in shares]
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before_s = sum(side.cpu_s for side in sides)
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        took_s = sum(side.cpu_s for side in sides) - before_s
        return Measured([one.result() for one in asking], took_s)


@contextmanager
def serving(serve: Callable[..., Any], *arguments: object) -> Iterator[Side]:
    """`serve(connection, *arguments)` in a process of its own: it says its address, and ends when we close."""
    os.environ[PARENT_PID] = str(os.getpid())
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_run, args=(serve, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"{serve.__name__} has not started within {_START_S:.0f} s")
        yield Side(ours.recv(), process.pid or 0)
    finally:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()


def _run(serve: Callable[..., Any], connection: Connection, *arguments: object) -> None:
    follow_parent()
    uvloop.run(serve(connection, *arguments))


async def _serve_router(connection: Connection) -> None:
    async with Router(RouterConfig("mock", port=0), CARD) as router:
        gc.collect()
        gc.freeze()
        connection.send(router.address)
        await closed(connection)


async def _serve_worker(
    connection: Connection, name: str, role: workers_pb2.Role.ValueType, routers: list[str]
) -> None:
    server = GrpcServer("127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        registered = asyncio.Event()
        worker = tasks.create_task(serve_worker(name, role, server, routers, registered))
        await registered.wait()
        connection.send(server.address)
        await closed(connection)
        worker.cancel()


async def closed(connection: Connection) -> None:
    """The bench has ended."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), closed.set)
    await closed.wait()
    loop.remove_reader(connection.fileno())
