"""What is simulated: workers and the links between them, what the router is told to do, and what goes wrong when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from model.kv_layout import KVLayout
from router.candidate import Role
from router.config import AdmissionPolicy, PlacementPolicy, RelayPolicy
from router.observation import Observation
from router.step_costs import StepCosts
from router.traced_request import PREFIX_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker; the options are those of `pdserve worker`. `link_bytes_per_s`: of its link, in each direction."""

    name: str
    role: Role
    costs: StepCosts
    num_blocks: int = 4096
    max_step_tokens: int = 512
    max_running: int = 64
    link_bytes_per_s: float = 4e9
    flippable: bool = True
    hardware: str = ""  # workers that say the same are taken to be of a kind, whatever their costs

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_step_tokens", "max_running", "link_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)}; it must be above 0")
        if self.max_running > self.max_step_tokens:
            raise ValueError(f"{self.name} runs {self.max_running} sequences, and {self.max_step_tokens} tokens a step")


@dataclass(frozen=True, slots=True)
class Delays:
    """What takes time beside steps and bytes."""

    message_s: float = 0.0  # from one process to another
    hand_over_s: float = 0.0  # from the last byte until the decode worker has the sequence
    report_s: float = 0.05  # between looks of a worker at whether it has something to tell
    quarantine_s: float = 7.0  # of blocks whose sender has died


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's process dies, and another of that name registers at `back_at_s`, if ever."""

    at_s: float
    worker: str
    back_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class RoleChange:
    """`hands_over`: what decodes on a worker which is no longer to do so goes on elsewhere; else it ends there."""

    at_s: float
    worker: str
    role: Role
    hands_over: bool = True


Planner = Callable[[Observation], Mapping[str, Role]]
"""Returns the roles that workers are to have from now on; those it does not name keep theirs."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`max_tokens`: what requests ask for at most; None: just as many tokens as they get."""

    workers: Sequence[WorkerSpec]
    layout: KVLayout
    delays: Delays = Delays()
    failures: Sequence[Failure] = ()
    role_changes: Sequence[RoleChange] = ()
    relay: RelayPolicy = field(default_factory=RelayPolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    planner: Planner | None = None
    plan_every_s: float = 10.0
    max_tokens: int | None = None
    seed: int = 0
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(worker.name for worker in self.workers))
        if not self.workers or len(self.names) < len(self.workers):
            raise ValueError("workers must not be empty, and each needs a name of its own")
        if PREFIX_BLOCK_TOKENS % self.layout.block_size:
            raise ValueError(f"block_size is {self.layout.block_size}; it must divide {PREFIX_BLOCK_TOKENS}")
        named = {failure.worker for failure in self.failures} | {change.worker for change in self.role_changes}
        unknown = named - self.names
        if unknown:
            raise ValueError(f"there is no worker {', '.join(sorted(unknown))}")
        if self.plan_every_s <= 0 or self.delays.report_s <= 0:
            raise ValueError("plan_every_s and report_s must be above 0")
