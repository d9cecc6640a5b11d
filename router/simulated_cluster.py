"""The workers of a simulation together: a request's way from prefill to its last token, and what a death does to it.

It knows the workers and the links between them. Where a request goes is the router's: `router.simulated_router`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from router.observation import Running
from router.scenario import Scenario
from router.simulated_links import sent_at, streamed_at
from router.simulated_pool import Held
from router.simulated_request import Attempt, Decoding, Prefilling
from router.simulated_tickets import RETRY_S, SimulatedTickets
from router.simulated_worker import SimulatedWorker
from router.traced_request import PREFIX_BLOCK_TOKENS
from router.virtual_time import VirtualTime


class Relaying(Protocol):
    """Who sent the requests."""

    def first_token(self, attempt: Attempt) -> None:
        """Or the first one after it was tried again."""

    def finished(self, attempt: Attempt) -> None: ...

    def failed(self, attempt: Attempt, worker: SimulatedWorker) -> None:
        """This worker has died."""


class SimulatedCluster:
    """Implements `router.simulated_step.Listener`. The `on_`s are of who moves sequences."""

    def __init__(self, scenario: Scenario, time: VirtualTime, rng: random.Random, relay: Relaying) -> None:
        self._delays = scenario.delays
        self._token_bytes = scenario.layout.token_bytes
        self._time = time
        self._rng = rng
        self._relay = relay
        self.workers = {spec.name: SimulatedWorker(spec, scenario.layout, time, self) for spec in scenario.workers}
        self.tickets: dict[str, SimulatedTickets] = {}
        self.on_halted: Callable[[SimulatedWorker, Decoding], None] = lambda worker, decoding: None
        self.on_arrived: Callable[[SimulatedWorker, Decoding], None] = lambda worker, decoding: None
        self.on_disturbed: Callable[[Decoding], None] = lambda decoding: None

    def start(self, worker: SimulatedWorker) -> None:
        worker.start()
        self.tickets[worker.spec.name] = SimulatedTickets(worker)

    def send(self, attempt: Attempt) -> None:
        """To the workers that it was placed on."""
        for worker in (attempt.prefill, attempt.decode):
            if worker is not None:
                worker.attempts[attempt] = None
        self._time.later(self._delays.message_s, self._arrived, attempt)

    def running(self) -> list[Running]:
        """As a router sees them."""
        found = []
        for worker in self.workers.values():
            for attempt in worker.attempts:
                if not attempt.is_over and worker is (attempt.decode or attempt.prefill):
                    traced, decoding = attempt.request.traced, attempt.decoding
                    num_emitted = attempt.request.num_emitted
                    if decoding is not None and decoding in worker.batch.running and not decoding.is_computing:
                        num_emitted = worker.num_emitted_tokens(decoding)[0] - traced.num_prompt_tokens
                    found.append(Running(traced.at_s, traced.num_prompt_tokens, num_emitted, traced.slo_class))
        return found

    def die(self, worker: SimulatedWorker) -> None:
        """All that it had to do with is told to have failed, once it is gone."""
        for decoding in list(worker.batch.running):
            if not decoding.is_computing:
                self._note_emitted(worker, decoding)
        worker.die()
        failed, worker.attempts = list(worker.attempts), {}
        for attempt in failed:
            self._give_up(attempt, worker)
        for attempt in failed:
            self._relay.failed(attempt, worker)

    def ask_for_ticket(self, prefilling: Prefilling) -> None:
        self._time.later(self._delays.message_s, self._reserve, prefilling)

    def wrote(self, worker: SimulatedWorker, prefilling: Prefilling, num_tokens: int, began_at: float) -> None:
        attempt = prefilling.attempt
        if attempt.decode is None or attempt.is_over:
            return
        start = max(prefilling.num_computed - num_tokens, attempt.num_held_tokens)
        num_bytes = max(0, prefilling.num_computed - start) * self._token_bytes
        until = streamed_at(worker, attempt.decode, num_bytes, began_at, self._time.now)
        prefilling.written_at = max(prefilling.written_at, until)

    def prefilled(self, worker: SimulatedWorker, prefilling: Prefilling) -> None:
        attempt, now = prefilling.attempt, self._time.now
        if attempt.is_over:
            return
        if attempt.request.num_emitted == 0:
            attempt.request.num_cached_tokens = prefilling.num_cached
        self._emitted(attempt, attempt.num_tokens + 1)
        if attempt.num_tokens + 1 == attempt.num_tokens_at_end or attempt.decode is None:
            worker.prompt_left(prefilling)
            self._end(attempt)
        else:
            self._time.at(
                max(now, prefilling.written_at) + self._delays.hand_over_s, self._handed_over, (worker, prefilling)
            )

    def first_token(self, decoding: Decoding) -> None:
        attempt = decoding.attempt
        if not attempt.is_over:
            self._emitted(attempt, decoding.num_tokens)

    def stopped(self, worker: SimulatedWorker, decoding: Decoding) -> None:
        attempt = decoding.attempt
        attempt.request.emitted_in_all(decoding.num_tokens, self._time.now)
        if decoding in worker.batch.halted:
            self.on_halted(worker, decoding)
        else:
            self._end(attempt)

    def preempted(self, decoding: Decoding) -> None:
        self.on_disturbed(decoding)

    def take_over(self, worker: SimulatedWorker, decoding: Decoding) -> None:
        """A sequence whose KV is there goes on decoding."""
        attempt = decoding.attempt
        attempt.decoding = decoding
        worker.attempts[attempt] = None
        assert decoding.held is not None
        worker.pool.publish(decoding.held, attempt.groups[: (decoding.num_tokens - 1) // PREFIX_BLOCK_TOKENS])
        worker.batch.waiting.append(decoding)
        worker.wake()
        self.on_arrived(worker, decoding)

    def release(self, worker: SimulatedWorker, held: Held, *, after_s: float = 0.0) -> None:
        """Blocks that were reserved for what will not come. After a sender's death it may be writing still."""
        if after_s:
            self._time.later(after_s, self._released, (worker, worker.id, held))
        else:
            self._released((worker, worker.id, held))

    def _arrived(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        if attempt.prefill is not None:
            attempt.prefilling = Prefilling(attempt, self._time.now)
            attempt.prefill.prompt_came(attempt.prefilling)
        elif attempt.decode is not None:
            num_tokens = attempt.num_tokens
            attempt.decoding = Decoding(attempt, num_tokens, None, num_tokens)
            attempt.decoding.last_token_at = attempt.request.last_token_at
            attempt.decode.batch.waiting.append(attempt.decoding)
            attempt.decode.wake()

    def _reserve(self, prefilling: Prefilling) -> None:
        attempt = prefilling.attempt
        if attempt.is_over or attempt.decode is None or attempt.prefill is None:
            return
        groups = attempt.groups[: attempt.num_tokens // PREFIX_BLOCK_TOKENS]
        tickets = self.tickets[attempt.decode.spec.name]
        held = tickets.reserve(attempt.prefill.spec.name, attempt.num_tokens, groups, self._time.now)
        if held is not None:
            attempt.reserved = held
            attempt.num_held_tokens = len(held.groups) * PREFIX_BLOCK_TOKENS
        self._time.later(self._delays.message_s, self._granted if held is not None else self._refused, prefilling)

    def _granted(self, prefilling: Prefilling) -> None:
        """What was found in the prefix cache goes out at once."""
        attempt = prefilling.attempt
        if attempt.is_over or attempt.prefill is None or attempt.decode is None:
            return
        prefilling.is_granted = True
        num_tokens = max(0, prefilling.num_cached - attempt.num_held_tokens)
        if num_tokens:
            num_bytes = num_tokens * self._token_bytes
            prefilling.written_at = sent_at(attempt.prefill, attempt.decode, num_bytes, self._time.now)
        attempt.prefill.wake()

    def _refused(self, prefilling: Prefilling) -> None:
        attempt = prefilling.attempt
        if attempt.is_over or attempt.prefill is None:
            return
        attempt.prefill.prompt_refused(prefilling)
        self._time.later(RETRY_S * self._rng.uniform(0.5, 1.5), self._ask_again, prefilling)

    def _ask_again(self, prefilling: Prefilling) -> None:
        attempt = prefilling.attempt
        if not attempt.is_over and attempt.prefill is not None:
            attempt.prefill.prompt_may_ask(prefilling)

    def _handed_over(self, event: tuple[SimulatedWorker, Prefilling]) -> None:
        worker, prefilling = event
        attempt = prefilling.attempt
        if attempt.is_over or attempt.decode is None or attempt.reserved is None:
            return
        worker.prompt_left(prefilling)
        worker.attempts.pop(attempt, None)
        held, attempt.reserved = attempt.reserved, None
        decoding = Decoding(attempt, attempt.num_tokens + 1, held)
        decoding.last_token_at = attempt.request.last_token_at
        self.take_over(attempt.decode, decoding)

    def _emitted(self, attempt: Attempt, num_tokens: int) -> None:
        """The prompt's own token, or the one after it was computed again; so many tokens there are in all then."""
        request, now = attempt.request, self._time.now
        if request.num_emitted:
            request.worst_gap_s = max(request.worst_gap_s, now - request.last_token_at)
        request.emitted_in_all(num_tokens, now)
        self._relay.first_token(attempt)

    def _note_emitted(self, worker: SimulatedWorker, decoding: Decoding) -> None:
        request = decoding.attempt.request
        num_tokens, at = worker.num_emitted_tokens(decoding)
        request.worst_gap_s = max(request.worst_gap_s, worker.batch.longest_gap_s(decoding))
        if num_tokens > request.num_tokens:
            request.emitted_in_all(num_tokens, at)

    def _end(self, attempt: Attempt) -> None:
        attempt.is_over = True
        attempt.prefilling = attempt.decoding = None  # no circles: there may be millions
        for worker in (attempt.prefill, attempt.decode):
            if worker is not None:
                worker.attempts.pop(attempt, None)
        if attempt.reserved is not None and attempt.decode is not None:
            self.release(attempt.decode, attempt.reserved)
            attempt.reserved = None
        self._relay.finished(attempt)

    def _give_up(self, attempt: Attempt, dead: SimulatedWorker) -> None:
        """What other workers still do or hold for it ends."""
        attempt.is_over = True
        if attempt.decoding is not None:
            self.on_disturbed(attempt.decoding)
        prefill, decode = attempt.prefill, attempt.decode
        if prefill is not None and prefill is not dead:
            prefill.attempts.pop(attempt, None)
            if attempt.prefilling is not None and prefill.is_alive:
                prefill.prompt_left(attempt.prefilling)
        if decode is not None and decode is not dead:
            decode.attempts.pop(attempt, None)
            if attempt.reserved is not None:
                self.release(decode, attempt.reserved, after_s=self._delays.quarantine_s)
        attempt.reserved = None

    def _released(self, event: tuple[SimulatedWorker, object, Held]) -> None:
        worker, worker_id, held = event
        if worker.is_alive and worker.id == worker_id:
            worker.settle()
            worker.pool.give_back(held)
            worker.wake()
