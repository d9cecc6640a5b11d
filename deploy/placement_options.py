"""Options of the router that say where requests go, and how much a worker may have before they wait."""

from __future__ import annotations

from typing import Any

import click

from deploy.options import group_of
from deploy.router_options import router_setting
from router.config import LimitPolicy, PlacementPolicy, SloPolicy

_AT_LEAST_0, _ABOVE_0 = click.FloatRange(0), click.FloatRange(0, min_open=True)
_POLICY, _LIMITS = PlacementPolicy(), LimitPolicy()

placement_options = group_of(
    router_setting(
        "--max-backlog-s",
        type=_AT_LEAST_0,
        default=_LIMITS.max_backlog_s,
        help="Prompts wait at the router while every prefill worker is busy for longer than this, as predicted.",
    ),
    router_setting(
        "--max-sequences",
        type=click.IntRange(1),
        help="Sequences on one decode worker, at most.  [default: what it runs at once]",
    ),
    router_setting(
        "--local-prefill-ms",
        type=_AT_LEAST_0,
        default=_POLICY.max_added_step_s * 1000,
        help="Let a decode worker prefill what takes it no longer than this, where that is sooner. 0: never.",
    ),
    router_setting(
        "--spill/--no-spill",
        default=True,
        help="Let a decode worker prefill what might be late by --slo-ttft, where it keeps to --slo-tpot all the same.",
    ),
    router_setting(
        "--transfer-gb-s",
        type=_ABOVE_0,
        default=_POLICY.transfer_bytes_per_s / 1e9,
        help="How fast KV is taken to move from worker to worker, until that has been measured.",
    ),
    router_setting(
        "--affinity-ms",
        type=_AT_LEAST_0,
        default=_POLICY.affinity_s * 1000,
        help="How much later an answer may come for the sake of staying where its session was.",
    ),
)


def take_policy(settings: dict[str, Any], slo: SloPolicy) -> PlacementPolicy:
    """Takes these options out of a command's settings."""
    return PlacementPolicy(
        limits=LimitPolicy(max_backlog_s=settings.pop("max_backlog_s"), max_sequences=settings.pop("max_sequences")),
        transfer_bytes_per_s=settings.pop("transfer_gb_s") * 1e9,
        max_added_step_s=settings.pop("local_prefill_ms") / 1000,
        slo=slo if settings.pop("spill") else None,
        affinity_s=settings.pop("affinity_ms") / 1000,
    )
