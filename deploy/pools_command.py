"""`pdserve pools`: who sizes the pools, and how large they are to be."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from deploy.options import group_of
from deploy.security_options import Connect, router_access

if TYPE_CHECKING:
    from protos.plan_values import Plan

_DEADLINE_S = 10.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_S = 7 * 86400.0


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no time such as 90s, 30m, 2h or 1d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= _MAX_S:
        raise click.BadParameter(f"{value!r} is not above 0 and at most 7d")
    return seconds


_change_options = group_of(
    click.option("--reason", default="", metavar="TEXT", help="For the log of decisions."),
    click.option("--preview", is_flag=True, help="Change nothing: say which workers would change their roles."),
    router_access,
)
_dry_run_option = click.option(
    "--dry-run/--no-dry-run", default=None, help="The planner says what it would change, and changes nothing."
)


@click.group(invoke_without_command=True)
@router_access
@click.pass_context
def pools(context: click.Context, router_address: str, connect: Connect) -> None:
    """Show who sizes the pools, and what is planned; or change it."""
    if context.invoked_subcommand is None:
        from deploy.pools_view import print_plan

        print_plan(asyncio.run(_asked(router_address, connect)), _console())
        return
    for option in context.command.params:  # they would be those of another router
        if context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"give {option.opts[0]} behind `{context.invoked_subcommand}`.", context)


@pools.command("set")
@click.option("--prefill", "num_prefill", type=click.IntRange(1), required=True, help="Workers that prefill.")
@click.option("--decode", "num_decode", type=click.IntRange(1), required=True, help="Workers that decode.")
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    callback=_seconds,
    help="How long, as 90s, 30m, 2h; then as before.  [default: 1h]",
)
@_change_options
def set_sizes(**settings: Any) -> None:
    """Set the sizes by hand, for some time."""
    _change("manual", **settings)


@pools.command("auto")
@_dry_run_option
@_change_options
def hand_over(**settings: Any) -> None:
    """Let the planner size them."""
    _change("auto", **settings)


@pools.command("freeze")
@_change_options
def freeze(**settings: Any) -> None:
    """Leave them as they are."""
    _change("frozen", **settings)


def _change(mode: str, router_address: str, connect: Connect, **settings: Any) -> None:
    from deploy.pools_view import print_plan, print_preview

    plan = asyncio.run(_asked(router_address, connect, mode, **settings))
    if settings["preview"]:
        print_preview(plan, _console())
    else:
        print_plan(plan, _console())


async def _asked(router_address: str, connect: Connect, mode: str = "", **settings: Any) -> Plan:
    """What holds, or what will once it is changed to `mode`."""
    from deploy.status_view import deadline_told

    with deadline_told(router_address):
        async with connect(router_address) as client:
            if not mode:
                return await client.get_plan(deadline_s=_DEADLINE_S)
            return await client.set_plan(mode, deadline_s=_DEADLINE_S, **settings)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
