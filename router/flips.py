"""Changes of workers' roles, from the word to the moment when nothing of the old role runs there any more.

The next request finds the new role. What decodes on a worker that is no longer to decode is handed over to others as it
runs (`router.move`), or ends there while nobody has room; prompts are finished where they are queued. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from protos.errors import FailedPrecondition, NotFound
from router import metrics
from router.candidate import Role, WorkerId
from router.decisions import Decisions
from router.dispatch import Dispatches
from router.flip import Flip, FlipState
from router.worker import Worker
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

MAX_FLIPS = 50  # that are told
_LOOK_S = 0.02
_DOES = {Role.PREFILL: "prefills", Role.DECODE: "decodes"}


@dataclass(slots=True, eq=False)
class _Running:
    """`is_ours`: this router was asked for it; if not, another one counts and logs it."""

    flip: Flip
    worker_id: WorkerId
    began_at: float
    dispatches: Dispatches
    num_moved_before: int
    is_ours: bool
    by: str
    was_idle: bool = False  # has had no prompt to compute since


class Flips:
    """`run` it beside the server. One that is not done after `deadline_s` has failed; its worker keeps the new role."""

    def __init__(
        self,
        table: WorkerTable,
        decisions: Decisions,
        deadline_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._decisions = decisions
        self._deadline_s = deadline_s
        self._clock = clock
        self._now = now
        self._running: dict[str, _Running] = {}  # by worker
        self._ended: deque[Flip] = deque(maxlen=MAX_FLIPS)
        self._begun = asyncio.Event()

    def set_roles(self, roles: Mapping[str, Role], reason: str, by: str = "") -> list[Flip]:
        """From the next request on, all together; returns those that change. `by`: the name of a key.

        Raises:
            NotFound: there is no such worker. Nothing is changed then, as for the other one.
            FailedPrecondition: a worker keeps its role, or no worker in service would be left for one of the roles.
        """
        workers = {name: self._table.present(name) for name in roles}
        fixed = [n for n, worker in workers.items() if not worker.profile.flippable and worker.role != roles[n]]
        if fixed:
            told = " and ".join(map(repr, sorted(fixed)))
            raise FailedPrecondition(f"worker {told} cannot change its role", field="worker_id")
        self._refuse_if_none_is_left(roles)
        began = [self._begin(workers[name], role, reason, by, is_ours=True) for name, role in roles.items()]
        return [running.flip for running in began if running is not None]

    def follow(self, name: str, role: Role) -> None:
        """What another router was asked for. Raises as `WorkerTable.set_role`."""
        self._begin(self._table.present(name), role, "set at another router", "", is_ours=False)

    def newest(self) -> list[Flip]:
        """Newest first."""
        running = [self._as_it_is(each) for each in self._running.values()]
        return sorted([*running, *self._ended], key=lambda flip: flip.at, reverse=True)[:MAX_FLIPS]

    async def run(self) -> None:
        while True:
            await self._begun.wait()
            while self._running:
                self.look()
                await asyncio.sleep(_LOOK_S)
            self._begun.clear()

    def look(self) -> None:
        """Ends those that are done, or will not be."""
        for running in list(self._running.values()):
            worker = self._process(running.worker_id)
            if worker is None:
                self._end(running, "the worker has left")
            elif self._is_done(running, worker):
                self._end(running)
            elif self._clock() - running.began_at >= self._deadline_s:
                self._end(running, f"it was not empty after {self._deadline_s:g} s")

    def _begin(self, worker: Worker, role: Role, reason: str, by: str, *, is_ours: bool) -> _Running | None:
        name, before = worker.profile.id.name, worker.role
        self._table.set_role(name, role)
        if role == before:
            return None
        if (other := self._running.get(name)) is not None:
            self._end(other, f"the role was set to {_named(role)} meanwhile")
        logger.info("worker %s is used for %s from now on: %s", name, _named(role), reason)
        flip = Flip(name, before, role, self._now(), reason)
        sent = worker.dispatches
        running = _Running(flip, worker.profile.id, self._clock(), sent, sent.num_handed_over, is_ours, by)
        self._running[name] = running
        self._begun.set()
        return running

    def _refuse_if_none_is_left(self, roles: Mapping[str, Role]) -> None:
        in_service = {worker.id.name: worker.role for worker in self._table.snapshot() if worker.is_ready}
        after = {name: roles.get(name, role) for name, role in in_service.items()}
        for role, does in _DOES.items():
            if any(role in each for each in in_service.values()) and not any(role in each for each in after.values()):
                names = " and ".join(repr(name) for name, each in sorted(in_service.items()) if role in each)
                told = f"no worker in service {does} but {names}: let another one do it first, or let it do both"
                raise FailedPrecondition(told, field="role")

    def _process(self, worker_id: WorkerId) -> Worker | None:
        """None: it has left, or another one has its name."""
        with suppress(NotFound):
            worker = self._table.present(worker_id.name)
            return worker if worker.profile.id == worker_id else None
        return None

    def _is_done(self, running: _Running, worker: Worker) -> bool:
        flip, other = running.flip, worker.sent_elsewhere
        if Role.DECODE in flip.lost and worker.dispatches.num_decoding + other.num_decoding:
            return False
        if Role.PREFILL not in flip.lost:
            return True
        is_idle = worker.load.queued_prefill_tokens + other.num_unreported_tokens == 0
        running.was_idle = running.was_idle or is_idle
        return running.was_idle and not any(
            dispatch.prefills_on is worker.dispatches and not dispatch.is_prefilled and dispatch.at <= running.began_at
            for dispatch in worker.dispatches
        )

    def _as_it_is(self, running: _Running) -> Flip:
        num_moved = running.dispatches.num_handed_over - running.num_moved_before
        return replace(running.flip, took_s=self._clock() - running.began_at, num_moved=num_moved)

    def _end(self, running: _Running, problem: str = "") -> None:
        state = FlipState.FAILED if problem else FlipState.DONE
        flip = replace(self._as_it_is(running), state=state, problem=problem)
        del self._running[flip.worker]
        self._ended.append(flip)
        metrics.FLIP_MOVES.inc(flip.num_moved)
        if not running.is_ours:
            return
        metrics.FLIPS.labels(state.name.lower()).inc()
        if not problem:
            metrics.FLIP_SECONDS.observe(flip.took_s)
        told = f"{flip.reason}: {problem}" if problem else flip.reason
        logger.info(
            "worker %s after %.2f s: flip %s, %d moved; %s", flip.worker, flip.took_s, state, flip.num_moved, told
        )
        what = "flip failed" if problem else "flip done"
        self._decisions.add(
            what,
            flip.worker,
            _named(flip.after),
            running.by,
            reason=told,
            took_s=flip.took_s,
            num_moved=flip.num_moved,
        )


def _named(role: Role) -> str:
    return str(role.name).lower()
