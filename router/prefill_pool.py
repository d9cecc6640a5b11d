"""How many prefill workers it takes: prompts wait for a lane of one, and must not wait too long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.figure import Figure, figure
from router.waiting import Service, Waiting, together, waiting
from router.worker_kind import Unreachable, WorkerKind, fewest_workers

_PROMPTS_OF_A_LANE = 2


@dataclass(frozen=True, slots=True)
class PrefillPool:
    num_workers: int
    kind: WorkerKind
    service: Service
    wait: Waiting
    ttft: Figure
    ttft_late: Figure

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.kind.layout.num_gpus


def prefill_s(kind: WorkerKind, num_tokens: float, most_tokens: int) -> float:
    """Of one prompt in parts, with what the prefix caches hold of it left out."""
    cached = kind.forecast.cache_hit_rate * num_tokens
    new = num_tokens - cached
    num_steps = max(1, math.ceil(new / most_tokens))
    part = new / num_steps
    return num_steps * kind.roofline.prefill(part, cached + (new - part) / 2).seconds


def size_prefill(kind: WorkerKind, decode_wait_s: float = 0.0) -> PrefillPool:
    """`decode_wait_s`: for a place at a decode worker, at the percentile; the first token waits for it too.

    Raises:
        Unreachable
    """
    targets = kind.targets
    service = Service.of(
        "prefill", kind.forecast.prompt, lambda n: prefill_s(kind, n, kind.step_tokens.prefill), targets.percentile
    )
    refuse_slow_prompt(kind, service, decode_wait_s)
    _refuse_little_room(kind)
    busy = kind.forecast.requests_per_s * service.mean.value / kind.layout.num_lanes
    pools: dict[int, PrefillPool | None] = {}

    def is_enough(num_workers: int) -> bool:
        pool = pools[num_workers] = prefill_pool(kind, service, num_workers, decode_wait_s)
        return pool is not None and pool.ttft_late.value <= targets.ttft_s

    pool = pools[fewest_workers(busy / targets.max_utilisation, is_enough)]
    assert pool is not None
    return pool


def _refuse_little_room(kind: WorkerKind) -> None:
    """A lane holds the prompt that it computes, and the one before while that is handed over."""
    longest = kind.forecast.prompt.quantile(kind.targets.percentile)
    needed = _PROMPTS_OF_A_LANE * kind.layout.num_lanes * kind.memory.token.value * longest
    if needed > kind.memory.pool.value:
        raise Unreachable(
            f"{kind.memory.pool.value / 1e9:.1f} GB for KV on {kind.layout} do not hold {_PROMPTS_OF_A_LANE} prompts "
            f"of {longest:.0f} tokens in each of {kind.layout.num_lanes} lanes, {needed / 1e9:.1f} GB"
        )


def refuse_slow_prompt(kind: WorkerKind, service: Service, decode_wait_s: float) -> None:
    alone, limit = service.late.value + decode_wait_s, kind.targets.ttft_s
    if alone > limit:
        longest = kind.forecast.prompt.quantile(kind.targets.percentile)
        raise Unreachable(
            f"a prompt of {longest:,.0f} tokens, which {kind.targets.percentile * 100:.4g}% do not exceed, takes "
            f"{alone * 1000:.0f} ms without waiting on {kind.layout}; ttft is limited to {limit * 1000:.0f} ms"
        )


def prefill_pool(
    kind: WorkerKind, service: Service, num_workers: int, decode_wait_s: float, what: str = "prefill"
) -> PrefillPool | None:
    """None if they are busier than they may be."""
    forecast, targets = kind.forecast, kind.targets
    num_lanes = num_workers * kind.layout.num_lanes
    if forecast.requests_per_s * service.mean.value > targets.max_utilisation * num_lanes:
        return None
    wait = waiting(what, forecast.requests_per_s, forecast.arrival_variability, service, num_lanes, targets.percentile)
    mean = figure("TTFT, mean", "s", "wait + service", wait=wait.mean, service=service.mean)
    own = together("TTFT at the percentile, of prefill", wait, service)
    late = figure("TTFT at the percentile", "s", "prefill + decode_wait", prefill=own, decode_wait=decode_wait_s)
    return PrefillPool(num_workers, kind, service, wait, mean, late)
