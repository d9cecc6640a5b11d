"""Options of the router that say how many requests may wait there, and how long."""

from __future__ import annotations

from typing import Any

import click

from deploy.options import group_of
from deploy.router_options import router_setting
from router.config import AdmissionPolicy

_POLICY = AdmissionPolicy()

admission_options = group_of(
    router_setting(
        "--max-queued",
        type=click.IntRange(1),
        default=_POLICY.max_queued,
        help="Requests that wait at the router, at most.",
    ),
    router_setting(
        "--max-queue-s",
        type=click.FloatRange(0, min_open=True),
        default=_POLICY.max_queue_s,
        help="A request that would wait longer is refused at once.",
    ),
)


def take_policy(settings: dict[str, Any]) -> AdmissionPolicy:
    """Takes these options out of a command's settings."""
    return AdmissionPolicy(max_queued=settings.pop("max_queued"), max_queue_s=settings.pop("max_queue_s"))
