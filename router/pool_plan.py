"""How large the pools are to be, why, and what other ratios would give. Values only; `router.planner` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.candidate import Role


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Workers of each pool. `epoch` grows with every plan that differs from the one before.

    `goodput`: requests a second that are predicted to meet both SLOs. `confidence`: 0 to 1, of the models behind it.
    """

    epoch: int
    num_prefill: int
    num_decode: int
    reason: str
    goodput: float
    confidence: float


@dataclass(frozen=True, slots=True)
class RatioForecast:
    """What a ratio is predicted to give under the load that is expected. Times are at the percentile of the SLO, and
    infinite where a pool cannot keep up. `goodput` as in `PoolPlan`; `attainment` is its share of what comes, and
    `classes` that of each SLO class, by name, where several are expected; the default one has none."""

    num_prefill: int
    num_decode: int
    ttft_s: float
    tpot_s: float
    goodput: float
    attainment: float
    classes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """What is expected to come until the next plan has taken effect."""

    requests_per_s: float
    num_prompt_tokens: float  # mean; those that caches will hold among them
    num_output_tokens: float  # mean
    hit_rate: float  # share of the prompt tokens that caches will hold


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a planner says: the plan, the roles that have to change for it, and what it was weighed against.

    `gain`: requests a second within the SLOs that the plan gives more than the roles as they are.
    """

    plan: PoolPlan
    roles: Mapping[str, Role] = field(default_factory=dict)  # by worker; those that are not named keep theirs
    forecast: LoadForecast | None = None  # None: nothing is known yet
    ratios: tuple[RatioForecast, ...] = ()  # by number of prefill workers
    gain: float = 0.0
