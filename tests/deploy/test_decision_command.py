"""`pdserve decisions`: what people see of who set what."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from click.testing import CliRunner

from deploy.cli import cli
from deploy.decision_command import decisions_table, print_decisions
from protos.client import PdserveClient
from protos.status_values import Decision
from tests.deploy.test_views import text_console, written
from tests.router.fakes import running_fleet

ROLE = Decision(datetime(2027, 1, 31, 23, 5, 7, 999, UTC), "role", "decode-1", "both", "ann", "10.0.0.1:8500")
DRAIN = replace(ROLE, what="drain", worker_id="prefill-10", role="", key="")
UNDONE = replace(DRAIN, what="no drain", worker_id="w")
LATER = replace(DRAIN, what="bake", worker_id="w")
POOLS = replace(DRAIN, worker_id="")


def test_table_is_aligned_and_times_are_local() -> None:
    console = text_console(width=100)
    console.print(decisions_table([LATER, UNDONE, DRAIN, ROLE], timezone(timedelta(hours=2))))
    assert [line.rstrip() for line in written(console).splitlines()] == [
        "when                 worker      set to             key  router",
        "2027-02-01 01:05:07  w           bake               -    10.0.0.1:8500",
        "2027-02-01 01:05:07  w           no longer drained  -    10.0.0.1:8500",
        "2027-02-01 01:05:07  prefill-10  drained            -    10.0.0.1:8500",
        "2027-02-01 01:05:07  decode-1    both               ann  10.0.0.1:8500",
    ]


def test_what_was_planned_and_how_it_went_is_told_with_the_reason() -> None:
    console = text_console(width=130)
    listed = [
        replace(DRAIN, what="flip failed", role="decode", took_s=61.04, reason="x: the worker has left"),
        replace(DRAIN, what="flip done", role="prefill", took_s=1.26, num_moved=12, reason="prompts wait"),
        replace(DRAIN, what="flip done", role="both", took_s=0.0),
        replace(POOLS, what="plan", num_prefill=3, num_decode=5, gain=2.345, reason="prompts wait"),
        replace(POOLS, what="proposal", num_prefill=9, num_decode=1, gain=0.5),
        replace(POOLS, what="manual", num_prefill=1, num_decode=7, reason="a fair", key="ann"),
        replace(POOLS, what="frozen", reason="the role of w1 was set by hand"),
        replace(POOLS, what="auto"),
    ]
    console.print(decisions_table(listed, UTC))
    lines = [line.rstrip() for line in written(console).splitlines()]
    start = "2027-01-31 23:05:07"
    assert lines == [
        "when                 worker      set to                         key  router         why",
        f"{start}  prefill-10  decode, failed after 61.0 s    -    10.0.0.1:8500  x: the worker has left",
        f"{start}  prefill-10  prefill after 1.3 s, 12 moved  -    10.0.0.1:8500  prompts wait",
        f"{start}  prefill-10  both after 0.0 s               -    10.0.0.1:8500",
        f"{start}  -           plan: 3 prefill, 5 decode      -    10.0.0.1:8500  +2.35 requests/s: prompts wait",
        f"{start}  -           dry run: 9 prefill, 1 decode   -    10.0.0.1:8500  +0.5 requests/s",
        f"{start}  -           manual: 1 prefill, 7 decode    ann  10.0.0.1:8500  a fair",
        f"{start}  -           frozen                         -    10.0.0.1:8500  the role of w1 was set by hand",
        f"{start}  -           auto                           -    10.0.0.1:8500",
    ]


async def test_a_lone_router_is_asked_and_says_so_when_there_is_nothing() -> None:
    async with running_fleet(num_both=1) as fleet:
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 20, console, PdserveClient)
        told = "Nothing has been decided: `pdserve role`, `pdserve drain` and `pdserve pools` do, and the planner.\n"
        assert written(console) == told
        async with PdserveClient(fleet.router.address) as client:
            await client.set_draining("w0", True)
            await client.set_plan("frozen")
            await client.set_role("w0", "both")
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 20, console, PdserveClient)
        heading, first, _, second = (line.split() for line in written(console).splitlines())
        assert heading == ["when", "worker", "set", "to", "key", "router"]
        assert first[2:] == ["w0", "both", "-", fleet.router.address]
        assert second[2:] == ["w0", "drained", "-", fleet.router.address]
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 1, console, PdserveClient)
        assert len(written(console).splitlines()) == 2


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
def test_limits_of_the_list(limit: str) -> None:
    result = CliRunner().invoke(cli, ["decisions", "--limit", limit])
    assert result.exit_code == 2
    assert "--limit" in result.stderr
