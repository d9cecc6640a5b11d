"""The seam between deciding and computing: a batch of chunks goes in, a token for each chunk that wants one comes out.

Schedulers decide and own the pool; a runner computes and owns the cache tensor. `TorchRunner` runs the model,
`TimedRunner` takes the time a calibrated model says. A runner is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model.kv_layout import KVLayout
from model.sampling_params import SamplingParams

LayerDone = Callable[[int], None]
"""Called on the compute thread once a layer's keys and values of the whole batch are in the cache."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to run: positions [start, start + len(token_ids)).

    `block_ids` hold the KV of positions [0, start + len(token_ids)). With `sampling` set the chunk ends at the
    sequence's last token and the next one is wanted; `history` are then all its tokens and `num_prompt_tokens` of them
    the prompt (penalties, logprobs and randomness depend on both).
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    sampling: SamplingParams | None = None
    history: Sequence[int] = ()
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs, of the model's own distribution: before penalties, temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None


class NonFiniteLogits(ArithmeticError):
    """Why a chunk that wanted a token has none: its logits hold NaN or infinity, or nothing else than -infinity."""


Outcome = SampledToken | NonFiniteLogits | None
"""Of one chunk: None where it wanted no token, the error where there is none to be had."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to chunk i. `expert_load`: tokens, [layers, experts]."""

    sampled: tuple[Outcome, ...]
    compute_s: float = 0.0
    expert_load: Sequence[Sequence[int]] = field(default=())


class ModelRunner(Protocol):
    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def kernels(self) -> str:
        """Which kernels run, for people: 'avx2', 'amx', 'torch', 'timed'."""
        ...

    @property
    def cache_address(self) -> int:
        """Of the first byte of the cache, [L, N, H, 2, B, D]."""
        ...

    @property
    def cache_device_id(self) -> int:
        """CUDA device of the cache, -1 for host memory."""
        ...

    def execute(self, chunks: Sequence[Chunk], layer_done: LayerDone | None = None) -> StepOutput:
        """Runs one forward over all chunks and samples. Blocks until done. Never keeps a reference to its arguments."""
        ...
