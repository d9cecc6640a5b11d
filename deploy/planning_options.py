"""Options of the router that say who sizes the pools, and what they are to keep to."""

from __future__ import annotations

from typing import Any

import click

from deploy.options import group_of
from deploy.router_options import router_setting
from router.config import SloPolicy, SteeringPolicy
from router.slo_classes import parse_classes

_ABOVE_0 = click.FloatRange(0, min_open=True)
_POLICY, _SLO = SteeringPolicy(), SloPolicy()


def _classes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """As they were given, so that they can be passed on."""
    try:
        parse_classes(values, _SLO)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return values


planning_options = group_of(
    router_setting(
        "--plan",
        type=click.Choice(("auto", "frozen")),
        default="auto" if _POLICY.is_automatic else "frozen",
        help="auto: the router sets how many workers prefill and decode. frozen: roles change by hand only.",
    ),
    router_setting(
        "--plan-dry-run/--no-plan-dry-run",
        default=_POLICY.dry_run,
        help="Say what would be changed, and change nothing.",
    ),
    router_setting(
        "--plan-every", type=_ABOVE_0, default=_POLICY.every_s, metavar="SECONDS", help="Between two plans."
    ),
    router_setting(
        "--slo-ttft", type=_ABOVE_0, default=_SLO.ttft_s, metavar="SECONDS", help="To the first token, to plan for."
    ),
    router_setting(
        "--slo-tpot", type=_ABOVE_0, default=_SLO.tpot_s, metavar="SECONDS", help="Per token after it, likewise."
    ),
    router_setting(
        "--slo-share",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        default=_SLO.percentile,
        help="Of the requests are to keep to both.",
    ),
    router_setting(
        "--slo-class",
        "slo_classes",
        multiple=True,
        metavar="NAME=ttft:SECONDS,tpot:SECONDS,share:SHARE",
        callback=_classes,
        help="Other SLOs, for the keys that name this class; what is left out is as above. May be given several times.",
    ),
)


def take_policies(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes these options out of a command's settings, as fields of a `RouterConfig`."""
    steering = SteeringPolicy(
        is_automatic=settings.pop("plan") == "auto",
        dry_run=settings.pop("plan_dry_run"),
        every_s=settings.pop("plan_every"),
    )
    slo = SloPolicy(settings.pop("slo_ttft"), settings.pop("slo_tpot"), settings.pop("slo_share"))
    return {"steering": steering, "slo": slo, "slo_classes": parse_classes(settings.pop("slo_classes"), slo)}
