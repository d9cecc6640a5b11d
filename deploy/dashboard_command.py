"""`pdserve dashboard`: the page on which people watch the pools and tune them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import click

from deploy import options, security_options
from deploy.logs import configure_logging
from deploy.process import follow_parent

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
DEFAULT_PORT = 8600


def _names(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not _NAME.fullmatch(name):
            raise click.BadParameter(f"{name!r} is no host name: give it without scheme and port")
    return value


@click.command()
@security_options.page_options
@options.host_option
@options.setting("--port", type=options.PORT, default=DEFAULT_PORT, help="Port of the page; 0 takes any that is free.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    callback=_names,
    help="A host name that people open it by, besides localhost, this machine's and addresses; may be repeated.",
)
@options.log_options
def dashboard(log_level: str, log_format: str, **settings: Any) -> None:
    """Serve a page on which to watch the pools and tune them.

    Visitors show their own API keys, if the router asks for keys: what they may see and change is what these may. With
    --tls-cert and --tls-key the page itself is served by TLS, too.
    """
    follow_parent()
    configure_logging("dashboard", log_level, log_format)
    tls = security_options.tls_of_caller(settings)
    from router.dashboard.server import DashboardConfig, serve_dashboard

    asyncio.run(serve_dashboard(DashboardConfig(**settings, tls=tls)))
