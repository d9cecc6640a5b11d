"""What goes wrong in bench.chaos: workers killed, killed at a stage, stopped, drained, and fault plans; all by a seed.

Each pool keeps a worker that is neither dead nor stopped, so that there is somewhere to go on.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress

from deploy.fault_seams import set_fault_plan
from deploy.local import LocalCluster
from kvtransfer.fault_injection import INJECTED
from kvtransfer.faults import Stage
from protos.client import PdserveClient
from protos.errors import Unavailable

PAUSE_S = (0.2, 1.0)
STAGE_S = 8.0  # for a stage to be reached
STOPPED_S = (0.3, 1.0, 3.0, 7.0, 20.0)  # the router gives a worker up after 5, gRPC after 15
DRAINED_S = (0.2, 1.0, 3.0)
DEADLINE_S = 20.0  # of a call; the machine is busy
PLAN_S = (1.0, 4.0)
ON_PREFILL = [stage for stage in Stage if list(Stage).index(stage) < list(Stage).index(Stage.GRANTED)]
MESSAGE_FAULTS = (
    *(f"drop {message} 15%" for message in ("reserve", "reserve answer", "commit", "commit answer")),
    *(f"drop {message} 50%" for message in ("describe", "release", "release answer", "heartbeat", "heartbeat answer")),
    *(f"delay {message} 50% 0.3s" for message in ("describe", "reserve", "reserve answer", "commit", "commit answer")),
    *(f"delay {message} 8% 6s" for message in ("reserve", "reserve answer", "commit", "commit answer")),
    *(f"delay {message} 50% 1.5s" for message in ("heartbeat", "heartbeat answer", "release")),
    *(f"duplicate {message} 50%" for message in ("describe", "heartbeat", "reserve", "commit", "release", "write")),
    *(f"corrupt {message} 15%" for message in ("describe", "describe answer", "heartbeat", "heartbeat answer")),
    *(f"corrupt {message} 15%" for message in ("reserve", "reserve answer", "commit", "release")),
    *("fail write 2%", "delay write 10% 0.3s", "stall write 20 1s", "stall write 40"),
)
SILENT_FAULTS = ("corrupt write 1%", "drop write 1%")  # nobody is told of them: checksums have to find them


class Storm:
    """`run` disturbs until cancelled; `calm` then brings everybody back."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()  # of what is done from here; what workers inject is in their logs
        self._cluster = cluster
        self._rng = rng
        self._out_of_service: dict[str, asyncio.Task[None]] = {}  # by worker
        self._workers = list(cluster.config.worker_roles)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_out_of_service())
            for name in self._workers:
                if name.startswith("prefill"):  # who sends the messages
                    tasks.create_task(self._misinform(name))

    async def calm(self) -> None:
        """Waits until everybody is back and knows of no fault any more. Raises what went wrong in that."""
        await asyncio.gather(*self._out_of_service.values())
        for name in self._workers:
            await self._set_plan(name, "none")

    async def _take_out_of_service(self) -> None:
        """One of each pool at a time, at most."""
        while True:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            busy_pools = {name.split("-")[0] for name in self._out_of_service}
            names = [name for name in self._workers if name.split("-")[0] not in busy_pools]
            if names:
                name = self._rng.choice(names)
                kinds = (self._kill, self._kill_at_stage, self._kill_at_stage, self._stop, self._drain, self._terminate)
                disturb = self._rng.choice(kinds)
                task = self._out_of_service[name] = asyncio.create_task(disturb(name))
                task.add_done_callback(lambda done, name=name: self._is_back(name, done))  # type: ignore[misc]

    def _is_back(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:  # else `calm` raises it
            del self._out_of_service[name]

    async def _kill(self, name: str) -> None:
        self.counts["kill -9"] += 1
        await self._cluster.kill(name)
        await self._cluster.restart(name)

    async def _drain(self, name: str) -> None:
        """What decodes there goes elsewhere as it runs, some of it not in time."""
        self.counts["drain"] += 1
        async with PdserveClient(self._cluster.router_address) as client:
            await client.set_draining(name, True, deadline_s=DEADLINE_S)
            await asyncio.sleep(self._rng.choice(DRAINED_S))
            await client.set_draining(name, False, deadline_s=DEADLINE_S)

    async def _terminate(self, name: str) -> None:
        self.counts["SIGTERM"] += 1
        os.kill(self._cluster.pid(name), signal.SIGTERM)
        await self._cluster.ended(name)
        await self._cluster.restart(name)

    async def _kill_at_stage(self, name: str) -> None:
        stages = [stage for stage in Stage if (stage in ON_PREFILL) == name.startswith("prefill")]
        stage = self._rng.choice(stages)
        plan = f"kill at {stage.value} {self._rng.randrange(1, 6)}"
        if stage is Stage.RELEASING:
            plan += f"; corrupt commit 30%; seed {self._rng.randrange(10**6)}"  # what is refused is given back
        await self._set_plan(name, plan)
        try:
            async with asyncio.timeout(STAGE_S):
                await self._cluster.ended(name)
        except TimeoutError:
            await self._set_plan(name, "none")
        else:
            await self._cluster.restart(name)

    async def _stop(self, name: str) -> None:
        self.counts["stop"] += 1
        pid = self._cluster.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.choice(STOPPED_S))
        finally:
            os.kill(pid, signal.SIGCONT)

    async def _misinform(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*PLAN_S))
            if name not in self._out_of_service:
                faults = [*SILENT_FAULTS, *self._rng.sample(MESSAGE_FAULTS, self._rng.randrange(0, 5))]
                with suppress(Unavailable):  # it has just been killed
                    await self._set_plan(name, "; ".join([*faults, f"seed {self._rng.randrange(10**6)}"]))

    async def _set_plan(self, name: str, plan: str) -> None:
        worker = (await self._cluster.workers())[name]
        await set_fault_plan(worker.address, plan, timeout_s=DEADLINE_S)


def injected(cluster: LocalCluster) -> Counter[str]:
    """What the workers' logs say was made to happen."""
    counts: Counter[str] = Counter()
    for name in cluster.config.worker_roles:
        for line in cluster.log_path(name).read_text(errors="replace").splitlines():
            _, found, what = line.partition(INJECTED)
            if found:
                counts[what.strip().rpartition(" ")[0]] += 1
    return counts
