"""What a router knows when it plans: its workers, what has come and what has been answered since it last did."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.candidate import Candidate, WorkerId
from router.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request when it comes."""

    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    slo_class: str = ""  # empty: the default one


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has got its answer. `tpot_s` is None where there was no second token."""

    arrived_at_s: float
    ended_at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt: found in a prefix cache
    num_output_tokens: int
    ttft_s: float
    tpot_s: float | None
    slo_class: str = ""


class LearntTimes(Protocol):
    """What steps take, as far as that is known: `router.fleet_models.FleetModels`."""

    def costs_of(self, worker_id: WorkerId) -> StepCosts: ...

    def confidences_of(self, worker_id: WorkerId) -> tuple[float, float]:
        """In prefill and decode, each 0 to 1."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request that a worker has, and that has got so much of its answer."""

    arrived_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo_class: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """`arrived` and `answered`: since the last time."""

    now_s: float  # on the clock of `arrived`
    workers: Sequence[Candidate]
    num_waiting: int  # at the router
    arrived: Sequence[Arrival]
    answered: Sequence[Answered]
    running: Sequence[Running] = ()
    fixed: Collection[str] = ()  # workers that keep their roles, by name
    models: LearntTimes | None = None  # None: nothing is learnt here
    block_size: int = 16  # tokens of the workers' blocks
