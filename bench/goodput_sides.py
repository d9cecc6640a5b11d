"""The sides of bench.goodput that are ours: two workers of one cluster, which are a prefill and a decode worker or do
both, by their roles alone; and how requests are played to any side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Protocol

from bench.goodput_figures import Answer, Played, Slo, num_needed
from bench.goodput_requests import Request
from deploy.local import ROUTER, LocalCluster
from protos.client import PdserveClient
from protos.errors import ServiceError
from protos.values import Sampling, Summary

_REST_S = 60.0
_LOOK_S = 0.05
STATUS_S = 10.0


class NotAtRest(Exception):
    """A side still worked long after it had nothing to do, or is not as it should be; the message says what is left."""


class Side(Protocol):
    """Something that answers, on all cores that there are, while the others do nothing."""

    @property
    def name(self) -> str: ...

    async def get_ready(self) -> None:
        """Before every run: returns when nothing is left of other runs. Raises NotAtRest."""

    async def ask(self, request: Request, deadline_s: float) -> Answer:
        """Failures are answers too."""

    async def leave(self) -> None:
        """After every run: others are measured."""


class PdserveSide:
    """Two workers of a cluster in the roles given, of which `get_ready` takes care. Workers know nothing of roles but
    what they are asked to do, so the sides differ by nothing else: not even by where their memory is."""

    def __init__(self, name: str, cluster: LocalCluster, client: PdserveClient, roles: Sequence[str]) -> None:
        self.name = name
        self._client = client
        self._roles = dict(zip(sorted(cluster.config.worker_roles), roles, strict=True))

    async def get_ready(self) -> None:
        give_up_at = time.monotonic() + _REST_S
        while problem := await self._what_is_left():
            if time.monotonic() > give_up_at:
                raise NotAtRest(f"{self.name}: {problem}")
            await asyncio.sleep(_LOOK_S)

    async def leave(self) -> None:
        """Workers sleep when they have nothing to do."""

    async def ask(self, request: Request, deadline_s: float) -> Answer:
        sampling = Sampling(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
        asked_at, messages, num_received, num_cached = time.monotonic(), list[tuple[float, int]](), 0, 0
        try:
            asking = self._client.generate(request.prompt, sampling=sampling, deadline_s=deadline_s)
            async with aclosing(asking) as parts:
                async for part in parts:
                    if isinstance(part, Summary):
                        num_received = part.usage.decode_received_tokens
                        num_cached = part.usage.prefill_cached_tokens + part.usage.decode_cached_tokens
                    elif part.token_ids:
                        messages.append((time.monotonic(), len(part.token_ids)))
        except ServiceError as error:
            return Answer.failed(error.reason)
        return Answer.of(asked_at, messages, request.num_output_tokens, num_received, num_cached)

    async def _what_is_left(self) -> str:
        status = await self._client.get_status(deadline_s=STATUS_S)
        workers = {worker.worker_id: worker for worker in status.workers}
        for worker_id, role in self._roles.items():
            worker = workers.get(worker_id)
            if worker is None or worker.state != "ready":
                return f"{worker_id} is not ready"
            if worker.role != role:
                await self._client.set_role(worker_id, role, deadline_s=STATUS_S)
                return f"{worker_id} has role {worker.role}, not {role}"
            if worker.num_used_blocks:
                return f"{worker_id} has {worker.num_used_blocks} blocks in use"
        return f"{status.num_requests_in_flight} requests in flight" if status.num_requests_in_flight else ""


async def promise(cluster: LocalCluster, slo: Slo) -> None:
    """Starts the router again, which then knows the SLOs, as one that is run to keep them would."""
    await cluster.stop(ROUTER)
    await cluster.restart(ROUTER, "--slo-ttft", f"{slo.ttft_s:.4f}", "--slo-tpot", f"{slo.tpot_s:.5f}")


def deadline_s(request: Request, slo: Slo) -> float:
    """Far behind the SLOs: who gets an answer so late has left."""
    return 4.0 * (slo.ttft_s + request.num_output_tokens * slo.tpot_s)


async def play(
    side: Side, requests: Sequence[Request], moments: Sequence[float], per_s: float, slo: Slo, *, to_the_end: bool
) -> Played:
    """Each request comes at its moment, and waits for nothing. Unless it has to go `to_the_end`, the run is over, and
    what still runs is cancelled, when too many are late already."""
    await side.get_ready()
    answers, num_late, num_may_be_late = list[Answer](), 0, len(requests) - num_needed(len(requests))
    is_lost = asyncio.Event()

    async def ask(request: Request, at: float) -> None:
        nonlocal num_late
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        answer = await side.ask(request, deadline_s(request, slo))
        answers.append(answer)
        num_late += not answer.keeps(slo)
        if num_late > num_may_be_late and not to_the_end:
            is_lost.set()

    began_at = time.monotonic()
    asking: list[asyncio.Task[Any]] = [
        asyncio.create_task(ask(each, began_at + at)) for each, at in zip(requests, moments, strict=True)
    ]
    losing: asyncio.Task[Any] = asyncio.create_task(is_lost.wait())
    try:
        waiting = set(asking)
        while waiting and not is_lost.is_set():
            done, _ = await asyncio.wait([*waiting, losing], return_when=asyncio.FIRST_COMPLETED)
            for task in done & waiting:
                task.result()
            waiting -= done
    finally:
        for task in (*asking, losing):
            task.cancel()
        await asyncio.gather(*asking, losing, return_exceptions=True)
        await side.leave()
    return Played(per_s, len(requests), answers)
