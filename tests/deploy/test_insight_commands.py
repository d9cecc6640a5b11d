"""`pdserve requests` and `pdserve traffic`: what people see."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from click.testing import CliRunner

from deploy.cli import cli
from deploy.insight_commands import print_requests, print_traffic, requests_table, times_table, traffic_lines
from protos.client import PdserveClient
from protos.insight_values import ClassTraffic, Percentiles, RequestSummary, Traffic
from protos.values import Sampling, Timeline
from tests.deploy.test_views import text_console, written
from tests.router.fakes import running_fleet

DONE = RequestSummary(
    request_id="0123456789abcdef",
    received_at=datetime(2027, 1, 31, 23, 5, 7, 999, UTC),
    state="done",
    error="",
    prefill_worker="prefill-0",
    decode_worker="decode-10",
    num_prompt_tokens=1500,
    num_cached_tokens=1024,
    num_output_tokens=321,
    timeline=Timeline((), ttft_s=0.3871, tpot_s=0.0551, total_s=18.0),
    num_retries=0,
    num_resumes=0,
    num_moves=0,
    tenant="",
)
QUEUED = replace(
    DONE, state="queued", prefill_worker="", decode_worker="", num_output_tokens=0, timeline=Timeline((), 0, 0, 2.5)
)
FAILED = replace(
    DONE, request_id="mine", state="failed", error="WORKER_LOST", num_retries=2, num_resumes=1, num_moves=3
)
TRAFFIC = Traffic(
    window_s=61.3,
    ttft_s=Percentiles(1234, 0.12, 0.4567, 2.0),
    tpot_s=Percentiles(1200, 0.021, 0.033, 0.1),
    requests_per_s=20.25,
    prompt_tokens_per_s=12345.6,
    output_tokens_per_s=987.0,
    cached_share=0.483,
    attainment=0.9712,
    num_failed=3,
    num_refused=17,
    slices=(),
)


def test_requests_are_an_aligned_table_in_local_time() -> None:
    console = text_console(width=160)
    console.print(requests_table([QUEUED, DONE, FAILED], timezone(timedelta(hours=2))))
    heading, queued, done, failed = (" ".join(line.split()) for line in written(console).splitlines())
    assert heading == "came request state prefill decode prompt cached output first each in all"
    assert queued == "01:05:07 0123456789abcdef queued - - 1500 1024 0 - - 2.5 s"
    assert done == "01:05:07 0123456789abcdef done prefill-0 decode-10 1500 1024 321 387 ms 55.1 ms 18 s"
    assert failed.endswith("18 s WORKER_LOST, 2 retries, 1 resume, 3 moves")
    lines = written(console).splitlines()
    assert {line.index("prefill-0") for line in lines[2:]} == {lines[0].index("prefill")}


def test_traffic_in_two_lines_and_a_table() -> None:
    assert traffic_lines(TRAFFIC) == [
        "the last 61 s: 20.2 requests/s; "
        "of answers 12,346 prompt tokens/s, 48 % of them cached, and 987 output tokens/s",
        "97.1 % of the answers met both SLOs; 3 failed, 17 refused",
    ]
    classes = (
        ClassTraffic("default", 1000, 0.985, 0.9),
        ClassTraffic("batch", 234, 0.5, 0.725),
        ClassTraffic("c", 0, 1, 0.9),
    )
    assert traffic_lines(replace(TRAFFIC, classes=classes))[2:] == [
        "  default: 98.5 % of 1,000, of which 90 % are to",
        "  batch: 50.0 % of 234, of which 72.5 % are to",
        "  c: no answers",
    ]
    console = text_console()
    console.print(times_table(TRAFFIC))
    assert [" ".join(line.split()) for line in written(console).splitlines()] == [
        "p50 p90 p99 answers",
        "first token 120 ms 457 ms 2 s 1,234",
        "each later one 21 ms 33 ms 100 ms 1,200",
    ]


async def test_a_router_is_asked() -> None:
    async with running_fleet(num_both=1) as fleet:
        address = fleet.router.address
        console = text_console(width=140)
        await print_requests(address, 20, console, PdserveClient, running_only=False)
        await print_requests(address, 20, console, PdserveClient, running_only=True)
        await print_traffic(address, 60.0, console, PdserveClient)
        said = written(console).splitlines()
        assert said[:2] == ["There has been no request since the router started.", "No request is running."]
        assert said[3] == "no answers; 0 failed, 0 refused"
        async with PdserveClient(address) as client:
            for name in ("first", "second"):
                async for _ in client.generate([5, 6, 7], sampling=Sampling(max_tokens=4), request_id=name):
                    pass
        console = text_console(width=140)
        await print_requests(address, 1, console, PdserveClient, running_only=False)
        assert [line.split()[1:7] for line in written(console).splitlines()[1:]] == [
            ["second", "done", "w0", "w0", "3", "0"]
        ]
        console = text_console(width=140)
        await print_traffic(address, 3600.0, console, PdserveClient)
        assert written(console).splitlines()[-2].split()[-1] == "2"


@pytest.mark.parametrize(
    ("window", "complaint"),
    [("9s", "'9s' is no time"), ("2h", "'2h' is no time"), ("soon", "'soon' is no time"), ("", "is no time")],
)
def test_windows_that_are_none(window: str, complaint: str) -> None:
    result = CliRunner().invoke(cli, ["traffic", "--window", window])
    assert result.exit_code == 2 and complaint in result.stderr


@pytest.mark.parametrize(
    ("window", "window_s"), [("10", 10.0), ("90s", 90.0), ("5m", 300.0), ("1h", 3600.0), ("1.5m", 90.0)]
)
def test_windows_are_understood(monkeypatch: pytest.MonkeyPatch, window: str, window_s: float) -> None:
    asked: list[float] = []

    async def ask(router_address: str, window_s: float, *_: object) -> None:
        asked.append(window_s)

    monkeypatch.setattr("deploy.insight_commands.print_traffic", ask)
    assert CliRunner().invoke(cli, ["traffic", "--window", window]).exit_code == 0
    assert asked == [window_s]


@pytest.mark.parametrize("number", ["0", "501", "many"])
def test_limits_of_the_list(number: str) -> None:
    result = CliRunner().invoke(cli, ["requests", "-n", number])
    assert result.exit_code == 2 and "-n" in result.stderr
