"""Emptying a worker, told to whoever asked for it: how many requests are left, and when it may be stopped."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from deploy.progress import ConsoleProgress
from deploy.security_options import Connect
from deploy.status_view import print_what_is_missing
from protos.client import PdserveClient
from protos.errors import NotFound

_DEADLINE_S = 10.0
_LOOK_S = 0.2


async def drain_worker(
    router_address: str, worker_id: str, wait_s: float, out: Console, err: Console, connect: Connect = PdserveClient
) -> bool:
    """Whether the worker is empty, which is waited for up to `wait_s`. It stays drained in any case."""
    began_at = time.monotonic()
    async with connect(router_address) as client:
        await client.set_draining(worker_id, True, deadline_s=_DEADLINE_S)
        num_left = await _num_requests(client, worker_id)
        progress = ConsoleProgress(err)
        try:
            while num_left and time.monotonic() < began_at + wait_s:
                progress.waiting(f"{worker_id} still has {_counted(num_left)}")
                await asyncio.sleep(_LOOK_S)
                num_left = await _num_requests(client, worker_id)
        finally:
            progress.waiting("")
        status = await client.get_status(deadline_s=_DEADLINE_S)
    took_s = time.monotonic() - began_at
    if num_left == 0:
        out.print(f"{worker_id} is drained: nothing runs there, after {took_s:.1f} s. It may be stopped now.")
    else:
        out.print(
            f"{worker_id} gets nothing new, and still has {_counted(num_left)} after {took_s:.1f} s: prompts are "
            "finished there, and other decode workers need room for what it answers (`pdserve status`)."
        )
    print_what_is_missing(status, router_address, out)
    return num_left == 0 or wait_s == 0


async def undo_drain(router_address: str, worker_id: str, out: Console, connect: Connect = PdserveClient) -> None:
    async with connect(router_address) as client:
        await client.set_draining(worker_id, False, deadline_s=_DEADLINE_S)
    out.print(f"{worker_id} gets requests again.")


async def _num_requests(client: PdserveClient, worker_id: str) -> int:
    """As many as the router has there, or as it says itself. Raises NotFound: it has left meanwhile."""
    status = await client.get_status(deadline_s=_DEADLINE_S)
    for worker in status.workers:
        if worker.worker_id == worker_id and worker.state != "lost":
            return max(worker.num_requests, worker.num_running + worker.num_waiting)
    raise NotFound(f"worker {worker_id!r} has left", field="worker_id")


def _counted(number: int) -> str:
    return f"{number} request{'s' * (number != 1)}"
