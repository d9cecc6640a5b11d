"""Which received KV a worker checks: as told, or as the speed of checking allows."""

from __future__ import annotations

import logging

import pytest
import torch

from deploy import verification as module
from deploy.verification import measure, verification
from kvtransfer.integrity import SAMPLED_SHARE
from model.block_sums import BlockSums
from model.kv_layout import KVLayout

LAYOUT = KVLayout("m", "float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)  # 128 bytes per token
SUMS = BlockSums(torch.zeros((2, 8, 1, 2, 4, 8)))


@pytest.mark.parametrize(
    ("mode", "bytes_per_s", "share"),
    [
        ("all", 1.0, 1.0),
        ("sample", 1e12, SAMPLED_SHARE),
        ("auto", 12.81e6, 1.0),  # 128,000 bytes in 10 ms
        ("auto", 12.79e6, SAMPLED_SHARE),
    ],
)
def test_share_of_blocks(
    mode: str,
    bytes_per_s: float,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "measure", lambda sums, num_blocks: bytes_per_s)
    with caplog.at_level(logging.INFO):
        chosen = verification(mode, SUMS, LAYOUT, 8)
    assert chosen is not None and chosen.share == share
    assert f"--verify-kv {mode}" in caplog.text and "GB/s" in caplog.text


def test_off_checks_nothing() -> None:
    assert verification("off", SUMS, LAYOUT, 8) is None


def test_rate_is_measured_over_blocks_that_were_written() -> None:
    memory = torch.ones((2, 8, 1, 2, 4, 8))
    assert measure(BlockSums(memory), 5) > 0
    assert not memory[:, :5].any() and memory[:, 5:].all()
