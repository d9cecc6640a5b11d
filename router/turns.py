"""A request before the gate: what it asks for, its turn while it waits, and what it gets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from router.candidate import WorkerId
from router.dispatch import Dispatch
from router.fair_queue import Charge, Waiting
from router.placement import Placement


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as far as admission goes. `find` places it on others than those held, or raises NoWorker; `dispatch`
    counts its load, answer by answer. Between the two nothing is awaited."""

    tenant: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int  # of each answer
    deadline_at: float | None
    find: Callable[[Collection[WorkerId]], Placement]
    dispatch: Callable[[Placement], tuple[Dispatch, ...]]
    num_answers: int = 1

    @property
    def size(self) -> tuple[int, int, int]:
        return self.num_prompt_tokens, self.max_tokens, self.num_answers


class Ending(Protocol):
    """What a turn comes to: the part of `asyncio.Future` that the gate needs."""

    def done(self) -> bool: ...

    def result(self) -> Admitted: ...

    def exception(self) -> BaseException | None: ...

    def set_result(self, result: Admitted, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """The part of an event loop that the gate needs; a simulator's time passes differently."""

    def call_soon(self, callback: Callable[[], None], /) -> Timer: ...

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> Timer: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Turn(Waiting):
    ask: Ask
    ended: Ending
    ttft_s: float = 0.0  # as predicted when it was last looked at
    no_worker_at: float | None = None  # since when none fits it

    def as_small(self, others: Iterable[Turn]) -> Turn | None:
        """One of the others that asks for no more than this: if there is no room for that, there is none for this."""
        return next((other for other in others if all(map(operator.le, other.ask.size, self.ask.size))), None)


@dataclass(frozen=True, slots=True)
class Admitted:
    """`dispatches` are the caller's to end, one for each answer. `wait_s`: how long it waited. It leads back to nothing
    that waits."""

    placement: Placement
    dispatches: tuple[Dispatch, ...]
    wait_s: float
    charge: Charge
