"""Whether separate pools are worth it, by the GPUs that either needs for the same targets."""

from __future__ import annotations

from dataclasses import dataclass

from router.colocated_pool import ColocatedPool
from router.decode_pool import DecodePool
from router.forecast import Forecast
from router.prefill_pool import PrefillPool

WORTHWHILE_PER_MIN = 500  # requests: below, a second pool is more to run than it saves, unless it halves the GPUs


@dataclass(frozen=True, slots=True)
class Advice:
    disaggregate: bool
    reasons: tuple[str, ...]


def advise(
    forecast: Forecast,
    prefill: PrefillPool,
    decode: DecodePool,
    colocated: ColocatedPool | None,
    no_colocated: str,
) -> Advice:
    per_min = forecast.requests_per_s * 60
    apart = prefill.num_gpus + decode.num_gpus
    if colocated is None:
        return Advice(True, (f"no number of workers that do both keeps to the targets: {no_colocated}",))
    together = colocated.num_gpus
    compared = f"{apart} GPUs in two pools, {together} in one, for the same TTFT and TPOT"
    shares = f"{prefill.wait.utilisation.value:.0%} and {decode.wait.utilisation.value:.0%}"
    busy = f"the two pools are busy to {shares}: each takes whole workers, and has a queue of its own to keep short"
    slowed = (
        f"prompts slow the decode steps of workers that do both by {colocated.slowdown.value:.2f} x, and a token that "
        f"comes while one is computed takes {colocated.gap.value * 1000:.0f} ms, not {decode.tpot.value * 1000:.0f} ms"
    )
    if per_min < WORTHWHILE_PER_MIN and 2 * apart > together:
        few = f"{per_min:.0f} requests/min are fewer than {WORTHWHILE_PER_MIN}, from where a second pool pays"
        return Advice(False, (compared, few, busy, slowed))
    if apart < together:
        return Advice(True, (compared, slowed))
    return Advice(False, (compared, busy, slowed))
