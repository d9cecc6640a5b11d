"""Requests of every door as people see them, while they run and when they have ended; and what is learnt of answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest

from protos import inference_pb2, kserve_pb2_grpc, prefill_pb2
from protos import kserve_pb2 as kserve
from protos.caller import Caller, Scope
from protos.channel import open_channel, service_errors
from protos.client import PdserveClient
from protos.errors import FailedPrecondition, InvalidArgument, NoWorker, Overloaded, PermissionDenied, ServiceError
from protos.insight_values import ClassTraffic, RequestSummary, Traffic
from protos.values import Chunk, Sampling, Summary
from router import history
from router.config import AdmissionPolicy, LimitPolicy, PlacementPolicy, RelayPolicy, SloPolicy
from router.history import History
from router.observation import Answered, Arrival
from router.timeline import RequestClock
from tests.router.asking import PROMPT, DieOnce, FailOnce, all_workers, answer
from tests.router.fakes import POLICY, FakeFleet, FakeWorker, running_fleet

GREEDY = Sampling(max_tokens=6)


class Gate:
    """A hook that holds what reaches it, until it is opened."""

    def __init__(self, fleet: FakeFleet, letter: str, moment: str) -> None:
        self._open = asyncio.Event()
        for worker in all_workers(fleet, letter):
            worker.hooks[moment] = self._hold

    def open(self) -> None:
        self._open.set()

    async def _hold(self, attempt_id: str, num_tokens: int) -> None:
        await self._open.wait()


async def listed(fleet: FakeFleet, limit: int | None = None, **how: bool) -> list[RequestSummary]:
    async with PdserveClient(fleet.router.address) as client:
        return await client.list_requests(limit, deadline_s=10, **how)


async def traffic(fleet: FakeFleet) -> Traffic:
    async with PdserveClient(fleet.router.address) as client:
        return await client.get_traffic(deadline_s=10)


async def reached(fleet: FakeFleet, state: str) -> RequestSummary:
    """The one request that runs, once it is there."""
    async with asyncio.timeout(10):
        while True:
            running = await listed(fleet, running_only=True)
            if running and running[0].state == state:
                (only,) = running
                return only
            await asyncio.sleep(0.005)


@asynccontextmanager
async def asking(fleet: FakeFleet, **request: Any) -> AsyncIterator[asyncio.Task[list[Chunk | Summary]]]:
    """A request that runs in the meantime."""
    async with PdserveClient(fleet.router.address) as client:

        async def ask() -> list[Chunk | Summary]:
            return [part async for part in client.generate(PROMPT, sampling=GREEDY, **request)]

        task = asyncio.create_task(ask())
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, ServiceError):
                await task


def stage_names(request: RequestSummary) -> list[str]:
    return [stage.name for stage in request.timeline.stages]


async def test_one_that_is_done_is_told_as_its_own_summary_told_it(fleet: FakeFleet, client: PdserveClient) -> None:
    began = datetime.now(UTC)
    _, _, summary = await answer(client, GREEDY)
    (told,) = await listed(fleet)
    assert (told.request_id, told.state, told.error) == (summary.request_id, "done", "")
    assert began - timedelta(seconds=1) < told.received_at < datetime.now(UTC) + timedelta(seconds=1)
    assert told.timeline == summary.timeline
    assert {told.prefill_worker, told.decode_worker} == {stage.worker_id for stage in told.timeline.stages} - {""}
    assert told.prefill_worker.startswith("p") and told.decode_worker.startswith("d")
    assert (told.num_prompt_tokens, told.num_cached_tokens, told.num_output_tokens) == (21, 1, 6)
    assert (told.num_retries, told.num_resumes, told.num_moves, told.tenant) == (0, 0, 0, "")
    seen = await traffic(fleet)
    assert (seen.ttft_s.count, seen.tpot_s.count, seen.num_failed, seen.num_refused) == (1, 1, 0, 0)
    assert seen.ttft_s.p50 == pytest.approx(summary.timeline.ttft_s, rel=0.0101)
    assert seen.tpot_s.p99 == pytest.approx(max(summary.timeline.tpot_s, 1e-4), rel=0.0101)
    assert seen.cached_share == pytest.approx(1 / 21)
    tokens = (seen.requests_per_s, seen.prompt_tokens_per_s, seen.output_tokens_per_s)
    assert [each * seen.window_s for each in tokens] == pytest.approx([1, 21, 6])


async def test_where_one_is_at_each_moment_and_what_it_has_so_far() -> None:
    async with running_fleet() as fleet, asking(fleet) as asked:
        queued = await reached(fleet, "queued")  # there is no worker
        assert (queued.prefill_worker, queued.decode_worker) == ("", "")
        assert stage_names(queued) in (["tokenize"], ["tokenize", "wait"])
        assert queued.timeline.total_s > 0.0
        asked.cancel()
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:
        computing, decoding = Gate(fleet, "p", "prefill.start"), Gate(fleet, "d", "decode.token")
        async with asking(fleet, request_id="mine") as asked:
            before = await reached(fleet, "prefill")
            assert (before.request_id, before.prefill_worker, before.decode_worker) == ("mine", "p0", "d0")
            assert (before.num_prompt_tokens, before.num_output_tokens, before.num_cached_tokens) == (21, 0, 0)
            assert stage_names(before)[-1] == "prefill" and "decode" not in stage_names(before)
            later = await reached(fleet, "prefill")
            assert later.timeline.stages[-1].duration_s > before.timeline.stages[-1].duration_s
            assert (before.timeline.ttft_s, before.timeline.tpot_s) == (0.0, 0.0)
            computing.open()
            decode = await reached(fleet, "decode")
            assert decode.num_output_tokens == 1 and decode.timeline.ttft_s > 0.0
            async with asyncio.timeout(10):  # until the prefill worker has told what it did
                while stage_names(decode) != ["tokenize", "queue", "prefill", "handover", "decode"]:
                    await asyncio.sleep(0.005)
                    decode = await reached(fleet, "decode")
            assert decode.num_cached_tokens == 1
            assert [stage.worker_id for stage in decode.timeline.stages] == ["", "p0", "p0", "p0", "d0"]
            assert decode.timeline.stages[2].duration_s == 0.002  # as the fake worker says
            assert (await traffic(fleet)).ttft_s.count == 0
            decoding.open()
            *_, summary = await asked
        assert isinstance(summary, Summary)
        assert await listed(fleet, running_only=True) == []
        assert [each.state for each in await listed(fleet)] == ["done"]


async def test_one_worker_that_does_both_is_told_as_both() -> None:
    async with running_fleet(num_both=1) as fleet:
        decoding = Gate(fleet, "w", "decode.start")
        async with asking(fleet) as asked:
            assert stage_names(await reached(fleet, "prefill")) == ["tokenize", "prefill"]
            decoding.open()
            await asked
        (told,) = await listed(fleet)
        assert (told.prefill_worker, told.decode_worker, told.state) == ("w0", "w0", "done")


async def test_all_doors_are_seen() -> None:
    async with running_fleet(num_prefill=1, num_decode=1, http_port=0, direct=True) as fleet:
        async with PdserveClient(fleet.router.address) as client, aclosing(client.generate([5, 6])) as parts:
            async for _ in parts:
                pass
        async with PdserveClient(fleet.router.address, direct=True) as client:
            await answer(client, GREEDY)
        base_url = f"http://{fleet.router.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as http:
            await http.completions.create(model="tiny", prompt="hello", max_tokens=3)
        async with open_channel(fleet.router.address) as channel:
            ask = kserve.ModelInferRequest(model_name="tiny")
            ask.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
            ask.parameters["max_tokens"].int64_param = 2
            with service_errors():
                await kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(ask, timeout=10)
        seen = await listed(fleet)
        assert [(each.num_prompt_tokens, each.num_output_tokens) for each in seen] == [
            (2, 2),
            (5, 3),
            (21, 6),
            (2, 254),
        ]
        assert {each.state for each in seen} == {"done"}
        assert (await traffic(fleet)).ttft_s.count == 4
        await fleet.settled()


async def test_several_answers_are_one_request(fleet: FakeFleet, client: PdserveClient) -> None:
    parts = [part async for part in client.generate(PROMPT, sampling=GREEDY, n=3)]
    summary = parts[-1]
    assert isinstance(summary, Summary)
    (told,) = await listed(fleet)
    assert (told.state, told.num_prompt_tokens, told.num_output_tokens) == ("done", 21, 18)
    assert told.num_cached_tokens == 1  # of the first: the others find in the cache what it brought there
    assert told.timeline == summary.timeline
    seen = await traffic(fleet)
    assert seen.ttft_s.count == 1 and seen.output_tokens_per_s * seen.window_s == pytest.approx(18)


async def test_of_several_answers_what_the_first_found_in_the_cache_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([5, 17, 18])

    def stats(request: prefill_pb2.PrefillRequest) -> prefill_pb2.PrefillStats:
        cached = next(found)
        return prefill_pb2.PrefillStats(prompt_tokens=inference_pb2.PromptTokens(computed=21 - cached, cached=cached))

    monkeypatch.setattr("tests.router.fakes._prefill_stats", stats)
    async with running_fleet(num_prefill=1, num_decode=1) as fleet, PdserveClient(fleet.router.address) as client:
        async for _ in client.generate(PROMPT, sampling=GREEDY, n=3):
            pass
        (told,) = await listed(fleet)
        assert told.num_cached_tokens == 5
        assert (await traffic(fleet)).cached_share == pytest.approx(5 / 21)


async def test_who_leaves_with_the_whole_answer_has_it(fleet: FakeFleet) -> None:
    message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
    message.sampling.max_tokens = 3
    answering = fleet.router.inference.generate(message, None)
    async for raw in answering:
        if inference_pb2.GenerateResponse.FromString(raw).HasField("usage"):
            break
    await answering.aclose()
    (told,) = await listed(fleet)
    assert (told.state, told.num_output_tokens) == ("done", 3)
    assert (await traffic(fleet)).ttft_s.count == 1


@pytest.mark.parametrize(
    ("letter", "moment", "at", "counts"),
    [("p", "prefill.start", None, (1, 0)), ("d", "decode.token", len(PROMPT) + 3, (0, 1))],
)
async def test_retries_and_resumes_are_counted(
    fleet: FakeFleet, client: PdserveClient, letter: str, moment: str, at: int | None, counts: tuple[int, int]
) -> None:
    DieOnce(fleet, letter, moment, at)
    await answer(client, GREEDY)
    (told,) = await listed(fleet)
    assert (told.num_retries, told.num_resumes, told.state, told.num_output_tokens) == (*counts, "done", 6)
    assert told.num_cached_tokens <= told.num_prompt_tokens == 21


async def test_between_two_attempts_it_is_queued_and_nowhere() -> None:
    policy = RelayPolicy(max_attempts=3, retry_delay_s=30.0)
    async with running_fleet(num_both=1, policy=policy) as fleet:
        FailOnce(FailedPrecondition("no"), fleet, "w", "decode.start")
        async with asking(fleet):
            async with asyncio.timeout(10):
                while not (waits := [each for each in await listed(fleet) if each.num_retries]):
                    await asyncio.sleep(0.005)
            assert (waits[0].state, waits[0].prefill_worker, waits[0].decode_worker) == ("queued", "", "")


@pytest.mark.usefixtures("told_one_by_one")
async def test_moves_are_counted_and_the_worker_is_the_new_one(fleet: FakeFleet, client: PdserveClient) -> None:
    first: list[str] = []

    def leaves(worker: FakeWorker) -> None:
        async def hook(attempt_id: str, num_tokens: int) -> None:
            if num_tokens == len(PROMPT) + 5 and not first:
                first.append(worker.name)
                fleet.router.table.set_draining(worker.name, True)
            await asyncio.sleep(0.004)

        worker.hooks["decode.token"] = hook

    for name in ("d0", "d1"):
        leaves(fleet.workers[name])
    await answer(client, Sampling(max_tokens=120))
    (told,) = await listed(fleet)
    assert (told.num_moves, told.state) == (1, "done")
    assert {told.decode_worker, *first} == {"d0", "d1"}


async def test_one_that_fails_says_why_and_one_that_is_wrong_is_none() -> None:
    policy = RelayPolicy(max_attempts=1, retry_delay_s=0.001)
    async with running_fleet(num_prefill=1, num_decode=1, policy=policy) as fleet:
        FailOnce(FailedPrecondition("no"), fleet, "d", "decode.token", len(PROMPT) + 3)
        async with PdserveClient(fleet.router.address) as client:
            with pytest.raises(ServiceError) as caught:
                await answer(client, GREEDY)
            for wrong in (Sampling(top_p=7), Sampling(max_tokens=10_000)):
                with pytest.raises(InvalidArgument):
                    await answer(client, wrong)
        (told,) = await listed(fleet)
        assert (told.state, told.error) == ("failed", caught.value.reason)
        assert (told.prefill_worker, told.decode_worker, told.num_output_tokens) == ("p0", "d0", 3)
        seen = await traffic(fleet)
        assert (seen.num_failed, seen.num_refused, seen.ttft_s.count) == (1, 0, 0)
        assert seen.requests_per_s * seen.window_s == pytest.approx(1)


async def test_who_leaves_early_is_cancelled_and_no_failure() -> None:
    async with running_fleet(num_prefill=1, num_decode=1) as fleet:
        Gate(fleet, "d", "decode.token")
        async with asking(fleet):
            await reached(fleet, "decode")
        async with asyncio.timeout(10):
            while await listed(fleet, running_only=True):
                await asyncio.sleep(0.005)
        (told,) = await listed(fleet)
        assert (told.state, told.error, told.num_output_tokens) == ("cancelled", "", 1)
        assert stage_names(told)[-1] == "decode"
        seen = await traffic(fleet)
        assert (seen.num_failed, seen.num_refused, seen.ttft_s.count) == (0, 0, 0)


async def test_refusals_are_told_apart() -> None:
    one_each = PlacementPolicy(limits=LimitPolicy(max_sequences=1))
    async with running_fleet(1, 1, admission=AdmissionPolicy(max_queued=1), placement=one_each) as fleet:
        held = Gate(fleet, "d", "decode.token")
        async with asking(fleet, request_id="runs"):
            await reached(fleet, "decode")
            async with asking(fleet, request_id="waits"):
                async with asyncio.timeout(10):
                    while {each.state for each in await listed(fleet)} != {"queued", "decode"}:
                        await asyncio.sleep(0.005)
                async with PdserveClient(fleet.router.address) as client:
                    with pytest.raises(Overloaded):
                        await answer(client, GREEDY)
                first, waits, runs = await listed(fleet)
                assert (first.state, first.error) == ("failed", "OVERLOADED")
                assert (waits.request_id, waits.state, stage_names(waits)) == ("waits", "queued", ["tokenize", "wait"])
                assert waits.timeline.stages[-1].duration_s > 0.0
                assert (runs.request_id, runs.state) == ("runs", "decode")
                seen = await traffic(fleet)
                assert (seen.num_refused, seen.num_failed) == (1, 0)
                assert seen.requests_per_s * seen.window_s == pytest.approx(3)
                held.open()


async def test_newest_and_slowest_of_all_that_are_kept(fleet: FakeFleet, client: PdserveClient) -> None:
    for number in range(12):
        for worker in all_workers(fleet, "d"):

            async def wait(attempt_id: str, num_tokens: int, number: int = number) -> None:
                await asyncio.sleep(0.1 if number in (2, 5) else 0.0)

            worker.hooks["decode.start"] = wait
        async with aclosing(client.generate(PROMPT, sampling=GREEDY, request_id=f"r{number}")) as parts:
            async for _ in parts:
                pass
    newest = await listed(fleet, 3)
    assert [each.request_id for each in newest] == ["r11", "r10", "r9"]
    everyone = await listed(fleet)
    assert len(everyone) == 12
    in_order = sorted(everyone, key=lambda each: each.timeline.total_s, reverse=True)
    assert await listed(fleet, slowest=True) == in_order != everyone
    assert await listed(fleet, 2, slowest=True) == in_order[:2]
    assert all(each.timeline.total_s > 0.1 for each in everyone if each.request_id in ("r2", "r5"))


async def test_what_is_wrong_with_a_call_is_told() -> None:
    async with running_fleet() as fleet, PdserveClient(fleet.router.address) as client:
        for limit in (0, -1, 501):
            with pytest.raises(InvalidArgument, match=f"limit is {limit}; it must be 1 to 500") as caught:
                await client.list_requests(limit, deadline_s=10)
            assert caught.value.field == "limit"
        for window_s in (9.9, 3600.1, -1.0, float("nan")):
            with pytest.raises(InvalidArgument, match="it must be 10 to 3600 s") as caught:
                await client.get_traffic(window_s, deadline_s=10)
            assert caught.value.field == "window_s"
        assert await client.list_requests(deadline_s=10) == []
        assert len((await client.get_traffic(3600, deadline_s=10)).slices) == 0


class Users:
    def authenticate(self, authorization: str | None) -> Caller:
        name = (authorization or "").removeprefix("Bearer ")
        scopes = {"ann": Scope.READ, "eve": Scope.INFER}
        return Caller(name, tenant=f"of-{name}", scopes=scopes[name])


async def test_only_who_may_read_sees_them_and_whose_they_are() -> None:
    async with running_fleet(authenticator=Users()) as fleet:
        async with PdserveClient(fleet.router.address, api_key="eve") as eve:
            with pytest.raises(NoWorker):
                await answer(eve, GREEDY)
            for call in (
                eve.list_requests(deadline_s=10),
                eve.get_traffic(deadline_s=10),
                eve.get_worker_insights("w0"),
            ):
                with pytest.raises(PermissionDenied, match="needs the scope read"):
                    await call
        async with PdserveClient(fleet.router.address, api_key="ann") as ann:
            (told,) = await ann.list_requests(deadline_s=10)
            assert (told.tenant, told.state, told.error) == ("of-eve", "failed", "NO_WORKER")
            assert (await ann.get_traffic(deadline_s=10)).num_failed == 1


async def test_attainment_is_against_the_slo_of_the_router() -> None:
    for slo, met in (
        (SloPolicy(ttft_s=60.0, tpot_s=60.0), 1.0),
        (SloPolicy(ttft_s=1e-6), 0.0),
        (SloPolicy(tpot_s=1e-9), 0.0),
    ):
        async with running_fleet(num_both=1, slo=slo) as fleet:
            for worker in all_workers(fleet, "w"):
                worker.hooks["decode.token"] = _moment
            async with PdserveClient(fleet.router.address) as client:
                await answer(client, GREEDY)
            assert (await traffic(fleet)).attainment == met


async def test_who_names_a_class_is_judged_by_its_slos(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no answer keeps to is promised to the one class, what every answer does to the others."""
    classes = {"strict": SloPolicy(ttft_s=1e-6), "lax": SloPolicy(60.0, 60.0, 0.5)}
    settings: dict[str, Any] = {"slo": SloPolicy(60.0, 60.0), "slo_classes": classes}
    async with running_fleet(num_both=1, **settings) as fleet, PdserveClient(fleet.router.address) as client:
        for name in ("", "strict", "lax", "lax"):
            caller = Caller("key", slo_class=name)
            monkeypatch.setattr(fleet.router.guard, "admit", lambda *_, caller=caller: caller)
            await answer(client, GREEDY)
        told = await client.get_traffic(deadline_s=10)
        requests = await client.list_requests(deadline_s=10)
    assert [each.slo_class for each in requests] == ["lax", "lax", "strict", ""]
    assert told.attainment == 0.75
    assert told.classes == (
        ClassTraffic("default", 1, 1.0, 0.9),
        ClassTraffic("strict", 1, 0.0, 0.9),
        ClassTraffic("lax", 2, 1.0, 0.5),
    )


