"""In what form a worker sends and takes KV: as its operator says, or the start fails and says why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from deploy.runners import load_runner
from deploy.wire import packing_for, unpacking_for
from kvtransfer.agent import TransferAgent
from model.kv_layout import KVLayout
from model.runner import ModelRunner
from model.timed_runner import StepTiming, TimedRunner
from tests.deploy.test_runners import config

LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=3, head_dim=64)


class Runner:
    """A cache of its layout, and no model."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        shape = (layout.num_layers, 4, layout.num_kv_heads, 2, layout.block_size, layout.head_dim)
        self.layout, self.cache_memory = layout, torch.zeros(shape, dtype=getattr(torch, layout.dtype))


class Agent:
    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def register(self, address: int, num_bytes: int) -> None:
        self.registered.append((address, num_bytes))


def packing(mode: str, layout: KVLayout, agent: Agent) -> Any:
    return packing_for(mode, cast(ModelRunner, Runner(layout)), cast(TransferAgent, agent))


def test_as_is_takes_no_memory() -> None:
    agent = Agent()
    assert packing("as-is", LAYOUT, agent) is None
    assert not agent.registered


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_what_is_written_from_is_registered_and_told(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent()
    with caplog.at_level(logging.INFO):
        made = packing(mode, LAYOUT, agent)
    assert made.coding == mode
    assert agent.registered == [(made.address, made.num_bytes)]
    assert 63 << 20 < made.num_bytes <= 64 << 20
    assert f"KV is sent as {mode}: 6176 bytes for 12288, through 63 MiB of memory (--wire-kv)" in caplog.text


def test_what_would_save_nothing_is_refused() -> None:
    layout = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=3, head_dim=4, block_size=1)
    with pytest.raises(ValueError, match="--wire-kv int8 saves nothing: of a block, each layer takes 48 bytes packed"):
        packing("int8", layout, Agent())


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_timed_worker_sends_exact_words(tiny_model: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=f"--wire-kv {mode} needs --runner torch: timed workers check every bit"):
        load_runner(config(tiny_model, runner="timed", num_blocks=100, wire_kv=mode), tiny_model)


def test_timed_worker_takes_exact_words_alone() -> None:
    assert unpacking_for(TimedRunner(LAYOUT, 4, StepTiming(), vocab_size=100)) is None
    unpacking = unpacking_for(cast(ModelRunner, Runner()))
    assert unpacking is not None and unpacking.codings == ("int8", "fp8")
