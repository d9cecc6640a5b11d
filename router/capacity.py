"""Of several ways to build a worker, the one whose pool takes the fewest GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from router.colocated_pool import ColocatedPool
from router.decode_pool import DecodePool
from router.prefill_pool import PrefillPool
from router.worker_kind import Unreachable, WorkerKind

_Pool = TypeVar("_Pool", PrefillPool, DecodePool, ColocatedPool)


def fewest_gpus(kinds: Sequence[WorkerKind], size: Callable[[WorkerKind], _Pool]) -> _Pool:
    """The pool with the fewest GPUs, of the kinds of worker that stay inside one domain if any of them will do.

    Raises:
        Unreachable: what the smallest kind lacks.
    """
    reasons: list[str] = []
    for spans_domains in (False, True):
        pools = []
        for kind in kinds:
            if (kind.layout.num_gpus > kind.roofline.hardware.gpus_per_domain) is not spans_domains:
                continue
            try:
                pools.append(size(kind))
            except Unreachable as error:
                reasons.append(str(error))
        if pools:
            return min(pools, key=lambda pool: pool.num_gpus)
    others = f"; nor do the {len(reasons) - 1} other ways to build a worker" if len(reasons) > 1 else ""
    raise Unreachable(f"{reasons[0]}{others}")
