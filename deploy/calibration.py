"""Measures a few steps of different sizes before a worker registers, so that the router need not guess what they take.

They run over blocks that nobody has yet. A timed runner is asked for its formula instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.runners import max_context_tokens
from deploy.worker_config import WorkerConfig
from model.runner import Chunk, DraftingState, ModelRunner
from model.sampling_params import SamplingParams
from model.timed_runner import TimedRunner
from router.measured_steps import DecodeSteps, PrefillSteps, Steps

logger = logging.getLogger(__name__)

_NUM_TIMES = 2  # each: the first time it finds memory that nobody has touched yet
_CONTEXTS = (64, 1024)  # of a sequence
_MOST_S = 1.5


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sequences alike, each with tokens to run behind its context; one that decodes runs a single token."""

    num_sequences: int
    num_tokens: int
    context: int  # without those

    def num_blocks(self, block_size: int) -> int:
        """Of each sequence."""
        return -(-(self.context + self.num_tokens) // block_size)


def calibration(config: WorkerConfig, folder: Path, runner: ModelRunner) -> Sequence[Steps]:
    """What a worker tells when it registers; nothing where that is switched off."""
    if config.calibrate == "off":
        return ()
    logger.info("calibrating")
    return calibrate(
        runner,
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        max_context_tokens=max_context_tokens(config, folder),
    )


def calibrate(
    runner: ModelRunner,
    *,
    max_step_tokens: int,
    max_running: int,
    max_context_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> list[Steps]:
    """Takes about a second and a half at most, and on a machine that is too slow for that measures less."""
    shapes = [
        shape
        for shape in _shapes(max_step_tokens, max_running, max_context_tokens)
        if shape.num_sequences * shape.num_blocks(runner.layout.block_size) <= runner.num_blocks
        and shape.context + shape.num_tokens <= max_context_tokens
    ]
    if isinstance(runner, TimedRunner):
        return [_measured(shape, runner.timing.step_s(_chunks(shape, runner.layout.block_size))) for shape in shapes]
    steps: list[Steps] = []
    until, longest_s = clock() + _MOST_S, 0.0
    for shape in shapes:
        took_s = []
        for _ in range(_NUM_TIMES):
            if clock() + longest_s < until:
                took_s.append(runner.execute(_chunks(shape, runner.layout.block_size)).compute_s)
                longest_s = max(longest_s, took_s[-1])
        if len(took_s) == _NUM_TIMES:
            steps.append(_measured(shape, min(took_s)))
    return steps


def _shapes(max_step_tokens: int, max_running: int, max_context_tokens: int) -> Iterator[_Shape]:
    """Few and many sequences, short and long prompts, little and much context: so that each can be told apart.

    What takes longest comes last.
    """
    near, far = (max(1, min(context, max_context_tokens // 2)) for context in _CONTEXTS)
    longest = min(max_step_tokens, max_context_tokens // 2)
    few, many = max(1, max_running // 16), max(1, max_running // 4)
    short, middle, long = (max(2, longest // 16), max(2, longest // 4), max(2, longest * 3 // 4))
    yield from (_Shape(1, 1, near), _Shape(1, short, 0), _Shape(many, 1, near), _Shape(1, short, far))
    yield from (_Shape(few, 1, far), _Shape(1, middle, 0), _Shape(1, long, 0))


def _chunks(shape: _Shape, block_size: int) -> Sequence[Chunk]:
    """Each sequence has blocks of its own: those that share them would find them in the processor's caches."""
    num_blocks, greedy = shape.num_blocks(block_size), SamplingParams(max_tokens=1, temperature=0.0)
    token_ids, history = [1] * shape.num_tokens, [1] * (shape.context + shape.num_tokens)
    chunks = []
    for number in range(shape.num_sequences):
        block_ids = range(number * num_blocks, (number + 1) * num_blocks)
        num_prompt_tokens = shape.context if shape.num_tokens == 1 else len(history)
        chunks.append(
            Chunk(token_ids, shape.context, block_ids, greedy, history, num_prompt_tokens, drafting=DraftingState())
        )
    return chunks


def _measured(shape: _Shape, step_s: float) -> Steps:
    in_all = shape.context + shape.num_tokens
    if shape.num_tokens == 1:
        return DecodeSteps(shape.num_sequences, shape.num_sequences * in_all, step_s)
    num_tokens = shape.num_sequences * shape.num_tokens
    return PrefillSteps(num_tokens, num_tokens * in_all, step_s)
