"""The workers as the router knows them: who is registered, in which role, how loaded, and what was sent to whom.

Event loop only. It knows neither gRPC nor requests: services feed it, and `router.placement` decides on its snapshots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from model.kv_layout import KVLayout
from protos.errors import FailedPrecondition, NotFound
from router.cache_changes import CacheChanges
from router.candidate import Candidate, Role, WorkerId
from router.dispatch import Dispatch, Dispatches
from router.fleet import Fleet
from router.fleet_models import FleetModels
from router.measured_steps import Steps
from router.placement import Placement
from router.prefix_index import PrefixIndex
from router.profile import Common, WorkerProfile, common_of, refuse_misfit
from router.shared_records import SentLoad
from router.step_costs import Experts
from router.worker import DumpCache, Replaced, Worker, WorkerLoad, WorkerState

_SETTLE_S = 0.1  # a report may have been under way for so long: what was sent since is counted beside it
_SILENCE_S = 5.0  # workers report every second; one that is silent gets nothing new
_REMEMBER_LOST_S = 300.0


class WorkerTable:
    """`tokenizer_digest`, if given, is what every worker's must be. `prefixes`: what is in their prefix caches;
    `models`: what their steps take.

    `on_eased` is called when a worker may have got less to do, `on_changed` when one came, went, or changed its role or
    state.
    """

    def __init__(
        self,
        tokenizer_digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        experts: Experts | None = None,
    ) -> None:
        self._tokenizer_digest = tokenizer_digest
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._lost: dict[str, Worker] = {}
        self._changed = asyncio.Event()
        self._common: Common | None = None  # as of the last change
        self._fleet = Fleet()
        self._stale: dict[Worker, None] = {}  # not yet in the fleet as they are now; in an order that repeats
        self._by_age: dict[Worker, None] = {}  # the one first that was heard of longest ago, unless it is silent
        self.prefixes = PrefixIndex()
        self.models = FleetModels(experts, clock)
        self.on_eased: Callable[[], None] = lambda: None
        self.on_changed: Callable[[], None] = lambda: None

    def register(self, profile: WorkerProfile, load: WorkerLoad) -> Worker:
        """Takes a worker in; one that is registered under its name is replaced.

        Raises:
            FailedPrecondition: it does not fit the others; the message names the first difference.
        """
        others = (other.profile for other in self._present() if other.profile.id.name != profile.id.name)
        refuse_misfit(profile, next(others, None), self._tokenizer_digest)
        known = self._workers.get(profile.id.name)
        same_process = known is not None and known.profile.id == profile.id
        role = known.role if known is not None and same_process else profile.role
        is_drained = known is not None and same_process and known.is_drained
        if known is not None and known.load.state is not WorkerState.LOST:
            self.lost(known)
            known.commands.put_nowait(
                None if same_process else Replaced(f"another process has registered as {profile.id.name!r}")
            )
        self._forget()
        worker = Worker(profile, role, load, self._clock(), is_drained=is_drained)
        if known is not None and same_process:
            worker.dispatches, known.dispatches = known.dispatches, Dispatches()  # what runs there still does
        worker.dispatches.on_change = partial(self._stale.setdefault, worker)
        self._heard(worker)
        self._workers[profile.id.name] = worker
        self._lost.pop(profile.id.name, None)
        self.prefixes.join(profile.id, profile.num_blocks)
        self.models.join(profile)
        self._tell_dispatches(worker)
        self._notify()
        return worker

    def report(self, worker: Worker, load: WorkerLoad) -> None:
        if worker.load.state is WorkerState.LOST:
            return  # replaced meanwhile
        was_ready, was_leaving = self._is_ready(worker), worker.is_leaving
        worker.load, worker.is_reachable = load, True
        self._heard(worker)
        if worker.is_leaving != was_leaving:
            self._tell_dispatches(worker)
        if self._is_ready(worker) != was_ready:
            self._notify()
        self.on_eased()

    def cache_changed(self, worker: Worker, changes: CacheChanges) -> None:
        """What has become findable there, and what no longer is. Where something was missed, all is asked for."""
        if worker.load.state is not WorkerState.LOST and self.prefixes.apply(worker.profile.id, changes):
            worker.commands.put_nowait(DumpCache())

    def steps_measured(self, worker: Worker, steps: Sequence[Steps]) -> None:
        """By that worker."""
        if worker.load.state is not WorkerState.LOST:
            self.models.observe(worker.profile.id, steps)

    def lost(self, worker: Worker) -> None:
        """Its stream has ended."""
        if worker.load.state is not WorkerState.LOST:
            self.prefixes.leave(worker.profile.id)
            self.models.leave(worker.profile.id)
        worker.load = WorkerLoad(WorkerState.LOST)
        if self._workers.get(worker.profile.id.name) is worker:  # else it was replaced
            self._lost[worker.profile.id.name] = worker
        self._heard(worker)
        self._notify()

    def unreachable(self, worker_id: WorkerId) -> None:
        """A connection to it broke: it gets nothing new until it reports again."""
        worker = self._workers.get(worker_id.name)
        if worker is not None and worker.profile.id == worker_id:
            worker.is_reachable = False
            self._stale[worker] = None
            self._notify()

    def silent(self) -> list[WorkerId]:
        """Registered workers that have not reported for a while: stopped, overwhelmed or cut off."""
        return [worker.profile.id for worker in self._present() if self.state(worker) is WorkerState.SILENT]

    def set_role(self, name: str, role: Role) -> None:
        """From the next placement on; the worker is told, and attempts that decode where they no longer are to.

        Raises:
            NotFound: no worker has this name.
            FailedPrecondition: it keeps its role.
        """
        worker = self.present(name)
        if not worker.profile.flippable and role != worker.role:
            raise FailedPrecondition(f"worker {name!r} cannot change its role", field="worker_id")
        worker.role = role
        self._stale[worker] = None
        self._tell_dispatches(worker)
        worker.commands.put_nowait(role)
        self._notify()

    def set_draining(self, name: str, is_drained: bool) -> None:
        """Nothing new is placed on a worker that is drained; attempts that decode there are told to leave.

        Raises:
            NotFound: no worker has this name.
        """
        worker = self.present(name)
        worker.is_drained = is_drained
        self._stale[worker] = None
        self._tell_dispatches(worker)
        self._notify()

    def registered(self, name: str) -> Candidate:
        """As placement sees it. Raises NotFound: no worker has this name."""
        worker = self.present(name)
        return worker.candidate(self._is_ready(worker), self._clock())

    def sent_elsewhere(self, worker: Worker, load: SentLoad) -> None:
        """What other routers have sent there."""
        if worker.sent_elsewhere != load:
            worker.sent_elsewhere = load
            self._stale[worker] = None
            self.on_eased()

    def dispatch(
        self, placement: Placement, num_tokens: int, num_blocks: int, at_most: tuple[int, int] | None = None
    ) -> Dispatch:
        """Counts an attempt at once, not when its workers report it. `end` it in a finally.

        `num_tokens` of the prompt have to be computed; `at_most` are the tokens and the blocks of the whole answer.
        """
        prefill, decode = (
            None if worker is None else self._workers[worker.id.name]
            for worker in (placement.prefill, placement.decode)
        )
        dispatch = Dispatch(
            self._clock(),
            num_tokens,
            num_blocks,
            prefill=None if prefill is None else prefill.dispatches,
            decode=None if decode is None else decode.dispatches,
            eased=self.on_eased,
            clock=self._clock,
        )
        if at_most is not None and (answer_s := placement.answer_s(at_most[0])) is not None:
            dispatch.ends_at, dispatch.num_blocks_in_all = dispatch.at + answer_s, at_most[1]
        dispatch.begin()
        if decode is not None and decode.is_leaving:
            dispatch.leaving.set()
        return dispatch

    def snapshot(self) -> Fleet:
        """As of now. It changes with what happens next: not to be kept."""
        now = self._fleet.now = self._clock()
        while self._by_age and now - (oldest := next(iter(self._by_age))).reported_at >= _SILENCE_S:
            del self._by_age[oldest]
            self._stale[oldest] = None
        for worker in self._stale:
            if self._workers.get(worker.profile.id.name) is worker:
                times = self.models.prefill_times_of(worker.profile.id, now)
                self._fleet.put(worker.candidate(self._is_ready(worker), now, times))
        self._stale.clear()
        return self._fleet

    def workers(self) -> list[Worker]:
        """By name, with those that were lost lately. Changes nothing: metrics are read in a thread of their own."""
        workers = [worker for worker in list(self._workers.values()) if not self._is_forgotten(worker)]
        return sorted(workers, key=lambda worker: worker.profile.id.name)

    def state(self, worker: Worker) -> WorkerState:
        """Of those that have not left only a worker that is ready gets anything new."""
        reported = worker.load.state
        if reported is WorkerState.LOST:
            return reported
        if self.age_s(worker) >= _SILENCE_S:
            return WorkerState.SILENT
        return WorkerState.DRAINING if worker.is_drained else reported

    def age_s(self, worker: Worker) -> float:
        return self._clock() - worker.reported_at

    @property
    def common(self) -> Common:
        """Asked several times for each request, while workers seldom come and go."""
        if self._common is None:
            self._common = common_of([(worker.profile, worker.role) for worker in self._present()])
        return self._common

    @property
    def layout(self) -> KVLayout | None:
        return self.common.layout

    async def wait_changed(self, timeout_s: float) -> None:
        """Until a worker came, went, or changed its role or state; or the time is over."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def present(self, name: str) -> Worker:
        """Raises NotFound."""
        worker = self._workers.get(name)
        if worker is None or worker.load.state is WorkerState.LOST:
            names = ", ".join(sorted(worker.profile.id.name for worker in self._present()))
            raise NotFound(f"no worker {name!r} is registered; there are: {names or 'none'}", field="worker_id")
        return worker

    def _tell_dispatches(self, worker: Worker) -> None:
        for dispatch in worker.dispatches:
            if dispatch.decode is worker.dispatches:
                if worker.is_leaving:
                    dispatch.leaving.set()
                else:
                    dispatch.leaving.clear()

    def _heard(self, worker: Worker) -> None:
        worker.reported_at = self._clock()
        self._by_age.pop(worker, None)
        self._by_age[worker] = None
        self._stale[worker] = None
        worker.dispatches.reported(worker.reported_at - _SETTLE_S)

    def _notify(self) -> None:
        self._common = None
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_changed()

    def _forget(self) -> None:
        for name, worker in list(self._lost.items()):
            if self._is_forgotten(worker):
                del self._lost[name], self._workers[name]
                self._fleet.remove(name)

    def _is_forgotten(self, worker: Worker) -> bool:
        was_lost = worker.load.state is WorkerState.LOST and self.age_s(worker) > _REMEMBER_LOST_S
        return was_lost and not worker.dispatches

    def _present(self) -> Iterator[Worker]:
        return (worker for worker in self._workers.values() if worker.load.state is not WorkerState.LOST)

    def _is_ready(self, worker: Worker) -> bool:
        return self.state(worker) is WorkerState.READY and worker.is_reachable
