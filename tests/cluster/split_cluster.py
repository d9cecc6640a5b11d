"""A cluster in two networks: router, prefill-0 and decode-1 in the near one, decode-0 in the far one, behind a link.

UCX has TCP alone, as it has between machines: all of these processes are on one machine, and would share memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.process import ChildProcess, Command
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.status_values import WorkerStatus
from tests.cluster.bad_network import LINK, Namespace, Network

_ROOT = Path(__file__).resolve().parents[2]
_ROUTER_PORT, _WORKER_PORT, _METRICS_PORT = 8500, 8501, 9501
_START_S, _STOP_S = 60.0, 15.0
_FAR = "decode-0"
_ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": LINK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
# UCX finds devices in /sys, which shows those of the network it was mounted in.
_WITH_OWN_SYS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")


class SplitCluster:
    """Enters when every worker is ready, and leaves no process behind."""

    def __init__(self, network: Network, model: Path, folder: Path, *worker_arguments: str) -> None:
        self._network = network
        self._model = model
        self._folder = folder
        self._worker_arguments = worker_arguments
        self._processes: dict[str, ChildProcess] = {}
        self.router_address = f"{network.near_address}:{_ROUTER_PORT}"

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(_START_S):
                await self._start()
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(process.stop(_STOP_S) for process in self._processes.values()))
        finally:
            self._kill()

    async def workers(self) -> dict[str, WorkerStatus]:
        """As the router has them now, by id."""
        async with PdserveClient(self.router_address) as client:
            return {worker.worker_id: worker for worker in (await client.get_status(deadline_s=5)).workers}

    def log(self, name: str) -> str:
        return self._processes[name].command.log_path.read_text()

    async def metrics(self, name: str) -> dict[str, float]:
        """What a worker exports, read inside its own network, which a cut does not take from it."""
        url = f"http://{self._host(name)}:{_METRICS_PORT + self._number(name)}/metrics"

        def read() -> str:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
                return str(response.read(), "utf-8")

        text = await asyncio.to_thread(self._namespace(name).call, read)
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {series: float(value) for series, value in samples}

    async def _start(self) -> None:
        await self._spawn("router", "router", "--port", str(_ROUTER_PORT), "--plan", "frozen", "--no-spill")
        for name in ("prefill-0", _FAR, "decode-1"):
            number = self._number(name)
            ports = ("--port", str(_WORKER_PORT + number), "--metrics-port", str(_METRICS_PORT + number))
            own = ("--worker-id", name, "--role", name.partition("-")[0], "--router", self.router_address)
            await self._spawn(name, "worker", *own, *ports, "--num-threads", "1", *self._worker_arguments)
        while True:
            for process in self._processes.values():
                if process.exit_code is not None:
                    raise RuntimeError(f"{process.name} ended: {process.last_log_lines(8)}")
            try:
                if [worker.state for worker in (await self.workers()).values()] == ["ready"] * 3:
                    return
            except ServiceError:  # the router is still starting
                pass
            await asyncio.sleep(0.1)

    async def _spawn(self, name: str, command: str, *arguments: str) -> None:
        pdserve = (sys.executable, "-P", "-m", "deploy.cli", command, "--model", str(self._model))
        inside = (*self._namespace(name).entering(), *_WITH_OWN_SYS)
        host = ("--host", self._host(name), "--insecure")
        environment = {**_ENVIRONMENT, "no_proxy": "*", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
        log_path = self._folder / f"{name}.log"
        self._processes[name] = await ChildProcess.start(
            Command(name, (*inside, *pdserve, *host, *arguments), log_path, environment)
        )

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _namespace(self, name: str) -> Namespace:
        return self._network.far if name == _FAR else self._network.near

    def _host(self, name: str) -> str:
        return self._network.far_address if name == _FAR else self._network.near_address

    @staticmethod
    def _number(name: str) -> int:
        return ("router", "prefill-0", "decode-0", "decode-1").index(name)
