"""The workers as the router sees them, as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from protos.client import PdserveClient
from protos.values import Status

_COLUMNS = ("worker", "role", "state", "address", "metrics")
_NUMBERS = ("waiting", "running", "queued tokens", "blocks used", "quarantined")
_DEADLINE_S = 10.0


async def print_status(router_address: str, out: Console) -> None:
    async with PdserveClient(router_address) as client:
        status = await client.get_status(deadline_s=_DEADLINE_S)
    out.print(summary_line(status))
    if status.workers:
        out.print(workers_table(status))


async def change_role(router_address: str, worker_id: str, role: str, out: Console) -> None:
    async with PdserveClient(router_address) as client:
        await client.set_role(worker_id, role, deadline_s=_DEADLINE_S)
    out.print(f"{worker_id} is used for {role} from the next request on.")


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
            worker.state,
            worker.address,
            worker.metrics_address,
            f"{worker.num_waiting}",
            f"{worker.num_running}",
            f"{worker.queued_prefill_tokens}",
            f"{worker.num_used_blocks} of {worker.num_blocks}",
            f"{worker.num_quarantined_blocks}",
        )
    return table


def summary_line(status: Status) -> str:
    num_workers = len(status.workers)
    kinds = ", ".join(sorted({f"{worker.runner} ({worker.kernels})" for worker in status.workers}))
    return (
        f"{status.model_name}: {num_workers} worker{'s' * (num_workers != 1)}{kinds and f', {kinds}'}; "
        f"{status.num_requests_in_flight} requests in flight; router up for {status.uptime_s:.0f} s"
        f"{status.metrics_address and f', metrics at {status.metrics_address}'}"
    )
