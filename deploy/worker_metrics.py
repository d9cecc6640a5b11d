"""What Prometheus sees of a worker's engine loop, its experts and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from decode.metrics import DRAFT_FAILURES
from kvtransfer.receiver import Receiver
from model.block_pool import BlockPool
from model.runner import Chunk, StepOutput, VerifiedDraft

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

STEP_SECONDS = Histogram("pdserve_worker_step_seconds", "Seconds of one forward.", buckets=_STEP_SECONDS)
STEP_SEQUENCES = Histogram(
    "pdserve_worker_step_sequences", "Sequences in one step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)
STEP_TOKENS = Counter("pdserve_worker_step_tokens", "Tokens run through the model.")
EXPERT_IMBALANCE = Histogram(
    "pdserve_worker_expert_imbalance_ratio",
    "Tokens of a layer's busiest expert over the mean of all, of one step.",
    buckets=(1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0),
)
BLOCKS = Gauge("pdserve_worker_blocks", "Blocks of the KV cache by state.", ["state"])
SEQUENCES = Gauge("pdserve_worker_sequences", "Sequences by where they are.", ["pool", "state"])
QUEUED_TOKENS = Gauge("pdserve_worker_queued_prefill_tokens", "Tokens whose KV has still to be computed here.")


class ExpertLoad(Collector):
    """Tokens routed to each expert of each layer, summed in one array: a label look-up for each is dear."""

    def __init__(self) -> None:
        self._tokens: NDArray[np.int64] = np.zeros((0, 0), np.int64)  # [layers, experts]
        REGISTRY.register(self)

    def add(self, load: NDArray[np.int64]) -> None:
        self._tokens = load if self._tokens.shape != load.shape else self._tokens + load

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "pdserve_worker_expert_tokens", "Tokens routed to an expert.", labels=["layer", "expert"]
        )
        for (layer, expert), num_tokens in np.ndenumerate(self._tokens):
            family.add_metric([str(layer), str(expert)], float(num_tokens))
        yield family


EXPERT_LOAD = ExpertLoad()


def observe_step(chunks: Sequence[Chunk], output: StepOutput) -> None:
    STEP_SECONDS.observe(output.compute_s)
    STEP_SEQUENCES.observe(len(chunks))
    STEP_TOKENS.inc(sum(len(chunk.token_ids) for chunk in chunks) + _num_drafted(output))
    DRAFT_FAILURES.inc(output.num_failed_drafts)
    if len(output.expert_load):
        load = np.asarray(output.expert_load, np.int64)
        EXPERT_LOAD.add(load)
        if load.any():
            EXPERT_IMBALANCE.observe(imbalance(load))


def _num_drafted(output: StepOutput) -> int:
    return sum(outcome.num_drafted for outcome in output.sampled if isinstance(outcome, VerifiedDraft))


def imbalance(load: NDArray[np.int64]) -> float:
    """Of tokens by [layer, expert]: how much the busiest expert has beyond the mean, 1 for even; mean over layers.

    Those that ran tokens: the last one has none in a step of prompts that end later.
    """
    load = load[load.any(axis=1)]
    return float((load.max(axis=1) / load.mean(axis=1)).mean())


def watch_blocks(pool: BlockPool, receiver: Receiver) -> None:
    """Read when scraped. Reserved: under a ticket; quarantined: under one that has ended; used: by sequences here."""
    BLOCKS.labels("blank").set_function(lambda: pool.num_free - pool.num_cached)
    BLOCKS.labels("cached").set_function(lambda: pool.num_cached)
    BLOCKS.labels("reserved").set_function(lambda: receiver.num_reserved_blocks)
    BLOCKS.labels("quarantined").set_function(lambda: receiver.num_quarantined_blocks)
    BLOCKS.labels("used").set_function(
        lambda: pool.num_used - receiver.num_reserved_blocks - receiver.num_quarantined_blocks
    )


def watch_queue(num_queued_tokens: Callable[[], int], num_sequences: dict[tuple[str, str], Callable[[], int]]) -> None:
    """Read when scraped; `num_sequences` by (pool, state)."""
    QUEUED_TOKENS.set_function(num_queued_tokens)
    for labels, count in num_sequences.items():
        SEQUENCES.labels(*labels).set_function(count)
