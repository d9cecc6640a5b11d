"""The engine loop: ask each scheduler for its part of the next step, run one forward, hand the results back.

Everything except the forward happens on the event loop, so pool and schedulers need no locks. The forward runs on one
compute thread; while it runs, the loop serves gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from model.runner import Chunk, LayerDone, ModelRunner, NonFiniteLogits, Outcome, StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A chunk and the two hooks of whoever scheduled it: `layer_done` runs on the compute thread."""

    chunk: Chunk
    layer_done: LayerDone | None = None


class Scheduler(Protocol):
    """Decides what one pool's sequences do in the next step. Called on the event loop only."""

    def schedule(self, num_tokens: int) -> Sequence[ScheduledChunk]:
        """Chunks of at most `num_tokens` tokens together, drafts included, their blocks held. Empty: nothing to do."""
        ...

    def complete(self, sampled: Sequence[Outcome], output: StepOutput) -> None:
        """Results of exactly the chunks that the last `schedule` returned, in order: an error ends its sequence."""
        ...

    def fail(self, error: Exception) -> None:
        """The step that ran the chunks of the last `schedule` raised: end those sequences, keep the others."""
        ...


StepObserver = Callable[[Sequence[Chunk], StepOutput], None]


class Engine:
    """Owns the compute thread. `run` is the one task; `wake` tells it that there may be something to do."""

    def __init__(
        self,
        runner: ModelRunner,
        schedulers: Sequence[Scheduler],
        *,
        max_step_tokens: int,
        observe: StepObserver | None = None,
    ) -> None:
        self._runner = runner
        self._schedulers = schedulers
        self._max_step_tokens = max_step_tokens
        self._observe = observe
        self._wake = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled; a step that is being computed then is waited for."""
        try:
            while True:
                if not await self.step():
                    await self._wake.wait()
        finally:
            self._compute.shutdown(wait=True)

    async def step(self) -> bool:
        """Runs one step; False if no scheduler had anything to do."""
        parts: list[Sequence[ScheduledChunk]] = []
        budget = self._max_step_tokens
        for scheduler in self._schedulers:
            part = scheduler.schedule(budget)
            budget -= sum(len(scheduled.chunk.token_ids) + scheduled.chunk.num_draft_tokens for scheduled in part)
            parts.append(part)
        self._wake.clear()  # what woke us until now was seen; blocks released in `schedule` are its own
        batch = [scheduled for part in parts for scheduled in part]
        if not batch:
            return False
        try:
            output = await self._execute(batch)
        except Exception as error:  # the runner's own failure ends the sequences of this step, not the worker
            logger.exception("a step of %d chunks failed", len(batch))
            for scheduler, part in zip(self._schedulers, parts, strict=True):
                if part:
                    scheduler.fail(error)
            return True
        self._hand_back(parts, output)
        if self._observe is not None:
            self._observe([scheduled.chunk for scheduled in batch], output)
        return True

    def _hand_back(self, parts: Sequence[Sequence[ScheduledChunk]], output: StepOutput) -> None:
        start = 0
        for scheduler, part in zip(self._schedulers, parts, strict=True):
            if part:
                scheduler.complete(output.sampled[start : start + len(part)], output)
            start += len(part)
        failures = [outcome for outcome in output.sampled if isinstance(outcome, NonFiniteLogits)]
        if failures:  # whoever reads their streams is told no more than that an internal error ended them
            logger.error("%d of %d chunks have no token: %s", len(failures), len(output.sampled), failures[0])

    async def _execute(self, batch: Sequence[ScheduledChunk]) -> StepOutput:
        hooks = [scheduled.layer_done for scheduled in batch if scheduled.layer_done is not None]

        def layer_done(layer: int) -> None:
            for hook in hooks:
                hook(layer)

        def compute() -> StepOutput:
            start = time.perf_counter()
            output = self._runner.execute([scheduled.chunk for scheduled in batch], layer_done if hooks else None)
            return replace(output, compute_s=time.perf_counter() - start)

        return await asyncio.get_running_loop().run_in_executor(self._compute, compute)
