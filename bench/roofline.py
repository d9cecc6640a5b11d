"""What the memory allows: a decode step reads every weight it uses once, and cannot be faster than that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from model.checkpoint import map_weights
from model.config import ModelConfig

COPY_BYTES = 512 << 20  # far beyond any cache
TRIALS = 5


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """`fixed` are read in every step, `experts` by as many as a step touches, of those there are."""

    fixed: int
    experts: int = 0
    num_experts: int = 0

    @classmethod
    def of(cls, folder: Path) -> WeightBytes:
        """As they are stored. The embedding is left out, of which a step reads some rows, unless it is the head too."""
        config = ModelConfig.from_folder(folder)
        sizes = {name: tensor.nbytes for name, tensor in map_weights(folder, config).items()}
        if not config.tie_word_embeddings:
            del sizes["model.embed_tokens.weight"]
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        return cls(sum(sizes.values()) - experts, experts, config.num_experts)

    def per_step(self, num_distinct_experts: float | None) -> float:
        """`num_distinct_experts` of a layer, on average."""
        if not self.num_experts or num_distinct_experts is None:
            return float(self.fixed)
        return self.fixed + self.experts * num_distinct_experts / self.num_experts


def memory_bandwidth() -> float:
    """Bytes per second, with the threads that torch has: the better of copying, where reads and writes count, and of
    reading alone, since a copy may read what it overwrites first."""
    source = torch.ones(COPY_BYTES // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    copying = min(_seconds(lambda: target.copy_(source)) for _ in range(TRIALS))
    reading = min(_seconds(lambda: torch.dot(source, target)) for _ in range(TRIALS))
    return 2 * COPY_BYTES / min(copying, reading)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
