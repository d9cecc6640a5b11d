"""The router of a simulation: the real table of workers, placement, gate, retries and breakers, with its own clock.

What it does for a request is what `router.relay` does, step by step; here each step is an event.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from protos.errors import NoWorker, ServiceError, WorkerLost
from router.admission import Gate
from router.candidate import WorkerId
from router.demand import Demand
from router.dispatch import Dispatch
from router.leg import AttemptFailed
from router.outcomes import Outcome
from router.placement import Placement, place, place_moved
from router.prefix_index import NO_MATCHES, PrefixMatches
from router.retries import Retries
from router.scenario import Scenario
from router.simulated_cluster import SimulatedCluster
from router.simulated_request import Attempt, SimulatedRequest, group_of
from router.simulated_worker import SimulatedWorker
from router.traced_request import PREFIX_BLOCK_TOKENS, TracedRequest
from router.turns import Admitted, Ask, Turn
from router.virtual_time import VirtualTime
from router.workers import WorkerTable

_PRIORITY = 5


class _Admission:
    """Implements `router.turns.Ending`: what the gate says of one request, told at once."""

    def __init__(self, told: Callable[[Admitted | BaseException], None]) -> None:
        self._told = told
        self._outcome: Admitted | BaseException | None = None
        self.turn: Turn | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Admitted:
        assert isinstance(self._outcome, Admitted)
        return self._outcome

    def exception(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def set_result(self, result: Admitted) -> None:
        self._outcome, self.turn = result, None
        self._told(result)

    def set_exception(self, exception: Exception) -> None:
        self._outcome, self.turn = exception, None
        self._told(exception)


class SimulatedRouter:
    """Implements `router.simulated_cluster.Relaying`. `ended` is given each outcome. Set `cluster` before a request."""

    cluster: SimulatedCluster

    def __init__(
        self, scenario: Scenario, time: VirtualTime, rng: random.Random, ended: Callable[[Outcome], None]
    ) -> None:
        self._scenario = scenario
        self._layout = scenario.layout
        self._time = time
        self._rng = rng
        self._ended = ended
        self.table = WorkerTable(clock=time.clock, experts=scenario.workers[0].costs.experts)
        relay = scenario.relay
        self.gate = Gate(scenario.admission, relay.wait_for_worker_s, rng, time.clock, lambda: time)
        self._retries = Retries(relay, rng, time.clock)
        self._ratio = PREFIX_BLOCK_TOKENS // self._layout.block_size
        self._homeless: dict[SimulatedRequest, float] = {}  # until when they wait for a worker to come
        self.table.on_eased = self.gate.look_soon
        self.table.on_changed = self._workers_changed
        self.num_open = 0

    def arrive(self, traced: TracedRequest) -> None:
        self.num_open += 1
        self._retries.begin()
        max_tokens = self._scenario.max_tokens or traced.num_output_tokens
        groups = tuple(map(group_of, traced.prefix_blocks))
        request = SimulatedRequest(traced, max(max_tokens, traced.num_output_tokens), groups)
        ending = _Admission(lambda told: self._told(request, told))
        ask = Ask(
            tenant="",
            priority=_PRIORITY,
            num_prompt_tokens=traced.num_prompt_tokens,
            max_tokens=request.max_tokens,
            deadline_at=None,
            find=lambda held: self._place(request, held),
            dispatch=lambda placement: (self._dispatch(request, placement),),
        )
        ending.turn = turn = self.gate.turn(ask, ending)
        try:
            self.gate.enter(turn)
        except ServiceError as refusal:
            self._end(request, refusal.reason)
            return
        if not ending.done():
            self._time.later(self.gate.patience_s(turn), self._out_of_patience, (request, ending))
        else:
            ending.turn = None

    def first_token(self, attempt: Attempt) -> None:
        attempt.dispatch.prefilled()

    def finished(self, attempt: Attempt) -> None:
        attempt.dispatch.end()
        request = attempt.request
        for worker in (attempt.prefill, attempt.decode):
            if worker is not None:
                self._retries.breakers.succeeded(worker.id, self._time.now)
        self._end(request)

    def failed(self, attempt: Attempt, worker: SimulatedWorker) -> None:
        request = attempt.request
        attempt.dispatch.end()
        request.avoid.add(worker.id)
        error = WorkerLost(f"worker {worker.spec.name!r} is lost")
        failure = AttemptFailed(error, worker.id, is_connection=True)
        num_failures = request.num_retries + request.num_resumes + 1
        try:
            delay_s = self._retries.delay_s(failure, num_failures, request.num_emitted, None)
        except ServiceError as exhausted:
            self._end(request, exhausted.reason)
            return
        if request.num_emitted:
            request.num_resumes += 1
        else:
            request.num_retries += 1
        self._time.later(delay_s, self._place_again, request)

    def find_target(self, attempt: Attempt, source: SimulatedWorker) -> tuple[SimulatedWorker, Dispatch] | None:
        """Where a sequence that leaves could go on; its load is counted there then."""
        demand = self._demand(attempt.request)
        avoided = self._retries.breakers.avoided(self._time.now)
        candidate = place_moved(self.table.snapshot(), demand, source.id, avoided, self._rng, self._scenario.placement)
        if candidate is None:
            return None
        self._retries.breakers.placed(candidate.id, self._time.now)
        dispatch = self.table.dispatch(Placement(None, candidate), 0, demand.num_blocks)
        return self.cluster.workers[candidate.id.name], dispatch

    def _told(self, request: SimulatedRequest, told: Admitted | BaseException) -> None:
        if isinstance(told, Admitted):
            request.admitted, request.wait_s = told, told.wait_s
            self._go(request, told.placement, told.dispatches[0])
        elif isinstance(told, ServiceError):
            self._end(request, told.reason)
        else:
            raise told

    def _out_of_patience(self, event: tuple[SimulatedRequest, _Admission]) -> None:
        request, ending = event
        if not ending.done() and ending.turn is not None:
            self._end(request, self.gate.give_up(ending.turn).reason)

    def _go(self, request: SimulatedRequest, placement: Placement, dispatch: Dispatch) -> None:
        prefill, decode = (
            None if candidate is None else self.cluster.workers[candidate.id.name]
            for candidate in (placement.prefill, placement.decode)
        )
        request.prefill = (prefill or decode or _nobody()).spec.name
        request.decode = "" if decode is None else decode.spec.name
        self.cluster.send(Attempt(request, request.num_tokens, prefill, decode, dispatch))

    def _place_again(self, request: SimulatedRequest) -> None:
        """Waits a little for a worker to come (back), if none fits now."""
        try:
            placement = self._place(request, ())
        except NoWorker:
            if request not in self._homeless:
                wait_s = self._scenario.relay.wait_for_worker_s
                self._homeless[request] = self._time.now + wait_s
                self._time.later(wait_s, self._given_up, request)
            return
        self._homeless.pop(request, None)
        self._go(request, placement, self._dispatch(request, placement))

    def _given_up(self, request: SimulatedRequest) -> None:
        if self._homeless.get(request, self._time.now + 1.0) <= self._time.now:
            del self._homeless[request]
            self._end(request, NoWorker.reason)

    def _workers_changed(self) -> None:
        self.gate.workers_changed()
        for request in list(self._homeless):
            self._time.later(0.0, self._again_if_homeless, request)

    def _again_if_homeless(self, request: SimulatedRequest) -> None:
        if request in self._homeless:
            self._place_again(request)

    def _place(self, request: SimulatedRequest, held: object) -> Placement:
        now, breakers = self._time.now, self._retries.breakers
        avoid: set[WorkerId] = {*request.avoid, *breakers.avoided(now)}
        assert isinstance(held, frozenset | set | tuple)
        return place(
            self.table.snapshot(), self._demand(request), avoid, self._rng, self._scenario.placement, frozenset(held)
        )

    def _demand(self, request: SimulatedRequest) -> Demand:
        """As `router.placer` works it out."""
        num_tokens, num_in_all = request.num_tokens, request.traced.num_prompt_tokens + request.max_tokens
        return Demand(
            num_blocks=self._num_blocks(num_tokens),
            num_blocks_in_all=self._num_blocks(num_in_all) - 1,
            wants_decode=request.max_tokens - request.num_emitted > 1,
            num_tokens=num_tokens + 1,
            num_tokens_in_all=num_in_all,
            prefix=self._matches(request),
            block_size=self._layout.block_size,
            token_bytes=self._layout.token_bytes,
        )

    def _matches(self, request: SimulatedRequest) -> PrefixMatches:
        """In blocks of the layout; the last token has to be computed in any case."""
        groups = request.groups[: (request.num_tokens - 1) // PREFIX_BLOCK_TOKENS]
        if not groups:
            return NO_MATCHES
        found = self.table.prefixes.match(groups)
        return PrefixMatches([(self._ratio * number, holders) for number, holders in found.runs], found.slots)

    def _dispatch(self, request: SimulatedRequest, placement: Placement) -> Dispatch:
        for candidate in placement.workers:
            self._retries.breakers.placed(candidate.id, self._time.now)
        num_tokens, num_in_all = request.num_tokens, request.traced.num_prompt_tokens + request.max_tokens
        return self.table.dispatch(
            placement,
            num_tokens - placement.num_cached_tokens,
            self._num_blocks(num_tokens),
            at_most=(num_in_all - num_tokens, self._num_blocks(num_in_all) - 1),
        )

    def _num_blocks(self, num_tokens: int) -> int:
        """With room for the answer to begin."""
        return self._layout.num_blocks(num_tokens) + 1

    def _end(self, request: SimulatedRequest, error: str = "") -> None:
        self.num_open -= 1
        self._retries.end()
        traced, num_emitted = request.traced, request.num_emitted
        if request.admitted is not None:
            self.gate.answered(request.admitted, traced.num_prompt_tokens, num_emitted)
        has_several = num_emitted > 1
        message_s = self._scenario.delays.message_s
        self._ended(
            Outcome(
                at_s=traced.at_s,
                num_prompt_tokens=traced.num_prompt_tokens,
                num_output_tokens=num_emitted,
                ended_at_s=self._time.now,
                ttft_s=request.first_token_at + message_s - traced.at_s if num_emitted else None,
                tpot_s=(request.last_token_at - request.first_token_at) / (num_emitted - 1) if has_several else None,
                worst_gap_s=request.worst_gap_s,
                wait_s=request.wait_s,
                prefill=request.prefill,
                decode=request.decode,
                num_cached_tokens=request.num_cached_tokens,
                num_retries=request.num_retries,
                num_resumes=request.num_resumes,
                num_moves=request.num_moves,
                num_preemptions=request.num_preemptions,
                error=error,
                slo_class=traced.slo_class,
            )
        )


def _nobody() -> SimulatedWorker:
    raise ValueError("a placement names at least one worker")
