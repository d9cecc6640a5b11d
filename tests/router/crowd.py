"""Requests before a gate, and workers that are a number of places each; on a loop whose time is a number."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass, field

from protos.errors import NoWorker, ServiceError
from router.admission import Gate
from router.candidate import Candidate, Role, WorkerId
from router.config import AdmissionPolicy
from router.dispatch import Dispatch
from router.placement import Placement
from router.turns import Admitted, Ask
from tests.kvtransfer.virtual_loop import VirtualLoop

START = 1000.0
WAIT_FOR_WORKER_S = 5.0
POLICY = AdmissionPolicy()


@dataclass
class Asked:
    """One request: `size` places are taken while it runs."""

    name: str
    size: int
    task: asyncio.Task[Admitted] = field(init=False)
    num_dispatched: int = 0
    num_ended: int = 0

    @property
    def is_waiting(self) -> bool:
        return not self.task.done()

    @property
    def is_running(self) -> bool:
        return self.num_dispatched > self.num_ended

    @property
    def error(self) -> BaseException | None:
        return None if not self.task.done() or self.task.cancelled() else self.task.exception()


class Crowd:
    """`workers` by name: how many places each has. Ends its loop with `close`."""

    def __init__(self, policy: AdmissionPolicy = POLICY, **workers: int) -> None:
        self.loop = VirtualLoop(START)
        self.gate = Gate(policy, WAIT_FOR_WORKER_S, random.Random(0), self.loop.time)
        self.places = workers
        self.taken = dict.fromkeys(workers, 0)
        self.ttft_s: float | None = None
        self.num_found = 0  # placements that were asked for
        self.asked: list[Asked] = []
        self.went: list[str] = []  # in order

    def close(self) -> None:
        for each in self.asked:
            each.task.cancel()
        self.loop.settle()
        self.gate.close()
        self.loop.close()

    def ask(
        self,
        name: str,
        size: int = 1,
        *,
        tenant: str = "",
        priority: int = 5,
        tokens: int | None = None,
        within_s: float | None = None,
    ) -> Asked:
        asked = Asked(name, size)
        ask = Ask(
            tenant=tenant,
            priority=priority,
            num_prompt_tokens=(tokens or 100 * size) - 1,
            max_tokens=1,
            deadline_at=None if within_s is None else self.loop.time() + within_s,
            find=lambda held: self._find(asked, held),
            dispatch=lambda placement: self._dispatch(asked, placement),
        )
        asked.task = self.loop.do(self.gate.admit(ask))
        self.asked.append(asked)
        return asked

    def end(self, asked: Asked) -> None:
        admitted = asked.task.result()
        for dispatch in admitted.dispatches:
            self.loop.call_soon(dispatch.end)
        self.loop.call_soon(self.gate.answered, admitted, 100 * asked.size - 1, 1)
        self.loop.settle()

    def leave(self, asked: Asked) -> None:
        asked.task.cancel()
        self.loop.settle()

    def come(self, name: str, places: int) -> None:
        self.places[name] = places
        self.taken.setdefault(name, 0)
        self.loop.call_soon(self.gate.workers_changed)
        self.loop.settle()

    def go(self, name: str) -> None:
        del self.places[name]
        self.loop.call_soon(self.gate.workers_changed)
        self.loop.settle()

    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds, lambda: None)

    def fits(self, size: int, held: Collection[WorkerId] = ()) -> bool:
        """Somewhere; a worker that has nothing to do takes any."""
        return any(
            self.taken[name] == 0 or self.taken[name] + size <= places
            for name, places in self.places.items()
            if WorkerId(name, "") not in held
        )

    def _find(self, asked: Asked, held: Collection[WorkerId]) -> Placement:
        self.num_found += 1
        names = [name for name in self.places if WorkerId(name, "") not in held]
        if not names:
            raise NoWorker("none has registered")
        best = max(names, key=lambda name: self.places[name] - self.taken[name])
        fitting = [
            name for name in names if self.taken[name] == 0 or self.taken[name] + asked.size <= self.places[name]
        ]
        name = best if best in fitting or not fitting else fitting[0]
        worker = Candidate(
            WorkerId(name, ""), "", Role.BOTH, True, "", 0, num_queued_tokens=0, num_active=0, num_free_blocks=0
        )
        return Placement(None, worker, ttft_s=self.ttft_s, is_within_limits=name in fitting)

    def _dispatch(self, asked: Asked, placement: Placement) -> tuple[Dispatch, ...]:
        (worker,) = placement.workers
        name = worker.id.name
        dispatch = Dispatch(0.0, 0, 0, None, None)
        asked.num_dispatched += 1
        self.taken[name] += asked.size
        self.went.append(asked.name)

        def eased() -> None:
            """Called as its prefill ends, and as it does."""
            if is_running:
                is_running.clear()
                asked.num_ended += 1
                self.taken[name] -= asked.size
            self.gate.look_soon()

        is_running = [True]
        dispatch.eased = eased
        return (dispatch,)


def refusal(asked: Asked) -> ServiceError:
    error = asked.error
    assert isinstance(error, ServiceError), error
    return error
