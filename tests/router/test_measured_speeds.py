"""Placement by speeds that are measured as the work is done: equal machines measure differently, and may change.

A fleet on a clock of its own. Each worker has a prompt's step or two to do for each request, which takes the time that
it takes times noise; what the product's meter makes of that is reported every second.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from deploy.step_meter import StepMeter
from model.runner import Chunk, SampledToken, StepOutput
from router.candidate import Candidate, Role
from router.fleet import Fleet
from router.placement import place
from tests.router.test_placement import D, P, worker
from tests.router.test_predicted_placement import demand

TOKEN_S = 0.001
STEP_S = 0.025
REPORT_S = 1.0


@dataclass
class Machine:
    """`factor`: how much longer than others it takes, always; `noise`: by how much a step may differ either way."""

    name: str
    role: Role
    factor: float = 1.0
    noise: float = 0.2
    meter: StepMeter = field(init=False)


class Machines:
    """One request at a time, each `every_s`: none ever queues."""

    def __init__(self, machines: list[Machine], seed: int, every_s: float = 1.0) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.machines = {machine.name: machine for machine in machines}
        for machine in machines:
            machine.meter = StepMeter(lambda: self.now)
        self.every_s = every_s
        self.reported_at = 0.0
        self.fleet = Fleet([self._candidate(machine) for machine in machines])

    def serve(self, num_requests: int) -> Counter[str]:
        served: Counter[str] = Counter()
        for _ in range(num_requests):
            found = place(self.fleet, demand(), (), self.rng)
            assert found.prefill is not None and found.decode is not None
            served.update([found.prefill.id.name, found.decode.id.name])
            self.run(found.prefill.id.name, 2)
            self.run(found.decode.id.name, 20)
            self.wait(self.every_s)
        return served

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now - self.reported_at >= REPORT_S:
            self.reported_at = self.now
            for machine in self.machines.values():
                self.fleet.put(self._candidate(machine))

    def run(self, name: str, num_steps: int) -> None:
        machine = self.machines[name]
        num_tokens, seconds = (500, 500 * TOKEN_S) if machine.role is P else (1, STEP_S)
        for _ in range(num_steps):
            took_s = seconds * machine.factor * self.rng.uniform(1 - machine.noise, 1 + machine.noise)
            machine.meter.observe([Chunk([1] * num_tokens, 0, [0])], StepOutput((SampledToken(1),), took_s))

    def _candidate(self, machine: Machine) -> Candidate:
        meter = machine.meter
        return replace(
            worker(machine.name, machine.role, blocks=1000, free=1000),
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_step_s=meter.decode_step_s,
            decode_batch=meter.decode_batch,
            tokens_per_step=meter.tokens_per_step,
            prefill_age_s=meter.prefill_age_s,
            decode_age_s=meter.decode_age_s,
        )


def shares(served: Counter[str], role: str, num_workers: int, num_requests: int) -> list[float]:
    """Of each worker, beside an even one."""
    return [served[f"{role}{number}"] * num_workers / num_requests for number in range(num_workers)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_workers", [2, 8])
def test_equal_workers_whose_measurements_differ_get_equal_shares(num_workers: int, seed: int) -> None:
    """Each step takes up to 20 % more or less, and each machine up to 10 % more or less than others: 20 % apart."""
    apart = random.Random(seed)
    machines = [
        Machine(f"{name}{number}", role, factor=apart.uniform(0.9, 1.1))
        for name, role in (("p", P), ("d", D))
        for number in range(num_workers)
    ]
    served = Machines(machines, seed).serve(1000)
    for role in "pd":
        assert all(0.6 < share < 1.5 for share in shares(served, role, num_workers, 1000)), served


@pytest.mark.parametrize("factor", [1.5, 2.0, 10.0])
def test_a_worker_that_is_really_slower_gets_little(factor: float) -> None:
    """Without need it is only asked from time to time whether it still is."""
    machines = [Machine(f"{name}{number}", role) for name, role in (("p", P), ("d", D)) for number in range(4)]
    machines[0].factor = machines[4].factor = factor
    served = Machines(machines, seed=1).serve(1000)
    for role in "pd":
        slow, *others = shares(served, role, 4, 1000)
        assert 0 < slow < 0.25, served  # an even share is 1
        assert all(1.0 < share < 1.7 for share in others), served


@pytest.mark.parametrize("factor", [2.0, 10.0, 1000.0])
@pytest.mark.parametrize("num_slow", [1, 3])
def test_a_worker_that_was_slow_once_is_tried_again_and_gets_its_share(factor: float, num_slow: int) -> None:
    """A cold start, or a neighbour that has gone: of four workers one, or all but one, measured long steps. Others are
    faster, and nobody queues; after a minute all are tried, and after two more all are alike."""
    machines = [Machine(f"{name}{number}", role) for name, role in (("p", P), ("d", D)) for number in range(4)]
    simulation = Machines(machines, seed=2)
    for machine in machines:
        machine.factor = factor if int(machine.name[1:]) < num_slow else 1.0
        simulation.run(machine.name, 30)
        machine.factor = 1.0
    simulation.wait(REPORT_S)
    slow = {machine.name for machine in machines if int(machine.name[1:]) < num_slow}
    assert not slow & simulation.serve(8).keys()
    within_s = 61.0 + 4 * 4 * simulation.every_s  # of four that are alike, the last one's turn comes by chance
    assert slow <= simulation.serve(round(within_s)).keys()
    simulation.serve(120)
    served = simulation.serve(400)
    for role in "pd":
        assert all(0.6 < share < 1.5 for share in shares(served, role, 4, 400)), served


def test_a_fleet_that_rested_is_taken_to_be_alike() -> None:
    """Until one has measured itself again: who was slower an hour ago may not be."""
    machines = [Machine(f"{name}{number}", role) for name, role in (("p", P), ("d", D)) for number in range(2)]
    machines[0].factor = 5.0
    simulation = Machines(machines, seed=3)
    for machine in machines:
        simulation.run(machine.name, 5)
    simulation.wait(REPORT_S)
    assert simulation.serve(5)["p0"] == 0
    simulation.wait(3600.0)
    assert {place(simulation.fleet, demand(), (), random.Random(seed)).prefill.id.name for seed in range(20)} == {  # type: ignore[union-attr]
        "p0",
        "p1",
    }
