"""`pdserve decisions`: who has set which role or drain when, as a table for people."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from deploy.security_options import Connect, router_access

if TYPE_CHECKING:
    from protos.status_values import Decision

_MAX = 1000  # are kept
_DEADLINE_S = 10.0
_TOLD = {"drain": "drained", "no drain": "no longer drained"}


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, _MAX), default=20, show_default=True, help="How many to list, newest first."
)
@router_access
def decisions(limit: int, router_address: str, connect: Connect) -> None:
    """List who set which role or drain when, newest first."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    asyncio.run(print_decisions(router_address, limit, Console(highlight=False, width=width), connect))


async def print_decisions(router_address: str, limit: int, out: Console, connect: Connect) -> None:
    from deploy.status_view import deadline_told

    with deadline_told(router_address):
        async with connect(router_address) as client:
            listed = await client.list_decisions(limit, deadline_s=_DEADLINE_S)
    if listed:
        out.print(decisions_table(listed))
    else:
        out.print("Nobody has set a role or drained a worker: `pdserve role` and `pdserve drain` do.", soft_wrap=True)


def decisions_table(listed: Sequence[Decision], zone: tzinfo | None = None) -> Table:
    """Times are those of this machine, or of `zone`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("when", "worker", "set to", "key", "router"):
        table.add_column(heading, no_wrap=True)
    for decision in listed:
        table.add_row(
            f"{decision.at.astimezone(zone):%Y-%m-%d %H:%M:%S}",
            decision.worker_id,
            decision.role if decision.what == "role" else _TOLD.get(decision.what, decision.what),
            decision.key or "-",
            decision.router,
        )
    return table
