"""All that `pdserve router` and `pdserve up` let people say: how to admit, to place and to plan."""

from __future__ import annotations

from typing import Any

from deploy import admission_options, placement_options, planning_options
from deploy.options import group_of

policy_options = group_of(
    admission_options.admission_options, placement_options.placement_options, planning_options.planning_options
)


def take_policies(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes these options out of a command's settings, as fields of a `RouterConfig`."""
    planning = planning_options.take_policies(settings)
    return {
        "admission": admission_options.take_policy(settings),
        "placement": placement_options.take_policy(settings, planning["slo"]),
        **planning,
    }
