"""The flags of what several routers share, each described once."""

from __future__ import annotations

import click

from deploy.options import group_of, setting

_SCHEMES = ("redis://", "rediss://", "unix://")


def _url(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value and not value.startswith(_SCHEMES):
        raise click.BadParameter(f"it must begin with {_SCHEMES[0]}, {_SCHEMES[1]} (TLS) or {_SCHEMES[2]}")
    return value


store_options = group_of(
    click.option(
        "--store",
        metavar="URL",
        default="",
        envvar="PDSERVE_STORE",
        show_envvar=True,
        callback=_url,
        help="The Redis that several routers share, as redis://HOST:PORT; a password belongs into the variable, "
        "which `ps` does not show.  [default: this router is alone]",
    ),
    setting("--store-namespace", default="pdserve", help="Keeps deployments in one Redis apart."),
)
