"""Small simulations whose times can be worked out by hand: round costs, no delays, links that take no time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.kv_layout import KVLayout
from router.candidate import Role
from router.outcomes import Outcome
from router.scenario import Delays, Scenario, WorkerSpec
from router.simulator import Simulation
from router.step_costs import StepCosts
from router.traced_request import TracedRequest

LAYOUT = KVLayout("", "float32", num_layers=4, num_kv_heads=1, head_dim=16)  # 512 bytes a token
COSTS = StepCosts(0.1, 0.001, 0.0, decode_base_s=0.01, decode_sequence_s=0.001, decode_context_token_s=0.0)
NO_TIME = 1e18  # bytes a second


def a_worker(name: str, role: Role, **options: Any) -> WorkerSpec:
    return WorkerSpec(name, role, **{"costs": COSTS, "link_bytes_per_s": NO_TIME, **options})


def p_and_d(num_prefill: int = 1, num_decode: int = 1, **options: Any) -> list[WorkerSpec]:
    prefill = [a_worker(f"p{i}", Role.PREFILL, **options) for i in range(num_prefill)]
    return prefill + [a_worker(f"d{i}", Role.DECODE, **options) for i in range(num_decode)]


def played(workers: Sequence[WorkerSpec], *trace: TracedRequest, **options: Any) -> list[Outcome]:
    """In the order in which they came. Afterwards nothing is held anywhere."""
    outcomes: list[Outcome] = []
    scenario = Scenario(workers, LAYOUT, **options)
    simulation = Simulation(scenario, trace, outcomes.append)
    simulation.run()
    assert_at_rest(simulation)
    return sorted(outcomes, key=lambda outcome: outcome.at_s)


def assert_at_rest(simulation: Simulation) -> None:
    simulation.settle(Delays().quarantine_s + 1.0)
    for worker in simulation.cluster.workers.values():
        if worker.is_alive:
            assert worker.pool.num_used == 0
            assert (len(worker.queue), worker.batch.num_running, len(worker.batch.waiting)) == (0, 0, 0)
            assert not worker.attempts
