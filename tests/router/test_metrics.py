"""What Prometheus sees of admission."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.breaker import Breakers
from router.candidate import Role, WorkerId
from router.fleet_models import KindModel
from router.metrics import QueueCollector, StepModelsCollector, WorkersCollector
from router.step_models import UNKNOWN
from router.workers import WorkerTable
from tests.router.test_workers import READY, profile


def exported(collector: WorkersCollector | QueueCollector | StepModelsCollector) -> set[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_queue_by_priority() -> None:
    counts = [(0, 0)] * 10
    counts[5], counts[9] = (3, 1200), (1, 40)
    lines = exported(QueueCollector(lambda: counts))
    assert len(lines) == 20
    assert lines >= {
        'pdserve_router_queued_requests{priority="5"} 3.0',
        'pdserve_router_queued_tokens{priority="5"} 1200.0',
        'pdserve_router_queued_requests{priority="9"} 1.0',
        'pdserve_router_queued_tokens{priority="0"} 0.0',
    }


def test_breakers_by_worker() -> None:
    table, breakers = WorkerTable("t1"), Breakers()
    for name in ("p", "q"):
        table.register(profile(name, Role.PREFILL), READY)
    for _ in range(5):
        breakers.failed(WorkerId("q", table.workers()[1].profile.id.epoch), 1e9)
    lines = exported(WorkersCollector(table, breakers))
    assert 'pdserve_router_breaker_state{worker="p"} 0.0' in lines
    assert 'pdserve_router_breaker_state{worker="q"} 2.0' in lines


def test_says_how_well_step_times_are_known() -> None:
    lines = exported(StepModelsCollector(lambda: [KindModel("k", UNKNOWN, 0.5, 0.25, 0.03125, 0.0625, 2)]))
    assert {
        'pdserve_router_step_time_confidence{kind="k",step="prefill"} 0.5',
        'pdserve_router_step_time_confidence{kind="k",step="decode"} 0.25',
        'pdserve_router_step_time_error_ratio{kind="k",step="prefill"} 0.03125',
        'pdserve_router_step_time_error_ratio{kind="k",step="decode"} 0.0625',
    } <= lines
