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
LATER = replace(DRAIN, what="plan", worker_id="w")


def test_table_is_aligned_and_times_are_local() -> None:
    console = text_console(width=100)
    console.print(decisions_table([LATER, UNDONE, DRAIN, ROLE], timezone(timedelta(hours=2))))
    assert [line.rstrip() for line in written(console).splitlines()] == [
        "when                 worker      set to             key  router",
        "2027-02-01 01:05:07  w           plan               -    10.0.0.1:8500",
        "2027-02-01 01:05:07  w           no longer drained  -    10.0.0.1:8500",
        "2027-02-01 01:05:07  prefill-10  drained            -    10.0.0.1:8500",
        "2027-02-01 01:05:07  decode-1    both               ann  10.0.0.1:8500",
    ]


async def test_a_lone_router_is_asked_and_says_so_when_there_is_nothing() -> None:
    async with running_fleet(num_both=1) as fleet:
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 20, console, PdserveClient)
        assert written(console) == "Nobody has set a role or drained a worker: `pdserve role` and `pdserve drain` do.\n"
        async with PdserveClient(fleet.router.address) as client:
            await client.set_draining("w0", True)
            await client.set_role("w0", "decode")
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 20, console, PdserveClient)
        heading, first, second = (line.split() for line in written(console).splitlines())
        assert heading == ["when", "worker", "set", "to", "key", "router"]
        assert first[2:] == ["w0", "decode", "-", fleet.router.address]
        assert second[2:] == ["w0", "drained", "-", fleet.router.address]
        console = text_console(width=100)
        await print_decisions(fleet.router.address, 1, console, PdserveClient)
        assert len(written(console).splitlines()) == 2


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
def test_limits_of_the_list(limit: str) -> None:
    result = CliRunner().invoke(cli, ["decisions", "--limit", limit])
    assert result.exit_code == 2
    assert "--limit" in result.stderr
