"""`pdserve key`: makes, lists and revokes API keys in a file that routers read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from router.keys import KeyEntry

_SCOPES = ("infer", "read", "operate")
_file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    envvar="PDSERVE_KEYS_FILE",
    show_envvar=True,
    help="The keys; what routers have as --keys-file.",
)
_NUMBER = click.IntRange(1)


def _scopes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    if unknown := set(names) - set(_SCOPES):
        raise click.BadParameter(f"{', '.join(sorted(unknown))!r}; there are {', '.join(_SCOPES)}")
    return names


@click.group()
def key() -> None:
    """Make, list and revoke API keys."""


@key.command()
@click.argument("name")
@click.option(
    "--scopes",
    default="infer",
    show_default=True,
    callback=_scopes,
    help="infer: ask the model. read: see the status. operate: change roles and drain workers.",
)
@click.option("--tenant", default="", help="Who shares fair queueing with other keys.  [default: NAME]")
@click.option("--slo-class", default="", help="A --slo-class of the router, which its requests are promised.")
@click.option("--requests-per-minute", type=_NUMBER, help="At most.  [default: no limit]")
@click.option("--tokens-per-minute", type=_NUMBER, help="Prompts and answers, at most.  [default: no limit]")
@click.option("--num-concurrent", type=_NUMBER, help="Requests at once, at most.  [default: no limit]")
@click.option("--expires-days", type=click.FloatRange(0, min_open=True), help="Valid for so long.  [default: for ever]")
@_file_option
def create(
    name: str,
    scopes: tuple[str, ...],
    tenant: str,
    slo_class: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    num_concurrent: int | None,
    expires_days: float | None,
    path: Path,
) -> None:
    """Add a key NAME, and print it: it is shown this once, the file has only its hash."""
    from protos.caller import Limits, Scope
    from router.keys import SCOPES, create_key

    granted = Scope(0)
    for scope in scopes:
        granted |= SCOPES[scope]
    expires_at = None
    if expires_days is not None:
        expires_at = (datetime.now(UTC) + timedelta(days=expires_days)).replace(microsecond=0)
    limits = Limits(requests_per_minute, tokens_per_minute, num_concurrent)
    made = create_key(
        path,
        name,
        tenant=tenant or name,
        scopes=granted,
        limits=limits,
        expires_at=expires_at,
        slo_class=slo_class,
    )
    click.echo(made)
    click.echo(f"{name} may {', '.join(scopes)}. Keep the key above: nothing else has it.", err=True)


@key.command(name="list")
@_file_option
def list_(path: Path) -> None:
    """Show the keys: names, scopes, limits; not the keys themselves, which nobody has."""
    from router.keys import read_keys

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    entries = read_keys(path)
    has_classes = any(entry.slo_class for entry in entries)
    for heading in ("key", "tenant", *["SLO class"] * has_classes, "scopes", "limits", "expires"):
        table.add_column(heading, no_wrap=True)
    for entry in entries:
        slo_class = [entry.slo_class or "default"] * has_classes
        table.add_row(entry.name, entry.tenant, *slo_class, _scopes_of(entry), _limits_of(entry), _expiry_of(entry))
    Console(highlight=False, width=120).print(table)


@key.command()
@click.argument("name")
@_file_option
def revoke(name: str, path: Path) -> None:
    """Remove the key NAME: routers refuse it within a second."""
    from router.keys import revoke_key

    revoke_key(path, name)
    click.echo(f"{name} is revoked.")


def _scopes_of(entry: KeyEntry) -> str:
    from protos.access import names

    return names(entry.scopes)


def _limits_of(entry: KeyEntry) -> str:
    limits = entry.limits
    told = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.num_concurrent, "at once"),
    )
    return ", ".join(f"{number} {what}" for number, what in told if number is not None) or "none"


def _expiry_of(entry: KeyEntry) -> str:
    if entry.expires_at is None:
        return "never"
    when = (
        f"{entry.expires_at:%Y-%m-%d %H:%M} UTC"
        if entry.expires_at.utcoffset() == timedelta(0)
        else str(entry.expires_at)
    )
    return f"{when} (has expired)" if entry.has_expired(datetime.now(UTC)) else when
