"""A simulated worker takes the same steps as the real schedulers: these run here in virtual time, with real pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import pytest

from decode.decoding import DecodeSequence
from decode.outbox import Outbox
from decode.scheduler import DecodeScheduler
from model.block_pool import BlockPool
from model.engine import ScheduledChunk
from model.runner import SampledToken, StepOutput
from model.sampling_params import SamplingParams
from model.sequence import Sequence
from model.timed_runner import StepTiming
from prefill.scheduler import PrefillScheduler, PrefillSequence
from router.candidate import Role
from router.dispatch import Dispatch
from router.scenario import Scenario, WorkerSpec
from router.simulated_cluster import SimulatedCluster
from router.simulated_request import Attempt, SimulatedRequest
from router.simulated_worker import SimulatedWorker
from router.step_costs import StepCosts
from router.traced_request import TracedRequest
from router.virtual_time import VirtualTime
from tests.router.simulations import LAYOUT, a_worker

TIMING = StepTiming(0.03, 6e-4, 1e-6, 0.02, 1e-3, 1e-6)
COSTS = StepCosts(0.03, 6e-4, 1e-6, 0.02, 1e-3, 1e-6)

Arrival: TypeAlias = tuple[float, Callable[["RealWorker"], None]]


@dataclass
class RealWorker:
    """One engine with both schedulers, its steps as long as the timing says."""

    num_blocks: int
    max_step_tokens: int
    max_running: int
    now: float = 0.0
    tokens_at: dict[str, list[float]] = field(default_factory=dict)
    decoding: dict[str, DecodeSequence] = field(default_factory=dict)
    computed: list[PrefillSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.decode = DecodeScheduler(self.pool, max_running=self.max_running)
        self.prefill = PrefillScheduler(self.pool, ask_for_ticket=lambda _: None, clock=lambda: self.now)

    def play(self, arrivals: list[Arrival]) -> None:
        """Each arrival is added when its time has come; a step that runs then is not disturbed."""
        waiting = sorted(arrivals, key=lambda arrival: arrival[0])
        while waiting or self.has_work or self.computed:
            parts: list[Any] = []
            self._add_until(waiting)
            budget = self.max_step_tokens
            for scheduler in (self.decode, self.prefill):
                part = list(scheduler.schedule(budget))
                budget -= sum(len(scheduled.chunk.token_ids) for scheduled in part)
                parts.append(part)
            chunks = [scheduled.chunk for part in parts for scheduled in part]
            for prefilling in self.computed:  # its caller hears of it while the next step runs
                self.prefill.remove(prefilling)
            has_released, self.computed = bool(self.computed), []
            if not chunks:
                self.now = self.now if has_released else waiting[0][0]
                continue
            ends_at = self.now + TIMING.step_s(chunks)
            while waiting and waiting[0][0] < ends_at:  # during the step
                self.now = waiting[0][0]
                self._add_until(waiting)
            self.now = ends_at
            self._complete(parts)

    @property
    def has_work(self) -> bool:
        return bool(self.decode.num_waiting + self.decode.num_running + self.prefill.num_queued_tokens)

    def add_prompt(self, name: str, num_tokens: int) -> None:
        """One token is wanted: there is nobody to hand over to."""
        sequence = a_sequence(name, num_tokens, 1)

        def done(outcome: SampledToken | Exception) -> None:
            self.tokens_at[name] = [self.now]
            self.computed.append(prefilling)

        prefilling = PrefillSequence(sequence, None, done, self.now)
        self.prefill.add(prefilling)

    def add_whole(self, name: str, num_tokens: int, num_output: int) -> None:
        self.decoding[name] = DecodeSequence(a_sequence(name, num_tokens, num_output), Outbox())
        self.decode.add(self.decoding[name])

    def _add_until(self, waiting: list[Arrival]) -> None:
        while waiting and waiting[0][0] <= self.now:
            waiting.pop(0)[1](self)

    def _complete(self, parts: list[list[ScheduledChunk]]) -> None:
        before = {name: each.sequence.num_output_tokens for name, each in self.decoding.items()}
        schedulers: tuple[Any, Any] = self.decode, self.prefill
        for scheduler, part in zip(schedulers, parts, strict=True):
            sampled = tuple(None if each.chunk.sampling is None else SampledToken(7) for each in part)
            if part:
                scheduler.complete(sampled, StepOutput(sampled, 0.0))
        for name, each in self.decoding.items():
            if each.sequence.num_output_tokens > before[name]:
                self.tokens_at.setdefault(name, []).append(self.now)


def a_sequence(name: str, num_tokens: int, num_output: int) -> Sequence:
    """No two prompts begin alike."""
    rng = random.Random(name)
    prompt = [rng.randrange(1 << 30) for _ in range(num_tokens)]
    return Sequence(name, prompt, num_tokens, SamplingParams(max_tokens=num_output), LAYOUT.block_size)


class Ended:
    """Implements Relaying."""

    def __init__(self) -> None:
        self.at: dict[SimulatedRequest, float] = {}

    def first_token(self, attempt: Attempt) -> None:
        pass

    def finished(self, attempt: Attempt) -> None:
        self.at[attempt.request] = attempt.request.last_token_at

    def failed(self, attempt: Attempt, worker: SimulatedWorker) -> None:
        raise AssertionError("no worker dies here")


def simulated(spec: WorkerSpec, trace: list[TracedRequest]) -> list[SimulatedRequest]:
    """Without a router: everything goes to the worker as it comes."""
    time, ended = VirtualTime(), Ended()
    cluster = SimulatedCluster(Scenario([spec], LAYOUT), time, random.Random(0), ended)
    (worker,) = cluster.workers.values()
    cluster.start(worker)
    requests = [SimulatedRequest(traced, traced.num_output_tokens, ()) for traced in trace]
    for request in requests:
        is_whole = request.traced.num_output_tokens > 1
        prefill, decode = (None, worker) if is_whole else (worker, None)
        attempt = Attempt(request, request.num_tokens, prefill, decode, Dispatch(0.0, 0, 0, None, None))
        time.at(request.traced.at_s, cluster.send, attempt)
    while len(ended.at) < len(requests):
        assert time.step()
    assert worker.pool.num_used == 0
    return requests


def adding(name: str, request: TracedRequest) -> Arrival:
    if request.num_output_tokens == 1:
        return request.at_s, lambda worker: worker.add_prompt(name, request.num_prompt_tokens)
    return request.at_s, lambda worker: worker.add_whole(name, request.num_prompt_tokens, request.num_output_tokens)


@pytest.mark.parametrize("seed", range(12))
def test_takes_the_steps_of_the_real_schedulers(seed: int) -> None:
    """Prompts that want one token beside whole answers, in a pool that is often too small for all of them."""
    rng = random.Random(seed)
    num_blocks = rng.choice([40, 60, 400])
    step_tokens, running = rng.choice([(64, 8), (200, 3), (512, 64)])
    at_s, trace = 0.0, []
    for _ in range(30):
        at_s += rng.expovariate(4.0)
        trace.append(TracedRequest(at_s, rng.randint(2, 300), rng.choice([1, rng.randint(2, 150)])))
    real = RealWorker(num_blocks, step_tokens, running)
    real.play([adding(f"{index}", each) for index, each in enumerate(trace)])
    sizes = {"num_blocks": num_blocks, "max_step_tokens": step_tokens, "max_running": running}
    requests = simulated(a_worker("w", Role.BOTH, costs=COSTS, **sizes), trace)
    for index, request in enumerate(requests):
        moments = real.tokens_at[f"{index}"]
        assert len(moments) == request.num_emitted
        assert request.first_token_at == pytest.approx(moments[0], abs=1e-6)
        assert request.last_token_at == pytest.approx(moments[-1], abs=1e-6)
        gaps = [after - before for before, after in pairwise(moments)]
        assert request.worst_gap_s == pytest.approx(max(gaps, default=0.0), abs=1e-6)
    num_preemptions = [each.num_preemptions for each in real.decoding.values()]
    assert [each.num_preemptions for each in requests if each.traced.num_output_tokens > 1] == num_preemptions
