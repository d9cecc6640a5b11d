"""The router's options of placement, as a policy."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from deploy.placement_options import placement_options, take_policy
from deploy.policy_options import policy_options, take_policies
from router.config import LimitPolicy, PlacementPolicy, SloPolicy

SLO = SloPolicy(0.5, 0.05)


def policy_of(*arguments: str) -> PlacementPolicy:
    taken: list[PlacementPolicy] = []

    @click.command()
    @placement_options
    def command(**settings: Any) -> None:
        taken.append(take_policy(settings, SLO))
        assert not settings

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return taken[0]


def test_without_options_a_policy_is_the_routers_own_for_these_slos() -> None:
    assert policy_of() == PlacementPolicy(slo=SLO)


def test_options_are_in_the_units_that_they_name() -> None:
    arguments = "--max-backlog-s 3 --max-sequences 7 --local-prefill-ms 20 --transfer-gb-s 12.5 --affinity-ms 0"
    assert policy_of(*arguments.split(), "--no-spill") == PlacementPolicy(
        limits=LimitPolicy(max_backlog_s=3.0, max_sequences=7),
        transfer_bytes_per_s=12.5e9,
        max_added_step_s=0.02,
        affinity_s=0.0,
    )


@pytest.mark.parametrize(
    "arguments", ["--max-backlog-s -1", "--max-sequences 0", "--local-prefill-ms -1", "--transfer-gb-s 0"]
)
def test_what_makes_no_sense_is_refused(arguments: str) -> None:
    with pytest.raises(click.BadParameter, match="is not in the range"):
        policy_of(*arguments.split())


def test_a_prompt_spills_over_by_the_strictest_of_all_classes() -> None:
    taken: list[dict[str, Any]] = []

    @click.command()
    @policy_options
    def command(**settings: Any) -> None:
        taken.append(take_policies(settings))

    arguments = "--slo-ttft 1 --slo-tpot 0.05 --slo-class slow=ttft:9,tpot:0.5 --slo-class chat=ttft:0.3,tpot:0.06"
    CliRunner().invoke(command, arguments.split(), standalone_mode=False, catch_exceptions=False)
    (policies,) = taken
    promised = policies["placement"].slo
    assert (promised.ttft_s, promised.tpot_s) == (0.3, 0.05)
    assert policies["slo"].ttft_s == 1.0
