"""Sequences of a simulation that leave a worker which is no longer to decode, by the rules of `router.move` and
`decode.departures`: written while they decode on, for at most a block, and standing still for the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from router.candidate import WorkerId
from router.dispatch import Dispatch
from router.scenario import Scenario
from router.simulated_cluster import SimulatedCluster
from router.simulated_links import sent_at
from router.simulated_pool import Held
from router.simulated_request import Attempt, Decoding
from router.simulated_worker import SimulatedWorker
from router.traced_request import PREFIX_BLOCK_TOKENS
from router.virtual_time import VirtualTime

_SPREAD_S = 0.2
_RETRY_S = 0.1  # doubled with each failure
_MAX_RETRY_S = 5.0
_MOST_AT_ONCE = 8  # of one worker
_TURN_S = 0.02  # between looks for a turn

FindTarget = Callable[[Attempt, SimulatedWorker], tuple[SimulatedWorker, Dispatch] | None]
"""Where a sequence could go on, its load counted there."""


@dataclass(slots=True, eq=False)
class _Move:
    source: SimulatedWorker
    decoding: Decoding
    target: SimulatedWorker
    target_id: WorkerId
    dispatch: Dispatch
    held: Held
    num_written_tokens: int
    written_at: float


class SimulatedMoves:
    def __init__(
        self,
        scenario: Scenario,
        time: VirtualTime,
        rng: random.Random,
        cluster: SimulatedCluster,
        find_target: FindTarget,
    ) -> None:
        self._hand_over_s = scenario.delays.hand_over_s
        self._quarantine_s = scenario.delays.quarantine_s
        self._token_bytes = scenario.layout.token_bytes
        self._time = time
        self._rng = rng
        self._cluster = cluster
        self._find_target = find_target
        self._leaving: set[str] = set()  # workers
        self._moves: dict[Decoding, _Move] = {}
        cluster.on_halted = self._halted
        cluster.on_arrived = self._arrived
        cluster.on_disturbed = self._disturbed

    def empty(self, worker: SimulatedWorker) -> None:
        """Whatever decodes there goes on elsewhere, what still comes too, until it is told to `stay`."""
        self._leaving.add(worker.spec.name)
        for decoding in (*worker.batch.running, *worker.batch.waiting):
            self._arrived(worker, decoding)

    def stay(self, worker: SimulatedWorker) -> None:
        self._leaving.discard(worker.spec.name)

    def _arrived(self, worker: SimulatedWorker, decoding: Decoding) -> None:
        if worker.spec.name in self._leaving:
            delay_s = _SPREAD_S * self._rng.random()
            self._time.later(delay_s, self._try, (worker, worker.id, decoding, _RETRY_S))

    def _try(self, event: tuple[SimulatedWorker, WorkerId, Decoding, float]) -> None:
        source, source_id, decoding, retry_s = event
        attempt = decoding.attempt
        has_left = attempt.is_over or attempt.decoding is not decoding or source.id != source_id
        if has_left or source.spec.name not in self._leaving:
            return
        if sum(move.source is source for move in self._moves.values()) >= _MOST_AT_ONCE:
            self._time.later(_TURN_S, self._try, event)
        elif not self._begin(source, decoding):
            self._time.later(
                retry_s * self._rng.uniform(0.5, 1),
                self._try,
                (source, source_id, decoding, min(2 * retry_s, _MAX_RETRY_S)),
            )

    def _begin(self, source: SimulatedWorker, decoding: Decoding) -> bool:
        if decoding not in source.batch.running or decoding.is_computing:
            return False
        at = source.halting_at(decoding)
        if at is None:
            return False
        found = self._find_target(decoding.attempt, source)
        if found is None:
            return False
        target, dispatch = found
        groups = decoding.attempt.groups[: (at - 1) // PREFIX_BLOCK_TOKENS]
        held = self._cluster.tickets[target.spec.name].reserve(source.spec.name, at - 1, groups, self._time.now)
        if held is None:
            dispatch.end()
            return False
        num_tokens, _ = source.num_emitted_tokens(decoding)
        num_bytes = max(0, num_tokens - 1 - PREFIX_BLOCK_TOKENS * len(held.groups)) * self._token_bytes
        written_at = sent_at(source, target, num_bytes, self._time.now)
        self._moves[decoding] = _Move(source, decoding, target, target.id, dispatch, held, num_tokens - 1, written_at)
        source.halt(decoding, at)
        return True

    def _halted(self, source: SimulatedWorker, decoding: Decoding) -> None:
        move = self._moves[decoding]
        num_bytes = (decoding.num_tokens - 1 - move.num_written_tokens) * self._token_bytes
        until = max(move.written_at, sent_at(source, move.target, num_bytes, self._time.now))
        self._time.at(until + self._hand_over_s, self._moved, move)

    def _disturbed(self, decoding: Decoding) -> None:
        """It has lost its KV, or its worker has died."""
        move = self._moves.pop(decoding, None)
        if move is None:
            return
        move.dispatch.end()
        is_over = decoding.attempt.is_over
        if move.target.is_alive and move.target.id == move.target_id:
            self._cluster.release(move.target, move.held, after_s=self._quarantine_s if is_over else 0.0)
        if not is_over:
            self._arrived(move.source, decoding)

    def _moved(self, move: _Move) -> None:
        decoding, source, target = move.decoding, move.source, move.target
        attempt = decoding.attempt
        if self._moves.pop(decoding, None) is not move:
            return
        is_there = target.is_alive and target.id == move.target_id
        if not is_there:
            move.dispatch.end()
            source.go_on(decoding)
            self._arrived(source, decoding)
            return
        source.batch.let_go(decoding)
        source.attempts.pop(attempt, None)
        source.wake()
        attempt.dispatch.end()
        attempt.decode, attempt.dispatch = target, move.dispatch
        attempt.dispatch.prefilled()
        attempt.request.num_moves += 1
        attempt.request.decode = target.spec.name
        moved = Decoding(attempt, decoding.num_tokens, move.held, last_token_at=decoding.last_token_at)
        self._cluster.take_over(target, moved)