async def _moment(attempt_id: str, num_tokens: int) -> None:
    await asyncio.sleep(0.001)


class Heard:
    def __init__(self) -> None:
        self.told: list[str | Arrival | Answered] = []

    def arrived(self, arrival: Arrival) -> None:
        self.told.append(arrival)

    def answered(self, answered: Answered) -> None:
        self.told.append(answered)

    def failed(self) -> None:
        self.told.append("failed")

    def refused(self, *, had_arrived: bool, slo_class: str) -> None:
        self.told.append(f"refused {had_arrived}")


def names(messages: list[bytes]) -> list[str]:
    from protos.insights_pb2 import RequestSummary as Message

    return [Message.FromString(each).request_id for each in messages]


def test_what_is_kept_is_bounded_and_a_wave_of_refusals_sweeps_nothing_away() -> None:
    heard, now = Heard(), [100.0]
    kept = History([heard], lambda: now[0])

    def one(name: str, error: BaseException | None, took_s: float) -> None:
        clock = RequestClock(lambda: now[0])
        with suppress(ServiceError, asyncio.CancelledError, KeyError), kept.follow(name, "", clock):
            now[0] += took_s
            if error is not None:
                raise error

    one("slow", asyncio.CancelledError(), 50.0)
    for number in range(5000):
        one(f"refused{number}", Overloaded("full"), 0.001)
    assert names(kept.slowest(1)) == ["slow"] and names(kept.newest(1)) == ["refused4999"]
    assert len(kept.newest(10_000)) == history._KEPT_REFUSED + 1
    assert heard.told == ["refused False"] * 5000
    for number in range(5000):
        one(f"broken{number}", KeyError("a defect"), 0.001)
    assert len(kept.newest(10_000)) == history._KEPT + history._KEPT_REFUSED
    assert heard.told[5000:] == ["failed"] * 5000
    one("wrong", InvalidArgument("no"), 0.1)
    assert heard.told[10_000:] == [] and names(kept.newest(1)) == ["broken4999"]


