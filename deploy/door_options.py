"""The flags of the router's doors: those beside pdserve.v1, and whether clients may go past the router."""

from __future__ import annotations

from collections.abc import Callable

import click

from deploy.options import F, group_of, setting


def _http_port(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """None: no HTTP."""
    if value == "off":
        return None
    if not (value.isascii() and value.isdecimal()) or int(value) > 65535:
        raise click.BadParameter(f"{value!r} is neither off nor a port from 0 to 65535")
    return int(value)


def http_port_option(default: str = "8080") -> Callable[[F], F]:
    return setting(
        "--http-port",
        metavar="PORT|off",
        callback=_http_port,
        default=default,
        help="Port of the OpenAI-compatible HTTP interface; 0 takes any that is free.",
    )


kserve_option = setting(
    "--kserve/--no-kserve", default=True, help="Serve KServe's v2 gRPC too, at the router's own port."
)

direct_option = setting(
    "--direct",
    is_flag=True,
    default=False,
    help="Let clients read answers at the decode workers, whose addresses they learn; the router places and resumes.",
)

dashboard_port_option = setting(
    "--dashboard-port",
    metavar="PORT|off",
    callback=_http_port,
    default="off",
    help="Port of the page on which pools are watched and tuned; 0 takes any that is free.",
)

door_options = group_of(http_port_option(), kserve_option, direct_option)
