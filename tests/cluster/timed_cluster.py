"""Clusters of timed workers, slow enough to be hit at a known stage. Each of their tokens depends on every byte of KV
that was handed over: a block lost, stale or overwritten gives a wrong token.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local import ClusterConfig, LocalCluster
from model.kv_layout import KVLayout
from model.timed_runner import expected_tokens
from protos.client import PdserveClient
from protos.status_values import WorkerStatus
from protos.values import Sampling
from tests.cluster.asking import Answered, ask
from tests.cluster.tiny_model import EOS, VOCAB_SIZE, TinyModel

LAYOUT = KVLayout("", "float32", num_layers=3, num_kv_heads=2, head_dim=16)  # of the tiny model
TIMING = {"prefill_base_s": 0.02, "prefill_token_s": 0.0004, "decode_base_s": 0.015, "decode_sequence_s": 0.0002}
SHORT_LEASE = ("--lease-s", "2")


def timed_config(
    model: TinyModel,
    scratch: Path,
    *,
    timing: Mapping[str, float] = TIMING,
    arguments: Sequence[str] = SHORT_LEASE,
    num_prefill: int = 2,
    **options: Any,
) -> ClusterConfig:
    """Two decode workers; `arguments` are for every worker, `options` the other fields of the configuration."""
    path = scratch / "timing.json"
    path.write_text(json.dumps(timing))
    shared = ("--runner", "timed", "--timing", str(path), "--num-blocks", "1000", "--max-step-tokens", "128")
    return ClusterConfig(
        model=str(model.folder),
        num_prefill=num_prefill,
        num_decode=2,
        num_threads=1,
        worker_arguments=(*shared, *arguments),
        **options,
    )


def prompts(num: int, lengths: range, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice(lengths))] for _ in range(num)]


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, LAYOUT, vocab_size=VOCAB_SIZE, never_sampled=[EOS])


async def until(cluster: LocalCluster, worker_id: str, reached: Callable[[WorkerStatus], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached((await cluster.workers())[worker_id]):
            await asyncio.sleep(0.02)


async def busy_decode_worker(cluster: LocalCluster, num_running: int) -> str:
    """The first that runs so many sequences: which one is placement's choice."""
    async with asyncio.timeout(20):
        while True:
            for worker_id, worker in (await cluster.workers()).items():
                if worker_id.startswith("decode") and worker.num_running >= num_running:
                    return worker_id
            await asyncio.sleep(0.02)


async def ask_all(client: PdserveClient, asked: list[list[int]], num_tokens: int) -> list[asyncio.Task[Answered]]:
    sampling = Sampling(temperature=0, max_tokens=num_tokens)
    return [asyncio.create_task(ask(client, prompt, sampling)) for prompt in asked]
