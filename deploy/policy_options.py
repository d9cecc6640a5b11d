"""All that `pdserve router` and `pdserve up` let people say: how to admit, to place and to plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deploy import admission_options, placement_options, planning_options
from deploy.options import group_of
from router.config import SloPolicy

policy_options = group_of(
    admission_options.admission_options, placement_options.placement_options, planning_options.planning_options
)


def take_policies(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes these options out of a command's settings, as fields of a `RouterConfig`."""
    planning = planning_options.take_policies(settings)
    return {
        "admission": admission_options.take_policy(settings),
        "placement": placement_options.take_policy(
            settings, _strictest([planning["slo"], *planning["slo_classes"].values()])
        ),
        **planning,
    }


def _strictest(slos: Sequence[SloPolicy]) -> SloPolicy:
    """What keeps to it keeps to all of them: placement does not know of classes."""
    return replace(slos[0], ttft_s=min(slo.ttft_s for slo in slos), tpot_s=min(slo.tpot_s for slo in slos))
