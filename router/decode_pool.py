"""How many decode workers it takes: sequences wait for a place in a batch that is fast enough and fits the memory."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from router.figure import Figure, figure
from router.waiting import Service, Waiting, waiting
from router.worker_kind import DECODE_WAIT_SHARE, Unreachable, WorkerKind, fewest_workers

_MOST_SEQUENCES = 65536


@dataclass(frozen=True, slots=True)
class DecodePool:
    """`slots`: sequences that one worker decodes at once, at most. `batch`: how many do, or, `batch_late`, seldom."""

    num_workers: int
    kind: WorkerKind
    slots: Figure
    service: Service
    wait: Waiting
    batch: Figure
    batch_late: Figure
    tpot: Figure
    tpot_late: Figure

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.kind.layout.num_gpus


def size_decode(kind: WorkerKind) -> DecodePool:
    """
    Raises:
        Unreachable
    """
    slots = decode_slots(kind, slowdown=1.0)
    needed = kind.forecast.requests_per_s * _full_service(kind, slots, 1.0).mean.value / slots.value
    pools: dict[int, DecodePool | None] = {}

    def is_enough(num_workers: int) -> bool:
        pool = pools[num_workers] = decode_pool(kind, slots, num_workers, slowdown=1.0)
        return pool is not None and pool.wait.percentile.value <= DECODE_WAIT_SHARE * kind.targets.ttft_s

    pool = pools[fewest_workers(needed / kind.targets.max_utilisation, is_enough)]
    assert pool is not None
    return pool


def decode_slots(kind: WorkerKind, slowdown: float) -> Figure:
    """
    Raises:
        Unreachable: not even one sequence fits or is fast enough.
    """
    by_memory = math.floor(kind.memory.pool.value / kind.sequence.value)
    if by_memory < 1:
        raise Unreachable(
            f"{kind.memory.pool.value / 1e9:.1f} GB for KV on {kind.layout} hold no sequence of "
            f"{kind.sequence.value / 1e9:.2f} GB"
        )

    def is_fast(num_sequences: int) -> bool:
        return kind.token_s(num_sequences) * slowdown <= kind.targets.tpot_s

    if not is_fast(1):
        raise Unreachable(
            f"a token takes {kind.token_s(1) * slowdown * 1000:.1f} ms on {kind.layout} even at batch 1; tpot is "
            f"limited to {kind.targets.tpot_s * 1000:.1f} ms"
        )
    low, high = 1, _MOST_SEQUENCES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_fast(middle) else (low, middle - 1)
    return figure(
        "sequences per worker, at most",
        "",
        "min(floor(pool / sequence), by_tpot)",
        pool=kind.memory.pool,
        sequence=kind.sequence,
        by_tpot=low,
    )


def _full_service(kind: WorkerKind, slots: Figure, slowdown: float) -> Service:
    """Of an answer while all batches are full."""
    token = kind.token_s(slots.value) * slowdown
    return Service.of("decode", kind.forecast.answer, lambda n: n * token, kind.targets.percentile)


def decode_pool(kind: WorkerKind, slots: Figure, num_workers: int, slowdown: float) -> DecodePool | None:
    """None if they are busier than they may be."""
    forecast, targets = kind.forecast, kind.targets
    service = _full_service(kind, slots, slowdown)
    num_slots = num_workers * int(slots.value)
    if forecast.requests_per_s * service.mean.value > targets.max_utilisation * num_slots:
        return None
    wait = waiting(
        "decode", forecast.requests_per_s, forecast.arrival_variability, service, num_slots, targets.percentile
    )
    token_s = _settled_token_s(kind, num_workers, slots.value, slowdown)
    batch = figure(
        "decode, batch on average",
        "",
        "requests_per_s * answer * token_s / workers",
        requests_per_s=forecast.requests_per_s,
        answer=forecast.answer.mean,
        token_s=token_s,
        workers=num_workers,
    )
    late = figure(
        "decode, batch at the percentile",
        "",
        "min(slots, batch + deviations * sqrt(batch))",
        slots=slots,
        batch=batch,
        deviations=statistics.NormalDist().inv_cdf(targets.percentile),
    )
    return DecodePool(
        num_workers=num_workers,
        kind=kind,
        slots=slots,
        service=service,
        wait=wait,
        batch=batch,
        batch_late=late,
        tpot=figure("TPOT, mean", "s", "token_s * slowdown", token_s=token_s / slowdown, slowdown=slowdown),
        tpot_late=figure(
            "TPOT at the percentile",
            "s",
            "token_s * slowdown",
            token_s=kind.token_s(max(1.0, late.value)),
            slowdown=slowdown,
        ),
    )


def _settled_token_s(kind: WorkerKind, num_workers: int, most: float, slowdown: float) -> float:
    """The time per token at the batch that it leads to itself (Little's law); at least that of one sequence."""
    per_worker = kind.forecast.requests_per_s * kind.forecast.answer.mean / num_workers
    low, high = 1.0, max(1.0, most)
    for _ in range(30):
        middle = (low + high) / 2
        if per_worker * kind.token_s(middle) * slowdown > middle:
            low = middle
        else:
            high = middle
    return kind.token_s(high) * slowdown
