"""`pdserve decisions`: what was decided when, by whom and why, as a table for people."""

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
    """List what was set and planned, by whom and why, and how it went, newest first."""
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
        told = "Nothing has been decided: `pdserve role`, `pdserve drain` and `pdserve pools` do, and the planner."
        out.print(told, soft_wrap=True)


def decisions_table(listed: Sequence[Decision], zone: tzinfo | None = None) -> Table:
    """Times are those of this machine, or of `zone`. Reasons are a column if there are any."""
    has_reasons = any(decision.reason for decision in listed)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("when", "worker", "set to", "key", "router"):
        table.add_column(heading, no_wrap=True)
    if has_reasons:
        table.add_column("why", ratio=1)
    for decision in listed:
        table.add_row(
            f"{decision.at.astimezone(zone):%Y-%m-%d %H:%M:%S}",
            decision.worker_id or "-",
            _set_to(decision),
            decision.key or "-",
            decision.router,
            *([_why(decision)] if has_reasons else []),
        )
    return table


def _set_to(decision: Decision) -> str:
    match decision.what:
        case "role":
            return decision.role
        case "flip done":
            moved = f", {decision.num_moved} moved" if decision.num_moved else ""
            return f"{decision.role} after {decision.took_s:.1f} s{moved}"
        case "flip failed":
            return f"{decision.role}, failed after {decision.took_s:.1f} s"
        case "plan" | "manual":
            return f"{decision.what}: {_sizes(decision)}"
        case "proposal":
            return f"dry run: {_sizes(decision)}"
        case what:
            return _TOLD.get(what, what)


def _sizes(decision: Decision) -> str:
    return f"{decision.num_prefill} prefill, {decision.num_decode} decode"


def _why(decision: Decision) -> str:
    gain = f"{decision.gain:+.3g} requests/s" if decision.gain else ""
    return ": ".join(filter(None, (gain, decision.reason)))
