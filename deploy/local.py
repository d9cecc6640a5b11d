"""A whole pdserve on this machine: router and workers as child processes, started, watched and ended together.

Knows the command line of the children and the router's status; what a worker is made of is `deploy.worker`'s business.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from deploy.back_off import BackOff
from deploy.free_port import free_port
from deploy.local_page import Page, PageConfig
from deploy.log_folder import LogFolder
from deploy.logs import message_of
from deploy.process import ChildProcess, Command, ProcessEnded
from deploy.progress import Progress, Silent, shown
from protos.client import PdserveClient
from protos.errors import DeadlineExceeded, ServiceError
from protos.status_values import Status, WorkerStatus

ROUTER, DASHBOARD = "router", "dashboard"
_ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.1
_STATUS_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """`num_threads` None shares the cores out evenly; arguments are given to every router or worker process.

    `environment` is laid over this process's own, for all of them.
    """

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    num_colocated: int = 0
    host: str = "127.0.0.1"
    port: int = 0  # of the router; 0: any that is free
    http_port: int | None = None  # of its OpenAI interface, likewise; None: none
    page: PageConfig | None = None  # the dashboard
    num_threads: int | None = None
    plan: str = "frozen"  # auto: the router changes roles; what programs start has those that they say
    spill: bool = False  # prompts, to decode workers: likewise
    router_arguments: Sequence[str] = ()
    worker_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    connect: Callable[[str], PdserveClient] = PdserveClient
    flags_of_callers: Sequence[str] = ()  # for the commands that call this cluster, as people are told
    start_timeout_s: float = 300.0
    stop_grace_s: float = 40.0

    def __post_init__(self) -> None:
        if min(self.num_prefill, self.num_decode, self.num_colocated) < 0 or self.num_workers == 0:
            raise ValueError("a cluster has at least one worker: --prefill, --decode or --colocated must be above 0")
        if self.num_colocated == 0 and (self.num_prefill == 0 or self.num_decode == 0):
            raise ValueError("prefill and decode workers need each other: give at least one of each, or --colocated 1")

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_colocated

    @property
    def worker_roles(self) -> dict[str, str]:
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "both": self.num_colocated}
        return {f"{'worker' if role == 'both' else role}-{i}": role for role, n in counts.items() for i in range(n)}

    @property
    def threads_per_worker(self) -> int:
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // self.num_workers)


class LocalCluster:
    """`async with LocalCluster(config) as cluster:` enters when every worker is ready, and leaves no process behind."""

    def __init__(self, config: ClusterConfig, progress: Progress | None = None) -> None:
        self.config = config
        self.router_address = f"{config.host}:{free_port(config.host, config.port)}"
        self._http_port = None if config.http_port is None else free_port(config.host, config.http_port, "--http-port")
        self.page = None if config.page is None else Page(config.page, config.host)
        self._progress = progress or Silent()
        self._folder = LogFolder()
        self._processes: dict[str, ChildProcess] = {}
        self._epochs: dict[str, str] = {}  # of the workers seen ready: a restarted one has another
        self._ready: set[str] = set()  # processes that were, at some time

    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Returns when every process is ready; failing that, it leaves none."""
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._spawn(self._router_command())
                if self.page is not None:
                    await self._spawn(self._command(DASHBOARD, *self.page.command(self.router_address)))
                for worker_id, role in self.config.worker_roles.items():
                    await self._spawn(self._worker_command(worker_id, role))
                async with shown(self._progress, self._what_starts):
                    await self._wait_for_router()
                    await self.wait_ready(self.config.worker_roles)
                    await self._wait_for_page()
        except TimeoutError:
            await self.close()
            raise TimeoutError(f"not every process was ready after {self.config.start_timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """The router first: it lets what is in flight finish, which needs the workers."""
        try:
            async with shown(self._progress, self._what_ends):
                if ROUTER in self._processes:
                    await self.stop(ROUTER)
                await asyncio.gather(*(self.stop(name) for name in self._processes if name != ROUTER))
        finally:
            self.kill_all()
            self._folder.remove()

    @property
    def http_address(self) -> str:
        """Empty if HTTP is not served."""
        return "" if self._http_port is None else f"{self.config.host}:{self._http_port}"

    @property
    def log_folder(self) -> Path:
        return self._folder.path

    async def workers(self) -> dict[str, WorkerStatus]:
        """The workers as the router has them now, by id."""
        return {worker.worker_id: worker for worker in (await self._status()).workers}

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log_path(self, name: str) -> Path:
        return self._processes[name].command.log_path

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when the process is gone."""
        self._processes[name].kill()
        await self._processes[name].wait()

    async def ended(self, name: str) -> int:
        """Waits until the process has ended by itself; returns its exit code, -N if signal N ended it."""
        return await self._processes[name].wait()

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()

    async def stop(self, name: str) -> int:
        """Drains and ends one process; returns its exit code."""
        return await self._processes[name].stop(self.config.stop_grace_s)

    async def restart(self, name: str, *more: str) -> None:
        """Starts a process that has ended again, and waits until it is ready. `more` arguments overrule what it had."""
        command = self._processes[name].command
        await self._spawn(replace(command, arguments=(*command.arguments, *more)))
        if name == ROUTER:
            await self._wait_for_router()
        elif name == DASHBOARD:
            await self._wait_for_page()
        else:
            await self.wait_ready([name])

    async def wait_ready(self, worker_ids: Iterable[str]) -> None:
        """Raises ProcessEnded if one of them ends meanwhile."""
        missing = set(worker_ids)
        while True:
            for worker_id in missing & (workers := await self._workers_if_any() or {}).keys():
                worker = workers[worker_id]
                if worker.state == "ready" and worker.epoch != self._epochs.get(worker_id):
                    missing.remove(worker_id)
                    self._epochs[worker_id] = worker.epoch
                    self._ready.add(worker_id)
                    self._progress.became(
                        worker_id, f"ready   {worker.address}   {worker.num_blocks} blocks of KV cache"
                    )
            if not missing:
                return
            for worker_id in missing:
                self._raise_if_ended(worker_id)
            await asyncio.sleep(_POLL_S)

    async def supervise(self) -> None:
        """Starts again what ends, as long as that helps; then raises ProcessEnded. Returns only by cancellation."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._processes:
                    tasks.create_task(self._keep_running(name))
        except* ProcessEnded as ended:
            raise ended.exceptions[0] from None

    async def _keep_running(self, name: str) -> None:
        back_off = BackOff()
        while True:
            started_at = time.monotonic()
            await self._processes[name].wait()
            ended = ProcessEnded(self._processes[name])
            delay_s = back_off.after_run_of(time.monotonic() - started_at)
            if delay_s is None:
                raise ended
            self._progress.became(name, f"{ended}\n  Starting it again in {delay_s:g} s.")
            await asyncio.sleep(delay_s)
            with suppress(ProcessEnded):  # seen above, at the next turn
                await self.restart(name)

    async def _wait_for_router(self) -> None:
        while await self._workers_if_any() is None:
            self._raise_if_ended(ROUTER)
            await asyncio.sleep(_POLL_S)
        self._ready.add(ROUTER)
        self._progress.became(ROUTER, f"ready   {self.router_address}")

    async def _wait_for_page(self) -> None:
        if self.page is None:
            return
        while not await self.page.is_served():
            self._raise_if_ended(DASHBOARD)
            await asyncio.sleep(_POLL_S)
        self._ready.add(DASHBOARD)
        self._progress.became(DASHBOARD, f"ready   {self.page.url}")

    def _raise_if_ended(self, name: str) -> None:
        if self._processes[name].exit_code is not None:
            raise ProcessEnded(self._processes[name])

    def _router_command(self) -> Command:
        ports = ("--port", self.router_address.rpartition(":")[2], "--http-port", str(self._http_port or "off"))
        policies = ("--plan", self.config.plan, "--spill" if self.config.spill else "--no-spill")
        own = ("--model", self.config.model, "--host", self.config.host, *ports, *policies)
        return self._command(ROUTER, "router", *own, *self.config.router_arguments)

    def _worker_command(self, worker_id: str, role: str) -> Command:
        own = ("--worker-id", worker_id, "--role", role, "--router", self.router_address, "--host", self.config.host)
        shared = ("--model", self.config.model, "--num-threads", str(self.config.threads_per_worker))
        return self._command(worker_id, "worker", *own, *shared, *self.config.worker_arguments)

    def _command(self, name: str, *arguments: str) -> Command:
        """-P: a folder named `model` where the user happens to be must not be taken for ours."""
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(self.config.threads_per_worker),
            **self.config.environment,
        }
        interpreter = (sys.executable, "-P", "-m", "deploy.cli")
        return Command(name, (*interpreter, *arguments), self.log_folder / f"{name}.log", environment)

    async def _spawn(self, command: Command) -> None:
        self._processes[command.name] = await ChildProcess.start(command)

    async def _status(self) -> Status:
        async with self.config.connect(self.router_address) as client:
            return await client.get_status(deadline_s=_STATUS_S)

    async def _workers_if_any(self) -> dict[str, WorkerStatus] | None:
        """None while the router does not answer."""
        try:
            return await self.workers()
        except ServiceError as error:
            if not error.retryable and not isinstance(error, DeadlineExceeded):
                raise
            return None

    async def _what_starts(self) -> str:
        """The processes that are not ready yet, by what they said last."""
        names: dict[str, list[str]] = {}
        for name in self._processes:
            if name not in self._ready:
                names.setdefault(self._last_words(name), []).append(name)
        return "waiting for " + "; ".join(f"{', '.join(group)}: {words}" for words, group in names.items())

    def _last_words(self, name: str) -> str:
        lines = self._processes[name].last_log_lines(1)
        return (message_of(lines[0]) if lines else None) or "starting"

    async def _what_ends(self) -> str:
        try:
            num_requests = (await self._status()).num_requests_in_flight
        except ServiceError:  # the router has ended, or never answered
            return "stopping"
        if num_requests == 0:
            return "stopping"
        return f"Draining: {num_requests} request{'s' * (num_requests != 1)} running (Ctrl-C again stops at once)"
