"""`pdserve requests` and `pdserve traffic`: what a router is doing and has done lately, as tables for people."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from deploy.quantity import told
from deploy.security_options import Connect, router_access

if TYPE_CHECKING:
    from protos.insight_values import ClassTraffic, Percentiles, RequestSummary, Traffic

_MAX_LISTED = 500
_LEAST_S, _MOST_S = 10.0, 3600.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DEADLINE_S = 10.0


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip())
    seconds = float(matched[1]) * _UNITS_S[matched[2] or "s"] if matched else 0.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise click.BadParameter(f"{value!r} is no time from 10s to 1h, such as 90s, 5m or 1h")
    return seconds


@click.command()
@click.option("--slowest", is_flag=True, help="Those that took longest first, rather than the newest.")
@click.option("--running", is_flag=True, help="Only those that have not ended.")
@click.option(
    "-n",
    "limit",
    type=click.IntRange(1, _MAX_LISTED),
    metavar="NUMBER",
    default=20,
    show_default=True,
    help="How many to list, at most.",
)
@router_access
def requests(slowest: bool, running: bool, limit: int, router_address: str, connect: Connect) -> None:
    """List requests that run or have ended lately: where they are, and where their time went."""
    asyncio.run(print_requests(router_address, limit, _console(), connect, slowest=slowest, running_only=running))


@click.command()
@click.option(
    "--window", "window_s", metavar="TIME", default="1m", show_default=True, callback=_seconds, help="How far back."
)
@router_access
def traffic(window_s: float, router_address: str, connect: Connect) -> None:
    """Tell how requests have fared lately: rates, times, and the share that met both SLOs."""
    asyncio.run(print_traffic(router_address, window_s, _console(), connect))


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 130)


async def print_requests(
    router_address: str, limit: int, out: Console, connect: Connect, *, slowest: bool = False, running_only: bool
) -> None:
    from deploy.status_view import deadline_told

    with deadline_told(router_address):
        async with connect(router_address) as client:
            listed = await client.list_requests(
                limit, slowest=slowest, running_only=running_only, deadline_s=_DEADLINE_S
            )
    if listed:
        out.print(requests_table(listed))
    else:
        out.print("No request is running." if running_only else "There has been no request since the router started.")


async def print_traffic(router_address: str, window_s: float, out: Console, connect: Connect) -> None:
    from deploy.status_view import deadline_told

    with deadline_told(router_address):
        async with connect(router_address) as client:
            found = await client.get_traffic(window_s, deadline_s=_DEADLINE_S)
    for line in traffic_lines(found):
        out.print(line, soft_wrap=True)
    if found.ttft_s.count:
        out.print(times_table(found))


def requests_table(listed: Sequence[RequestSummary], zone: tzinfo | None = None) -> Table:
    """Times of day are those of this machine, or of `zone`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("came", "request", "state", "prefill", "decode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt", "cached", "output", "first", "each", "in all"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for each in listed:
        timeline = each.timeline
        table.add_row(
            f"{each.received_at.astimezone(zone):%H:%M:%S}",
            each.request_id,
            each.state,
            each.prefill_worker or "-",
            each.decode_worker or "-",
            f"{each.num_prompt_tokens}",
            f"{each.num_cached_tokens}",
            f"{each.num_output_tokens}",
            told(timeline.ttft_s, "s") if timeline.ttft_s else "-",
            told(timeline.tpot_s, "s") if timeline.tpot_s else "-",
            told(timeline.total_s, "s"),
            _what_happened(each),
        )
    return table


def _what_happened(request: RequestSummary) -> str:
    counts = {
        ("retry", "retries"): request.num_retries,
        ("resume", "resumes"): request.num_resumes,
        ("move", "moves"): request.num_moves,
    }
    happened = [f"{number} {one if number == 1 else many}" for (one, many), number in counts.items() if number]
    return ", ".join([request.error, *happened] if request.error else happened)


def traffic_lines(traffic: Traffic) -> list[str]:
    cached = f", {100 * traffic.cached_share:.0f} % of them cached" if traffic.prompt_tokens_per_s else ""
    lines = [
        f"the last {told(traffic.window_s, 's')}: {told(traffic.requests_per_s, '')} requests/s; "
        f"of answers {told(traffic.prompt_tokens_per_s, '')} prompt tokens/s{cached}, "
        f"and {told(traffic.output_tokens_per_s, '')} output tokens/s",
    ]
    met = f"{100 * traffic.attainment:.1f} % of the answers met both SLOs" if traffic.ttft_s.count else "no answers"
    return [
        *lines,
        f"{met}; {traffic.num_failed} failed, {traffic.num_refused} refused",
        *(f"  {each.slo_class}: {_met(each)}" for each in traffic.classes),
    ]


def _met(each: ClassTraffic) -> str:
    if not each.num_answers:
        return "no answers"
    return f"{100 * each.attainment:.1f} % of {each.num_answers:,}, of which {100 * each.share:.4g} % are to"


def times_table(traffic: Traffic) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for heading in ("p50", "p90", "p99", "answers"):
        table.add_column(heading, justify="right")
    _add_times(table, "first token", traffic.ttft_s)
    _add_times(table, "each later one", traffic.tpot_s)
    return table


def _add_times(table: Table, name: str, times: Percentiles) -> None:
    table.add_row(name, told(times.p50, "s"), told(times.p90, "s"), told(times.p99, "s"), f"{times.count:,}")
