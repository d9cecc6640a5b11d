"""Plays a trace against workers that exist only as step times: with the router's own placement, gate and retries.

Deterministic: the same scenario, trace and seed give the same outcomes. docs/simulator.md says what is modelled and
how close it comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from router.cache_changes import CacheChanges
from router.candidate import Role
from router.observation import Answered, Arrival, Observation
from router.outcomes import Outcome, Totals
from router.scenario import Failure, RoleChange, Scenario
from router.simulated_cluster import SimulatedCluster
from router.simulated_moves import SimulatedMoves
from router.simulated_router import SimulatedRouter
from router.simulated_worker import SimulatedWorker
from router.traced_request import TracedRequest
from router.virtual_time import VirtualTime
from router.worker import Worker, WorkerLoad

_REPORT_AT_LEAST_S = 1.0
_STEPS_EVERY_S = 1.0  # as in `deploy.step_feed`


def simulate(
    scenario: Scenario, trace: Iterable[TracedRequest], ended: Callable[[Outcome], None] = lambda outcome: None
) -> Totals:
    """`ended` is given each request's outcome, in the order of their ends."""
    return Simulation(scenario, trace, ended).run()


class Simulation:
    def __init__(
        self,
        scenario: Scenario,
        trace: Iterable[TracedRequest],
        ended: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        rng = random.Random(scenario.seed)
        self._scenario = scenario
        self._trace: Iterator[TracedRequest] = iter(trace)
        self._has_more = True
        self._told = ended
        self._time = time = VirtualTime()
        self._totals = Totals(num_workers=len(scenario.workers))
        self._router = SimulatedRouter(scenario, time, rng, self._ended)
        self.cluster = self._router.cluster = SimulatedCluster(scenario, time, rng, self._router)
        self._moves = SimulatedMoves(scenario, time, rng, self.cluster, self._router.find_target)
        self._registered: dict[str, Worker] = {}
        self._reported: dict[str, tuple[WorkerLoad, float]] = {}
        self._told_steps_at: dict[str, float] = {}
        self._feed_numbers: dict[str, int] = {}
        self._arrived: list[Arrival] = []
        self._answered: list[Answered] = []
        self.after_event: Callable[[], None] = lambda: None  # for who checks that something always holds

    def run(self) -> Totals:
        scenario, time = self._scenario, self._time
        for index, worker in enumerate(self.cluster.workers.values()):
            self._start(worker)
            time.later(scenario.delays.report_s * (1 + index / len(self.cluster.workers)), self._report, worker)
        for failure in scenario.failures:
            time.at(failure.at_s, self._fail, failure)
        for change in scenario.role_changes:
            time.at(change.at_s, self._change_role, change)
        if scenario.planner is not None:
            time.later(scenario.plan_every_s, self._plan)
        self._next_arrival()
        while self._has_more or self._router.num_open:
            time.step()
            self.after_event()
        self._router.gate.close()
        for worker in self.cluster.workers.values():
            self._totals.prefill_busy_s += worker.prefill_busy_s
            self._totals.decode_busy_s += worker.decode_busy_s
        return self._totals

    def settle(self, seconds: float) -> None:
        """Lets time pass after the last answer: quarantines end, hand-overs that came to nothing are given back."""
        until = self._time.now + seconds
        self._time.at(until, lambda _: None)
        while self._time.now < until:
            self._time.step()

    def _next_arrival(self) -> None:
        traced = next(self._trace, None)
        if traced is None:
            self._has_more = False
        elif traced.at_s < self._time.now:
            raise ValueError(f"a request at {traced.at_s} s comes after one at {self._time.now} s: sort the trace")
        else:
            self._time.at(traced.at_s, self._arrive, traced)

    def _arrive(self, traced: TracedRequest) -> None:
        if self._scenario.planner is not None:
            max_tokens = self._scenario.max_tokens or traced.num_output_tokens
            self._arrived.append(Arrival(traced.at_s, traced.num_prompt_tokens, max_tokens, traced.slo_class))
        self._router.arrive(traced)
        self._next_arrival()

    def _ended(self, outcome: Outcome) -> None:
        self._totals.add(outcome)
        if self._scenario.planner is not None and outcome.ttft_s is not None:
            self._answered.append(
                Answered(
                    outcome.at_s,
                    outcome.ended_at_s,
                    outcome.num_prompt_tokens,
                    outcome.num_cached_tokens,
                    outcome.num_output_tokens,
                    outcome.ttft_s,
                    outcome.tpot_s,
                    outcome.slo_class,
                )
            )
        self._told(outcome)

    def _start(self, worker: SimulatedWorker) -> None:
        self.cluster.start(worker)
        load = worker.load()
        registered = self._router.table.register(worker.profile, load)
        self._registered[worker.spec.name] = registered
        self._reported[worker.spec.name] = (load, self._time.now)
        self._told_steps_at[worker.spec.name] = self._time.now
        self._feed_numbers[worker.spec.name] = 1
        self._router.table.cache_changed(registered, CacheChanges(1, begins_dump=True, ends_dump=True))

    def _report(self, worker: SimulatedWorker) -> None:
        """As `deploy.reporter` does: what is new, and once in a while that nothing is."""
        name = worker.spec.name
        self._time.later(self._scenario.delays.report_s, self._report, worker)
        if not worker.is_alive:
            return
        load, (before, reported_at) = worker.load(), self._reported[name]
        table, registered, changes = self._router.table, self._registered[name], worker.pool.changes
        if load != before or changes or self._time.now - reported_at > _REPORT_AT_LEAST_S:
            self._reported[name] = (load, self._time.now)
            table.report(registered, load)
        if self._time.now - self._told_steps_at[name] >= _STEPS_EVERY_S and (steps := worker.meter.tally.take()):
            self._told_steps_at[name] = self._time.now
            table.steps_measured(registered, steps)
        if changes:
            worker.pool.changes = {}
            self._feed_numbers[name] += 1
            stored = [group for group, is_findable in changes.items() if is_findable]
            removed = [group for group, is_findable in changes.items() if not is_findable]
            table.cache_changed(registered, CacheChanges(self._feed_numbers[name], stored, removed))

    def _fail(self, failure: Failure) -> None:
        worker = self.cluster.workers[failure.worker]
        if failure.back_at_s is not None:
            self._time.at(failure.back_at_s, self._come_back, worker)
        if worker.is_alive:
            self._router.table.lost(self._registered[failure.worker])
            self.cluster.die(worker)

    def _come_back(self, worker: SimulatedWorker) -> None:
        if not worker.is_alive:
            self._start(worker)

    def _change_role(self, change: RoleChange) -> None:
        worker = self.cluster.workers[change.worker]
        if not worker.is_alive or worker.role == change.role:
            return
        did_decode, worker.role = worker.does_decode, change.role
        self._router.table.set_role(change.worker, change.role)
        if worker.does_decode:
            self._moves.stay(worker)
        elif did_decode and change.hands_over:
            self._moves.empty(worker)

    def _plan(self, _: object) -> None:
        scenario, now = self._scenario, self._time.now
        assert scenario.planner is not None
        arrived, self._arrived = self._arrived, []
        answered, self._answered = self._answered, []
        workers = tuple(self._router.table.snapshot())
        observation = Observation(
            now,
            workers,
            self._router.gate.num_waiting,
            arrived,
            answered,
            self.cluster.running(),
            models=self._router.table.models,
            block_size=scenario.layout.block_size,
        )
        roles = scenario.planner(observation)
        for name, role in roles.items():
            self._change_role(RoleChange(now, name, Role(role)))
        self._time.later(scenario.plan_every_s, self._plan)
