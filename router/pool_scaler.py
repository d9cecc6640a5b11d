"""How pools get the sizes that are wanted: here by flipping roles of the workers that there are. Other scalers, which
start and stop workers, stand behind the same seam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.errors import FailedPrecondition, InvalidArgument
from router.candidate import Candidate, Role
from router.flips import Flips
from router.pool_plan import PoolPlan
from router.workers import WorkerTable


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Of the workers in service. One that does both counts in both pools, and among `num_both`."""

    num_prefill: int
    num_decode: int
    num_both: int


class PoolScaler(Protocol):
    def sizes(self) -> PoolSizes:
        """Now."""
        ...

    def roles_for(self, num_prefill: int, num_decode: int) -> Mapping[str, Role]:
        """The roles that have to change for these sizes, among the workers that there are.

        Raises InvalidArgument, FailedPrecondition: these sizes cannot be had.
        """
        ...

    async def apply(self, plan: PoolPlan, roles: Mapping[str, Role], by: str = "") -> Mapping[str, Role]:
        """Begins to give the pools the sizes of the plan, with these roles; returns what the workers whose role it has
        changed did before. Raises ServiceError: nothing was changed."""
        ...


class FlipScaler:
    """There are as many workers as there are."""

    def __init__(self, table: WorkerTable, flips: Flips) -> None:
        self._table = table
        self._flips = flips

    def sizes(self) -> PoolSizes:
        roles = [worker.role for worker in self._in_service()]
        return PoolSizes(*(sum(role in each for each in roles) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)))

    def roles_for(self, num_prefill: int, num_decode: int) -> Mapping[str, Role]:
        return roles_for(self._in_service(), num_prefill, num_decode)

    async def apply(self, plan: PoolPlan, roles: Mapping[str, Role], by: str = "") -> Mapping[str, Role]:
        """Of workers that have left, or keep their role, nothing is changed."""
        workers = {worker.id.name: worker for worker in self._in_service()}
        can_change = {name: role for name, role in roles.items() if name in workers and workers[name].flippable}
        return {flip.worker: flip.before for flip in self._flips.set_roles(can_change, plan.reason, by)}

    def _in_service(self) -> list[Candidate]:
        return [worker for worker in self._table.snapshot() if worker.is_ready]


def roles_for(workers: Sequence[Candidate], num_prefill: int, num_decode: int) -> dict[str, Role]:
    """As few changes as will do, and of those the ones that disturb least. A worker whose role is fixed and that does
    both counts in both pools; each other one is in one of them then.

    Raises:
        InvalidArgument: a pool would be empty, or together they are not as many as there are.
        FailedPrecondition: the fixed workers do not allow it.
    """
    for name, number in (("num_prefill", num_prefill), ("num_decode", num_decode)):
        if number < 1:
            raise InvalidArgument(f"{name} is {number}; it must be at least 1", field=name)
    movable = [worker for worker in workers if worker.flippable]
    fixed = [worker for worker in workers if not worker.flippable]
    fixed_in = {role: [worker for worker in fixed if role in worker.role] for role in (Role.PREFILL, Role.DECODE)}
    num_in_all = len(movable) + sum(map(len, fixed_in.values()))
    if num_in_all < 2:
        raise FailedPrecondition(f"{num_in_all} workers are in service: two pools take two", field="num_prefill")
    if num_prefill + num_decode != num_in_all:
        raise InvalidArgument(
            _why_not_so_many(num_prefill, num_decode, num_in_all, movable, fixed), field="num_prefill"
        )
    for role, number, name in ((Role.PREFILL, num_prefill, "num_prefill"), (Role.DECODE, num_decode, "num_decode")):
        if number < len(fixed_in[role]):
            told = f"{name} is {number}, but {_fixed(fixed_in[role])} and cannot be flipped"
            raise FailedPrecondition(told, field=name)
    num_to_prefill = num_prefill - len(fixed_in[Role.PREFILL])
    by_cost = sorted(movable, key=_as_prefill_rank)
    wanted = {worker.id.name: Role.PREFILL for worker in by_cost[:num_to_prefill]}
    wanted |= {worker.id.name: Role.DECODE for worker in by_cost[num_to_prefill:]}
    return {worker.id.name: wanted[worker.id.name] for worker in movable if worker.role != wanted[worker.id.name]}


def _as_prefill_rank(worker: Candidate) -> tuple[int, int, str]:
    """Who had rather prefill comes first: those that do, the busiest first; those that do both; then those that decode,
    the idlest first."""
    if worker.role is Role.PREFILL:
        return 0, -worker.num_queued_tokens, worker.id.name
    return (1 if worker.role is Role.BOTH else 2), worker.num_active, worker.id.name


def _why_not_so_many(
    num_prefill: int, num_decode: int, num_in_all: int, movable: Sequence[Candidate], fixed: Sequence[Candidate]
) -> str:
    told = f"num_prefill and num_decode are {num_prefill + num_decode} together; they must be {num_in_all}: "
    can = f"{len(movable)} of the workers in service can be flipped"
    return told + can + (f", and {_fixed(fixed)}" if fixed else "")


def _name(worker: Candidate) -> str:
    return worker.id.name


def _fixed(workers: Sequence[Candidate]) -> str:
    names = ", ".join(f"{worker.id.name} ({str(worker.role.name).lower()})" for worker in sorted(workers, key=_name))
    return f"{names} {'is' if len(workers) == 1 else 'are'} fixed"
