"""Measured steps cross processes as they are, and what cannot have been measured is refused."""

from __future__ import annotations

import asyncio
import math

import grpc.aio
import pytest

from protos import workers_pb2
from protos.errors import InvalidArgument, from_rpc_error
from router.candidate import WorkerId
from router.fleet_models import KindModel
from router.measured_steps import DecodeSteps, PrefillSteps, Steps
from router.step_costs import CLOCK_FIELDS, StepCosts
from router.step_messages import step_times_message, steps_from_message, steps_message
from tests.router.fakes import ready_load, running_fleet
from tests.router.test_cache_changes import Teller

STEPS: list[Steps] = [PrefillSteps(100, 10000, 0.1), DecodeSteps(8, 4000, 0.03, 2.5)]


def test_they_arrive_as_they_were_sent() -> None:
    raw = steps_message(STEPS).SerializeToString()
    assert steps_from_message(workers_pb2.StepsReport.FromString(raw), "steps") == STEPS


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e30])
@pytest.mark.parametrize("field", ["num_tokens", "num_pairs", "step_s"])
def test_what_cannot_have_been_measured_is_refused(field: str, value: float) -> None:
    report = steps_message(STEPS)
    setattr(report.prefill[0], field, value)
    with pytest.raises(InvalidArgument, match=f"^steps: {field} is .*; it must be .* up to ") as refused:
        steps_from_message(report, "steps")
    assert refused.value.field == "steps"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_sequences", 0.0), ("num_context_tokens", math.nan), ("step_s", 0.0), ("tokens_per_step", 2000.0)],
)
def test_nor_of_decoding(field: str, value: float) -> None:
    report = steps_message(STEPS)
    setattr(report.decode[0], field, value)
    with pytest.raises(InvalidArgument, match=f"^hello.calibration: {field} is "):
        steps_from_message(report, "hello.calibration")


def test_more_than_a_report_may_have_is_refused() -> None:
    assert len(steps_from_message(steps_message(STEPS[:1] * 16), "steps")) == 16
    with pytest.raises(InvalidArgument, match=r"steps.decode has 17 entries; it may have 16"):
        steps_from_message(steps_message(STEPS[1:] * 17), "steps")


def test_a_model_is_told_field_by_field() -> None:
    costs = StepCosts(1, 2, 3, 4, 5, 6, 7, tokens_per_step=8)
    message = step_times_message(KindModel("k", costs, 0.5, 0.25, 0.1, 0.2, 9))
    assert [getattr(message, name) for name in CLOCK_FIELDS] == [1, 2, 3, 4, 5, 6, 7]
    assert (message.kind, message.tokens_per_step, message.num_workers) == ("k", 8, 9)
    assert (message.prefill_confidence, message.decode_confidence) == (0.5, 0.25)


async def test_a_router_learns_from_what_a_worker_tells_it() -> None:
    """Before it registered, and after."""
    async with running_fleet() as fleet, asyncio.timeout(10):
        teller = Teller(fleet)
        teller.hello.hardware = "a machine"
        teller.hello.calibration.CopyFrom(steps_message(STEPS[:1]))
        teller.reports.get_nowait()
        teller.reports.put_nowait(workers_pb2.WorkerReport(hello=teller.hello, load=ready_load()))
        await anext(teller.commands)
        models, worker = fleet.router.table.models, WorkerId("w", "e1")
        prefill, decode = models.confidences_of(worker)
        assert prefill > 0.0 == decode
        assert models.costs_of(worker).prefill_s([(100, 100)]) == pytest.approx(0.1)
        assert [kind.num_workers for kind in models.kinds() if "on a machine" in kind.kind] == [1]
        teller.reports.put_nowait(workers_pb2.WorkerReport(load=ready_load(), steps=steps_message(STEPS)))
        while models.confidences_of(worker)[1] == 0.0:
            await asyncio.sleep(0.001)
        assert models.costs_of(worker).decode_s(8, 4000) == pytest.approx(0.03)
        await teller.close()


async def test_nonsense_ends_the_registration() -> None:
    async with running_fleet() as fleet, asyncio.timeout(10):
        teller = Teller(fleet)
        await anext(teller.commands)
        report = steps_message(STEPS)
        report.decode[0].step_s = math.nan
        teller.reports.put_nowait(workers_pb2.WorkerReport(load=ready_load(), steps=report))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(teller.commands)
        refusal = from_rpc_error(caught.value)
        assert isinstance(refusal, InvalidArgument) and "steps: step_s is nan; it must be above 0" in str(refusal)
        assert fleet.router.table.models.confidences_of(WorkerId("w", "e1")) == (0.0, 0.0)
        await teller.close()