def test_one_that_runs_for_long_is_among_the_slowest() -> None:
    now = [0.0]
    kept = History(clock=lambda: now[0])
    with kept.follow("long", "", RequestClock(lambda: now[0])):
        now[0] += 5.0
        with suppress(asyncio.CancelledError), kept.follow("short", "", RequestClock(lambda: now[0])):
            now[0] += 1.0
            raise asyncio.CancelledError
        assert names(kept.slowest(2)) == ["long", "short"]
        assert names(kept.slowest(2, running_only=True)) == ["long"]


async def test_following_a_request_costs_microseconds() -> None:
    """A hundred on an idle machine, and far more where something is wrong, such as a look at all that are kept."""
    kept = History([Heard()])
    began_at = time.process_time()
    for number in range(3000):
        with suppress(Overloaded), kept.follow(f"r{number}", "", RequestClock()):
            raise Overloaded("full")
    assert (time.process_time() - began_at) / 3000 < 1e-3


async def test_tokens_that_the_client_had_before_count_neither_as_made_nor_in_the_time_of_each() -> None:
    async with running_fleet(num_both=1, policy=POLICY) as fleet, PdserveClient(fleet.router.address) as client:
        tokens, _, _ = await answer(client, Sampling(max_tokens=40, seed=3))
        for worker in all_workers(fleet, "w"):
            worker.hooks["decode.token"] = _while
        parts = [
            part
            async for part in client.generate(PROMPT, sampling=Sampling(max_tokens=40, seed=3), emitted=[tokens[:37]])
        ]
        summary = parts[-1]
        assert isinstance(summary, Summary) and summary.usage.output_tokens == 40
        assert summary.timeline.tpot_s >= 0.05  # two steps after the first token, not thirty-nine
        first, _ = await listed(fleet)
        assert (first.num_output_tokens, first.num_resumes) == (40, 1)
        seen = await traffic(fleet)
        assert seen.output_tokens_per_s * seen.window_s == pytest.approx(43)


async def _while(attempt_id: str, num_tokens: int) -> None:
    await asyncio.sleep(0.05)
