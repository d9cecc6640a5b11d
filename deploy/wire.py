"""In what form a worker sends KV, and takes it: as it is, or in eight bits per value."""

from __future__ import annotations

import logging

from kvtransfer.agent import TransferAgent
from kvtransfer.coding import codings
from kvtransfer.eight_bit import Coding, EightBit
from kvtransfer.packing import Packing
from kvtransfer.ticket import AS_IS
from kvtransfer.unpacking import Unpacking
from model.runner import ModelRunner
from model.timed_runner import TimedRunner

logger = logging.getLogger(__name__)


def packing_for(mode: str, runner: ModelRunner, agent: TransferAgent) -> Packing | None:
    """For --wire-kv `as-is`, `int8` or `fp8`. Its memory is registered with the agent.

    Raises ValueError if the cache's blocks would not become smaller."""
    if mode == AS_IS:
        return None
    layout = runner.layout
    codec = EightBit(layout, Coding(mode))
    if mode not in codings(layout):
        raise ValueError(
            f"--wire-kv {mode} saves nothing: of a block, each layer takes {codec.packed_bytes} bytes packed and "
            f"{layout.layer_block_bytes} as it is; leave it out, or raise --block-size"
        )
    packing = Packing(codec, runner.cache_memory)
    agent.register(packing.address, packing.num_bytes)
    logger.info(
        "KV is sent as %s: %d bytes for %d, through %d MiB of memory (--wire-kv)",
        mode,
        codec.packed_bytes,
        layout.layer_block_bytes,
        packing.num_bytes >> 20,
    )
    return packing


def unpacking_for(runner: ModelRunner) -> Unpacking | None:
    """None for a timed worker, whose KV are no numbers."""
    return None if isinstance(runner, TimedRunner) else Unpacking(runner.layout, runner.cache_memory)
