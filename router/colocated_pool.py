"""How many workers it takes that do both: prompts take their time from the decode steps, which slow down by it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.decode_pool import DecodePool, decode_pool, decode_slots
from router.figure import Figure, figure
from router.prefill_pool import PrefillPool, prefill_pool, prefill_s, refuse_slow_prompt
from router.waiting import Service
from router.worker_kind import DECODE_WAIT_SHARE, Unreachable, WorkerKind, fewest_workers

_LITTLE = 0.01  # of a worker's time: where prompts take less, more workers would not make one faster


@dataclass(frozen=True, slots=True)
class ColocatedPool:
    """Workers that do both. `gap`: between two tokens while a part of a prompt is computed in the same step."""

    prefill: PrefillPool
    decode: DecodePool
    slowdown: Figure
    gap: Figure

    @property
    def num_workers(self) -> int:
        return self.decode.num_workers

    @property
    def num_gpus(self) -> int:
        return self.decode.num_gpus


def size_colocated(kind: WorkerKind) -> ColocatedPool:
    """
    Raises:
        Unreachable
    """
    service = Service.of(
        "prefill",
        kind.forecast.prompt,
        lambda n: prefill_s(kind, n, kind.step_tokens.colocated),
        kind.targets.percentile,
    )
    least = kind.forecast.requests_per_s * service.mean.value / kind.layout.num_lanes
    pools: dict[int, ColocatedPool | None] = {}
    reason = ""

    def is_enough(num_workers: int) -> bool:
        nonlocal reason
        try:
            pools[num_workers] = _colocated_pool(kind, service, num_workers)
        except Unreachable as error:
            reason = str(error)
            if least / num_workers < _LITTLE:
                raise
            return False
        return pools[num_workers] is not None

    try:
        pool = pools[fewest_workers(least / kind.targets.max_utilisation, is_enough)]
    except Unreachable as error:
        raise Unreachable(reason or str(error)) from error
    assert pool is not None
    return pool


def _colocated_pool(kind: WorkerKind, service: Service, num_workers: int) -> ColocatedPool | None:
    forecast, targets = kind.forecast, kind.targets
    slowdown = figure(
        "decode slowed down by prompts",
        "",
        "1 / (1 - requests_per_s * prefill_s / (workers * lanes))",
        requests_per_s=forecast.requests_per_s,
        prefill_s=service.mean,
        workers=num_workers,
        lanes=kind.layout.num_lanes,
    )
    slots = decode_slots(kind, slowdown.value)
    decode = decode_pool(kind, slots, num_workers, slowdown.value)
    if decode is None or decode.wait.percentile.value > DECODE_WAIT_SHARE * targets.ttft_s:
        return None
    step_s = kind.token_s(max(1.0, decode.batch.value))
    most_tokens = kind.step_tokens.colocated

    def mixed_s(num_tokens: float) -> float:
        """A prompt whose every part shares its step with the batch."""
        new = num_tokens * (1 - forecast.cache_hit_rate)
        return prefill_s(kind, num_tokens, most_tokens) + max(1, math.ceil(new / most_tokens)) * step_s

    mixed = Service.of("prefill beside decode", forecast.prompt, mixed_s, targets.percentile)
    refuse_slow_prompt(kind, mixed, decode.wait.percentile.value)
    prefill = prefill_pool(kind, mixed, num_workers, decode.wait.percentile.value, "prefill beside decode")
    if prefill is None or prefill.ttft_late.value > targets.ttft_s:
        return None
    part = min(most_tokens, forecast.prompt.mean * (1 - forecast.cache_hit_rate))
    gap = figure(
        "gap between tokens while a prompt is computed",
        "s",
        "decode_step + prefill_step",
        decode_step=step_s,
        prefill_step=kind.roofline.prefill(part).seconds,
    )
    return ColocatedPool(prefill, decode, slowdown, gap)
