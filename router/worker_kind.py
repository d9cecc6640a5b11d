"""One way to build a worker of a planned pool, and what its pool is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from router.drafting_gain import Drafting, best_token_s
from router.figure import Figure
from router.forecast import Forecast
from router.gpu_layout import GpuLayout
from router.memory_plan import MemoryPlan
from router.roofline import Roofline
from router.targets import Targets

MOST_WORKERS = 4096  # of one pool
DECODE_WAIT_SHARE = 0.05  # of the time to the first token, at most, for a place at a decode worker


def fewest_workers(least: float, is_enough: Callable[[int], bool]) -> int:
    """From `least` on. More of them are never worse.

    Raises:
        Unreachable
    """
    low = max(1, math.ceil(least)) - 1  # not enough
    step = 1
    while not is_enough(low + step):
        low, step = low + step, 2 * step
        if low > MOST_WORKERS:
            raise Unreachable(f"more than {MOST_WORKERS} workers of one pool would be needed")
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class Unreachable(Exception):
    """No number of such workers keeps to the targets; the message says which one fails, and by how much."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The longest part of a prompt in one step: of a prefill worker, and of one that does both."""

    prefill: int = 2048
    colocated: int = 512


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One kind of worker, and what it is asked for."""

    roofline: Roofline
    memory: MemoryPlan
    sequence: Figure  # KV of one in the middle of its answer
    context: Figure
    forecast: Forecast
    targets: Targets
    drafting: Drafting | None
    step_tokens: StepTokens

    @property
    def layout(self) -> GpuLayout:
        return self.roofline.layout

    def token_s(self, num_sequences: float) -> float:
        """Of a batch of these, with as many drafts as gain most."""
        return best_token_s(self.roofline, self.drafting, num_sequences, self.context.value)
