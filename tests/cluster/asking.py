"""Asking a cluster and gathering what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deploy.local import LocalCluster
from protos.client import PdserveClient
from protos.values import Chunk, Sampling, Summary, TokenLogprobs, Usage

DEADLINE_S = 90.0


@dataclass(frozen=True)
class Answered:
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    usage: Usage


async def ask(
    client: PdserveClient,
    prompt: Sequence[int] | str,
    sampling: Sampling,
    *,
    at_token: int = -1,
    then: Callable[[], Awaitable[None]] | None = None,
) -> Answered:
    """The client itself checks that no token is missing or repeated. Does `then` once token `at_token` has come."""
    chunks: list[Chunk] = []
    async for part in client.generate(prompt, sampling=sampling, deadline_s=DEADLINE_S):
        if isinstance(part, Summary):
            return Answered(
                [token_id for chunk in chunks for token_id in chunk.token_ids],
                "".join(chunk.text for chunk in chunks),
                [logprobs for chunk in chunks for logprobs in chunk.logprobs],
                chunks[-1].finish_reason,
                part.usage,
            )
        chunks.append(part)
        if then is not None and part.output_index <= at_token < part.output_index + len(part.token_ids):
            await then()
    raise AssertionError("the client lets no answer end without a summary")


async def assert_at_rest(cluster: LocalCluster, *, within_s: float = 20.0) -> None:
    """No block is held on any worker, and nothing is queued or running.

    Blocks of a sender that was killed are in quarantine for seven seconds."""
    give_up_at = time.monotonic() + within_s
    while True:
        workers = (await cluster.workers()).values()
        left = {
            worker.worker_id: (
                worker.num_used_blocks,
                worker.queued_prefill_tokens,
                worker.num_waiting,
                worker.num_running,
            )
            for worker in workers
        }
        if all(counts == (0, 0, 0, 0) for counts in left.values()):
            return
        assert time.monotonic() < give_up_at, f"(used blocks, queued tokens, waiting, running) left: {left}"
        await asyncio.sleep(0.1)
