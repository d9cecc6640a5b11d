"""Whether a worker checks the KV it receives, and how much of it: as told, or as the speed of checking allows."""

from __future__ import annotations

import logging
import time

from kvtransfer.integrity import SAMPLED_SHARE, Verification
from model.block_sums import BlockSums
from model.kv_layout import KVLayout

logger = logging.getLogger(__name__)

MOST_S = 0.01  # for a prompt of so many tokens: as long as it may take to check all of it
NUM_TOKENS = 1000
_NUM_BLOCKS, _NUM_TRIALS = 64, 3


def verification(mode: str, sums: BlockSums, layout: KVLayout, num_blocks: int) -> Verification | None:
    """For --verify-kv `all`, `sample`, `off` or `auto`. Clears blocks of the cache: before there is anything in it."""
    if mode == "off":
        logger.info("received KV is not checked (--verify-kv off)")
        return None
    bytes_per_s = measure(sums, min(num_blocks, _NUM_BLOCKS))
    check_s = NUM_TOKENS * layout.token_bytes / bytes_per_s
    share = 1.0 if mode == "all" or (mode == "auto" and check_s <= MOST_S) else SAMPLED_SHARE
    logger.info(
        "received KV is checked: %s (--verify-kv %s); at %.1f GB/s, %d tokens take %.1f ms",
        "every block" if share == 1 else f"1 block in {1 / SAMPLED_SHARE:.0f}",
        mode,
        bytes_per_s / 1e9,
        NUM_TOKENS,
        check_s * 1e3,
    )
    return Verification(sums, share)


def measure(sums: BlockSums, num_blocks: int) -> float:
    """Bytes per second, the best of some trials."""
    sums.clear(num_blocks)  # memory that was never written takes less time to read
    best_s = float("inf")
    for _ in range(_NUM_TRIALS):
        started = time.perf_counter()
        running = sums.start(num_blocks)
        running.add(sums.layers, range(num_blocks), range(num_blocks))
        running.values()
        best_s = min(best_s, time.perf_counter() - started)
    return num_blocks * sums.block_bytes / best_s
