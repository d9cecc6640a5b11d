from __future__ import annotations

import asyncio
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from deploy.answer_view import milliseconds, show_answer, summary_lines
from deploy.drain_view import drain_worker, undo_drain
from deploy.status_view import (
    change_role,
    drafters_line,
    print_status,
    summary_line,
    what_is_missing,
    workers_table,
)
from protos import workers_pb2, workers_pb2_grpc
from protos.calls import Context
from protos.client import Answer
from protos.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from protos.serve import GrpcServer
from protos.status_values import Status, WorkerStatus
from protos.values import Chunk, Stage, Summary, Timeline, Usage
from tests.router.fakes import running_fleet


def text_console(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


USAGE = Usage(
    prompt_tokens=38,
    output_tokens=8,
    prefill_computed_tokens=22,
    prefill_cached_tokens=16,
    decode_received_tokens=6,
    decode_cached_tokens=32,
    decode_computed_tokens=0,
    decode_recomputed_tokens=0,
    drafted_tokens=0,
    accepted_tokens=0,
    num_preemptions=0,
    num_steps=7,
    num_resumes=0,
    num_retries=0,
    num_moves=0,
    disaggregated=True,
)
STAGES = (Stage("tokenize", "", 0, 0.0012), Stage("prefill", "prefill-0", 0.003, 0.0964))
TIMELINE = Timeline(STAGES, ttft_s=0.0994, tpot_s=0.0271, total_s=0.3163)


def chunk(text: str) -> Chunk:
    return Chunk(0, (), text, (), None)


async def answer() -> Answer:
    yield chunk("Par")
    yield chunk("is.")
    yield Summary("request-1", USAGE, TIMELINE)


async def test_answer_then_timeline_and_sources() -> None:
    out, about = text_console(), text_console()
    assert await show_answer(answer(), out, about) == "Paris."
    assert written(out) == "Paris.\n"
    assert [line.rstrip() for line in written(about).splitlines()] == [
        "",
        "  stage      worker       start     took",
        "  tokenize   router        0 ms   1.2 ms",
        "  prefill    prefill-0   3.0 ms    96 ms",
        "  first token after 99 ms, then 27 ms each, 316 ms in all",
        "  prefill  38 tokens: 22 computed + 16 cached",
        "  decode   38 tokens: 6 received + 32 held already",
        "  answer   8 tokens",
    ]


async def test_quiet_answer_is_text_only() -> None:
    out = text_console()
    await show_answer(answer(), out, None)
    assert written(out) == "Paris.\n"


async def test_text_that_has_come_is_ended_with_a_line_when_the_stream_fails() -> None:
    async def failing() -> Answer:
        yield chunk("Par")
        raise ValueError("gone")

    out = text_console()
    with pytest.raises(ValueError, match="gone"):
        await show_answer(failing(), out, text_console())
    assert written(out) == "Par\n"


async def test_refusal_prints_nothing_where_answers_go() -> None:
    async def refused() -> Answer:
        raise InvalidArgument("top_p is 0")
        yield chunk("")

    out = text_console()
    with pytest.raises(InvalidArgument):
        await show_answer(refused(), out, text_console())
    assert written(out) == ""


def test_colocated_prompt_is_told_once_and_failures_are_told() -> None:
    usage = replace(
        USAGE,
        output_tokens=1,
        prefill_cached_tokens=0,
        decode_received_tokens=0,
        decode_cached_tokens=0,
        decode_computed_tokens=22,
        disaggregated=False,
        num_retries=2,
        num_resumes=1,
        num_moves=1,
    )
    assert summary_lines(usage, TIMELINE) == [
        "first token after 99 ms, 316 ms in all",
        "prefill  22 tokens: 22 computed",
        "answer   1 token",
        "moved    to another decode worker, as it ran: once",
        "failures 2 placed again before the first token, 1 resumed after it",
    ]


def test_guesses_are_told_where_there_were_any() -> None:
    usage = replace(USAGE, output_tokens=120, num_steps=48, drafted_tokens=96, accepted_tokens=72)
    assert summary_lines(usage, TIMELINE)[-1] == "answer   120 tokens in 48 steps, 72 of 96 guesses right"
    resumed = summary_lines(replace(usage, num_resumes=1), TIMELINE)
    assert "answer   120 tokens in 48 steps, 72 of 96 guesses right, since it was resumed" in resumed


@pytest.mark.parametrize(
    "num_waiting, told", [(0, "; 12 requests in flight; router"), (3, "; 12 requests in flight, 3 of them waiting for")]
)
def test_requests_that_wait_are_told(num_waiting: int, told: str) -> None:
    status = Status("demo-moe", 12, 5.0, "", (), num_requests_waiting=num_waiting)
    assert told in summary_line(status)


TIMES = [(0, "0 ms"), (0.00042, "0.4 ms"), (0.0099, "9.9 ms"), (1.2345, "1234 ms")]


@pytest.mark.parametrize(("seconds", "text"), TIMES)
def test_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


DECODE = WorkerStatus(
    worker_id="decode-0",
    epoch="e",
    address="127.0.0.1:40123",
    metrics_address="127.0.0.1:40124",
    role="decode",
    flippable=True,
    state="ready",
    model_name="demo-moe",
    runner="torch",
    kernels="avx2",
    drafter="ngram",
    num_blocks=4096,
    num_free_blocks=4084,
    num_used_blocks=12,
    num_quarantined_blocks=0,
    queued_prefill_tokens=0,
    num_waiting=0,
    num_running=2,
    prefill_tokens_per_s=0.0,
    decode_step_s=0.0,
    num_requests=1,
    reported_ago_s=0.1,
)


def test_workers_table_is_sorted_and_fits_a_terminal() -> None:
    prefill = replace(DECODE, worker_id="prefill-0", role="prefill", num_quarantined_blocks=1)
    status = Status("demo-moe", num_requests_in_flight=3, uptime_s=12.4, metrics_address="", workers=(prefill, DECODE))
    console = text_console(width=110)
    console.print(workers_table(status))
    heading, first, second = (line.split() for line in written(console).splitlines())
    assert heading[:4] == ["worker", "role", "state", "address"]
    numbers = ["127.0.0.1:40123", ":40124", "0", "2", "0", "12/4096"]
    assert first == ["decode-0", "decode", "ready", *numbers]
    assert second == ["prefill-0", "prefill", "ready", *numbers, "(1", "quarantined)"]
    assert summary_line(status) == "demo-moe: 2 workers, torch (avx2); 3 requests in flight; router up for 12 s"


@pytest.mark.parametrize(
    ("state", "ago_s", "told"),
    [("ready", 1.2, "ready  "), ("ready", 3.4, "ready, 3 s ago  "), ("silent", 7.0, "silent, 7 s ago  ")],
)
def test_what_a_worker_said_long_ago_is_told_with_its_age(state: str, ago_s: float, told: str) -> None:
    console = text_console(width=110)
    worker = replace(DECODE, state=state, reported_ago_s=ago_s)
    console.print(workers_table(Status("m", 0, 1.0, "", (worker,))))
    assert f"decode-0  decode  {told}127.0.0.1" in written(console)


def test_drafters_are_those_of_workers_that_decode() -> None:
    workers = (
        replace(DECODE, worker_id="decode-1"),
        DECODE,
        replace(DECODE, worker_id="both-0", role="both", drafter="none"),
        replace(DECODE, worker_id="prefill-0", role="prefill", drafter="eagle"),
        replace(DECODE, worker_id="decode-2", state="lost", drafter="medusa"),
    )
    assert drafters_line(Status("m", 0, 1.0, "", workers)) == "drafter: ngram on decode-0, decode-1; none on both-0"
    assert drafters_line(Status("m", 0, 1.0, "", ())) == ""


def test_timed_workers_and_a_router_that_drains_are_called_so() -> None:
    timed = replace(DECODE, runner="timed", kernels="timed")
    status = Status("demo-moe", 1, 5.0, "127.0.0.1:9", workers=(timed,), is_draining=True)
    assert summary_line(status) == (
        "demo-moe: 1 worker, timed (computes nothing); 1 request in flight; "
        "router draining, up for 5 s, metrics at 127.0.0.1:9"
    )


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ([], "No worker has registered: .* `pdserve up` .* --router 10.0.0.1:8500"),
        ([("decode", "lost")], "Every worker has left.* --router 10.0.0.1:8500"),
        (
            [("decode", "ready")],
            "has the role prefill: .*`pdserve worker --role prefill`, .*`pdserve role WORKER both`",
        ),
        ([("decode", "draining"), ("prefill", "ready")], "has the role decode: "),
        ([("decode", "silent"), ("prefill", "ready")], "has the role decode: "),
        ([("prefill", "draining")], "has the role prefill or decode: "),
        ([("prefill", "ready"), ("decode", "ready")], ""),
        ([("both", "ready")], ""),
    ],
)
def test_status_says_which_role_is_missing_and_what_to_do(workers: list[tuple[str, str]], told: str) -> None:
    known = tuple(replace(DECODE, role=role, state=state) for role, state in workers)
    said = what_is_missing(Status("m", 0, 1.0, "", known), "10.0.0.1:8500")
    assert re.search(told, said) and bool(said) == bool(told)


