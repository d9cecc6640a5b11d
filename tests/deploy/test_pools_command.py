"""`pdserve pools`: what people see of who sizes the pools, and what they may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from deploy.cli import cli
from deploy.planning_options import planning_options, take_policies
from deploy.pools_view import duration, print_plan, print_preview
from protos.client import PdserveClient
from protos.plan_values import Flip, Plan, Sizes, SloClass
from router.config import SloPolicy, SteeringPolicy
from tests.deploy.test_views import text_console, written
from tests.router.fakes import running_fleet

AT = datetime(2027, 1, 31, 23, 5, 7, 999, UTC)
FLIP = Flip("decode-1", "decode", "prefill", AT, "done", 1.26, 12, "prompts wait", "")
FAILED = replace(FLIP, worker_id="w", state="failed", took_s=3.0, num_moved=3, problem="the worker has left")
PLAN = Plan(
    mode="auto",
    dry_run=False,
    num_prefill=2,
    num_decode=3,
    num_both=0,
    in_force=Sizes(4, 2, 3, "prompts wait", 9.5, 0.8),
    proposed=Sizes(5, 3, 2, "more prompts wait", 11.0, 0.8),
    proposed_gain=1.25,
    ratios=(),
    slo_ttft_s=0.5,
    slo_tpot_s=0.05,
    slo_share=0.9,
    manual_for_s=None,
    flips=(FLIP, FAILED),
    would_flip=(),
    planned_by="10.0.0.1:8500",
    planned_ago_s=3.2,
)


def lines(plan: Plan, width: int = 100) -> list[str]:
    console = text_console(width)
    print_plan(plan, console, UTC)
    return [line.rstrip() for line in written(console).splitlines()]


def test_all_of_it() -> None:
    assert lines(PLAN) == [
        "pools     auto: the planner sizes them",
        "now       2 prefill, 3 decode",
        "plan      2 prefill, 3 decode: prompts wait",
        "proposed  3 prefill, 2 decode (+1.25 requests/s within the SLO): more prompts wait",
        "planned   3.2 s ago, at 10.0.0.1:8500",
        "SLO       first token within 500 ms, then 50 ms a token, for 90 % of the requests",
        "",
        "when      worker    from    to       state    took  moved  why",
        "23:05:07  decode-1  decode  prefill  done    1.3 s     12  prompts wait",
        "23:05:07  w         decode  prefill  failed  3.0 s      3  prompts wait; the worker has left",
    ]


def test_classes_of_slos_are_below_the_default_one() -> None:
    plan = replace(PLAN, slo_classes=(SloClass("batch", 30.0, 0.5, 0.6),), flips=())
    assert lines(plan)[-2:] == [
        "SLO       first token within 500 ms, then 50 ms a token, for 90 % of the requests",
        "          batch: first token within 30 s, then 500 ms a token, for 60 % of the requests",
    ]


def test_little_is_known() -> None:
    nothing: dict[str, Any] = {"in_force": None, "proposed": None, "flips": (), "planned_by": "", "planned_ago_s": None}
    plan = replace(PLAN, mode="manual", dry_run=True, num_both=1, manual_for_s=1500.0, **nothing)
    assert lines(plan) == [
        "pools  manual: their sizes are set by hand, for 25 min more (dry run: it changes nothing)",
        "now    2 prefill, 3 decode, 1 of them both",
        "SLO    first token within 500 ms, then 50 ms a token, for 90 % of the requests",
    ]
    assert lines(replace(PLAN, mode="frozen", flips=()))[0] == "pools     frozen: they stay as they are"


def test_a_preview_names_who_would_change() -> None:
    console = text_console(100)
    print_preview(replace(PLAN, would_flip=(replace(FLIP, state=""),)), console)
    end = [line.rstrip() for line in written(console).splitlines()][-3:]
    assert end == ["Would change their roles:", "worker    from    to", "decode-1  decode  prefill"]
    console = text_console(100)
    print_preview(PLAN, console)
    assert written(console).splitlines()[-1] == "No worker would change its role."


@pytest.mark.parametrize(
    "seconds, told",
    [(0.0204, "20.4 ms"), (1.0, "1 s"), (90.0, "90 s"), (150.0, "2 min"), (1800.0, "30 min"), (9000.0, "2 h 30 min")],
)
def test_times_as_people_say_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("pools set --prefill 1", "Missing option '--decode'"),
        ("pools set --prefill 0 --decode 1", "0 is not in the range x>=1"),
        ("pools set --prefill 1 --decode 1 --for 30", "'30' is no time such as 90s, 30m, 2h or 1d"),
        ("pools set --prefill 1 --decode 1 --for 8d", "'8d' is not above 0 and at most 7d"),
        ("pools set --prefill 1 --decode 1 --for 0s", "'0s' is not above 0 and at most 7d"),
        ("pools --router 127.0.0.1:1 freeze", "give --router behind `freeze`"),
    ],
)
def test_wrong_usage(arguments: str, told: str) -> None:
    result = CliRunner().invoke(cli, arguments.split())
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


async def test_from_the_command_to_the_workers_and_back() -> None:
    async with running_fleet(num_prefill=2, num_decode=2) as fleet, PdserveClient(fleet.router.address) as client:
        address = fleet.router.address

        async def said(arguments: str) -> Result:
            command = ["pools", *arguments.split(), "--router", address]
            return await asyncio.to_thread(CliRunner().invoke, cli, command)

        shown = await said("")
        assert "auto: the planner sizes them" in shown.stdout and "2 prefill, 2 decode" in shown.stdout
        preview = await said("set --prefill 3 --decode 1 --for 30m --preview")
        assert "Would change their roles:" in preview.stdout and "for 30 min more" in preview.stdout
        assert (await client.get_plan()).num_prefill == 2
        done = await said("set --prefill 3 --decode 1 --for 30m --reason burst")
        assert (done.exit_code, "3 prefill, 1 decode: burst" in done.stdout) == (0, True)
        plan = await client.get_plan()
        assert (plan.mode, plan.num_prefill, plan.num_decode) == ("manual", 3, 1)
        assert plan.manual_for_s is not None and 1700 < plan.manual_for_s <= 1800
        refused = await said("set --prefill 4 --decode 1")
        assert refused.exit_code == 1
        assert "num_prefill and num_decode are 5 together; they must be 4" in refused.stderr
        await said("freeze --reason holiday")
        assert (await client.get_plan()).mode == "frozen"
        await said("auto --dry-run")
        plan = await client.get_plan()
        assert (plan.mode, plan.dry_run) == ("auto", True)
        await said("auto --no-dry-run")
        assert not (await client.get_plan()).dry_run
        whats = [each.what for each in await client.list_decisions() if not each.what.startswith("flip")]
        assert whats == ["auto", "auto", "frozen", "manual"]


@contextmanager
def taken(*arguments: str) -> Iterator[dict[str, Any]]:
    policies: list[dict[str, Any]] = []

    @click.command()
    @planning_options
    def command(**settings: Any) -> None:
        policies.append(take_policies(settings))
        assert not settings

    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    yield policies[0]


def test_options_of_the_router() -> None:
    with taken() as policies:
        assert policies == {"steering": SteeringPolicy(), "slo": SloPolicy(), "slo_classes": {}}
        assert SteeringPolicy().is_automatic and not SteeringPolicy().dry_run
    arguments = "--plan frozen --plan-dry-run --plan-every 5 --slo-ttft 0.2 --slo-tpot 0.03 --slo-share 0.95"
    with taken(*arguments.split()) as policies:
        steering = SteeringPolicy(is_automatic=False, dry_run=True, every_s=5.0)
        assert policies == {"steering": steering, "slo": SloPolicy(0.2, 0.03, 0.95), "slo_classes": {}}
    arguments = "--slo-ttft 2 --slo-class fast=ttft:0.3,share:0.99 --slo-class slow=tpot:1"
    with taken(*arguments.split()) as policies:
        classes = {"fast": SloPolicy(0.3, 0.1, 0.99), "slow": SloPolicy(2.0, 1.0, 0.9)}
        assert (policies["slo"], policies["slo_classes"]) == (SloPolicy(2.0), classes)
    told = "class 'fast': ttft is 0; it must be a number of seconds above 0"
    with pytest.raises(click.BadParameter, match=told), taken("--slo-class", "fast=ttft:0"):
        pass
    for wrong in ("--slo-ttft 0", "--slo-tpot -1", "--slo-share 1", "--plan-every 0"):
        with pytest.raises(click.BadParameter, match="is not in the range"), taken(*wrong.split()):
            pass
