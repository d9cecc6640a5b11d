"""The workers as the router sees them, as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from deploy.security_options import Connect
from protos.client import PdserveClient
from protos.errors import DeadlineExceeded
from protos.status_values import Status, WorkerStatus

_COLUMNS = ("worker", "role", "state", "address", "metrics")
_NUMBERS = ("wait", "run", "queued", "blocks")
_DEADLINE_S = 10.0
_LATE_S = 2.0  # workers report every second


async def print_status(router_address: str, out: Console, connect: Connect = PdserveClient) -> None:
    with deadline_told(router_address):
        async with connect(router_address) as client:
            status = await client.get_status(deadline_s=_DEADLINE_S)
    out.print(summary_line(status))
    if status.workers:
        out.print(workers_table(status))
    if drafters := drafters_line(status):
        out.print(drafters)
    print_what_is_missing(status, router_address, out)


async def change_role(
    router_address: str, worker_id: str, role: str, out: Console, connect: Connect = PdserveClient
) -> None:
    with deadline_told(router_address):
        async with connect(router_address) as client:
            await client.set_role(worker_id, role, deadline_s=_DEADLINE_S)
            status = await client.get_status(deadline_s=_DEADLINE_S)
            plan = await client.get_plan(deadline_s=_DEADLINE_S)
    out.print(f"{worker_id} is used for {role} from the next request on.")
    if plan.mode == "frozen":
        out.print("Roles are set by hand only, until `pdserve pools auto` hands them to the planner.")
    print_what_is_missing(status, router_address, out)


@contextmanager
def deadline_told(router_address: str) -> Iterator[None]:
    """gRPC says only that there was one."""
    try:
        yield
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"the router at {router_address} did not answer within {_DEADLINE_S:g} s: it is stopped or overloaded, or "
            "something else listens there; see its log"
        ) from error


def print_what_is_missing(status: Status, router_address: str, out: Console) -> None:
    if missing := what_is_missing(status, router_address):
        out.print(missing)


def what_is_missing(status: Status, router_address: str) -> str:
    """Why requests cannot be served now, and what to do; empty if they can."""
    present = [worker for worker in status.workers if worker.state != "lost"]
    if not present:
        if status.workers:
            return f"Every worker has left. Start another with `pdserve worker --router {router_address}`"
        return (
            "No worker has registered: they may still be starting, which `pdserve up` tells. One started by hand needs "
            f"--router {router_address}"
        )
    ready = {worker.role for worker in present if worker.state == "ready"}
    missing = [role for role in ("prefill", "decode") if not ready & {role, "both"}]
    if not missing:
        return ""
    return (
        f"No worker that is ready has the role {' or '.join(missing)}: requests wait a few seconds for one, and fail "
        f"then. Start one with `pdserve worker --role {missing[0]}`, or let another change with "
        "`pdserve role WORKER both`"
    )


def workers_table(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in _COLUMNS:
        table.add_column(heading, no_wrap=True)
    for heading in _NUMBERS:
        table.add_column(heading, justify="right")
    for worker in sorted(status.workers, key=lambda worker: worker.worker_id):
        table.add_row(
            worker.worker_id,
            worker.role,
            _state(worker),
            worker.address,
            _without_host(worker.metrics_address, worker.address),
            f"{worker.num_waiting}",
            f"{worker.num_running}",
            f"{worker.queued_prefill_tokens}",
            _blocks(worker),
        )
    return table


def _state(worker: WorkerStatus) -> str:
    """With the age of what the worker has said, if that is not as usual."""
    return f"{worker.state}, {worker.reported_ago_s:.0f} s ago" if worker.reported_ago_s >= _LATE_S else worker.state


def drafters_line(status: Status) -> str:
    """What drafts on the workers that decode; empty if there are none."""
    decoding = [worker for worker in status.workers if worker.role != "prefill" and worker.state != "lost"]
    where = {
        drafter: ", ".join(sorted(worker.worker_id for worker in decoding if worker.drafter == drafter))
        for drafter in sorted({worker.drafter for worker in decoding})
    }
    told = "; ".join(f"{drafter or 'unknown'} on {names}" for drafter, names in where.items())
    return told and f"drafter: {told}"


def _without_host(address: str, other: str) -> str:
    """The port alone, where the host is that of the other address: a line has 80 columns."""
    host, _, port = address.rpartition(":")
    return f":{port}" if port and other.startswith(f"{host}:") else address


def _blocks(worker: WorkerStatus) -> str:
    """Used of all; quarantined ones, if there are any, are among those used."""
    quarantined = f" ({worker.num_quarantined_blocks} quarantined)" if worker.num_quarantined_blocks else ""
    return f"{worker.num_used_blocks}/{worker.num_blocks}{quarantined}"


def summary_line(status: Status) -> str:
    kinds = ", ".join(sorted({_kind(worker) for worker in status.workers}))
    workers = _counted(len(status.workers), "worker")
    requests = _counted(status.num_requests_in_flight, "request")
    waiting = f", {status.num_requests_waiting} of them waiting for room" if status.num_requests_waiting else ""
    return (
        f"{status.model_name}: {workers}{kinds and f', {kinds}'}; {requests} in flight{waiting}; "
        f"router {'draining, ' * status.is_draining}up for {status.uptime_s:.0f} s"
        f"{status.metrics_address and f', metrics at {status.metrics_address}'}"
    )


def _kind(worker: WorkerStatus) -> str:
    return "timed (computes nothing)" if worker.runner == "timed" else f"{worker.runner} ({worker.kernels})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