class Mute(workers_pb2_grpc.PoolsServicer):
    async def GetStatus(self, request: workers_pb2.GetStatusRequest, context: Context) -> workers_pb2.Status:
        await asyncio.sleep(60)
        raise AssertionError("it was not cancelled")


async def test_router_that_does_not_answer_is_told_with_the_time_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.status_view._DEADLINE_S", 0.4)
    server = GrpcServer("127.0.0.1", 0)
    server.add(workers_pb2_grpc.add_PoolsServicer_to_server, Mute())  # type: ignore[abstract]
    await server.start()
    with pytest.raises(
        DeadlineExceeded, match=f"router at {server.address} did not answer within 0.4 s: it is stopped"
    ):
        await print_status(server.address, text_console())
    await server.stop()


async def test_who_takes_the_last_worker_of_a_role_away_is_told() -> None:
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:
        address, out = fleet.router.address, text_console()
        with pytest.raises(FailedPrecondition, match="no worker in service decodes but 'd0'"):
            await change_role(address, "d0", "prefill", out)
        await drain_worker(address, "d0", 0, out, text_console())
        await change_role(address, "d0", "prefill", out)
        said = " ".join(written(out).split())
        assert said.count("No worker that is ready has the role decode") == 2
        assert "Roles are set by hand only, until `pdserve pools auto` hands them to the planner." in said
        out = text_console()
        await undo_drain(address, "d0", text_console())
        await change_role(address, "d0", "decode", out)
        assert "No worker" not in written(out)
