"""Copies in huge pages: equal, aligned, and shared where the originals are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import huge_pages, torch_runner
from model.torch_runner import TorchRunner
from tests.model.tiny_models import build


def test_copies_are_equal_and_aligned() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.arange(11, dtype=torch.int32),
        "empty": torch.zeros(0, 4),
    }
    copies = huge_pages.copied(tensors)
    assert list(copies) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert (copies[name].dtype, copies[name].shape) == (tensor.dtype, tensor.shape)
        assert copies[name].data_ptr() % 64 == 0
        assert copies[name].data_ptr() != tensor.data_ptr() or not tensor.nbytes
    tensors["a"].zero_()
    assert copies["a"].abs().sum() > 0
    copies["c"].fill_(-1)
    assert torch.equal(copies["b"], tensors["b"])  # they do not overlap


def test_tensors_that_share_memory_share_their_copy() -> None:
    embedding = torch.randn(6, 4)
    copies = huge_pages.copied({"embedding": embedding, "other": torch.ones(3), "head": embedding})
    assert copies["head"].data_ptr() == copies["embedding"].data_ptr()
    assert torch.equal(copies["head"], embedding)


def test_arena_hands_out_memory_that_does_not_overlap() -> None:
    arena = huge_pages.Arena(4096)
    tensors = [torch.randn(rows, 5) for rows in (1, 30, 0, 700_000, 3)]  # within a piece, and larger than one
    copies = [arena.copied(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0 or not copy.nbytes


def test_nothing_to_copy() -> None:
    assert huge_pages.copied({}) == {}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_weights_are_copied_only_if_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    build("llama", tmp_path)
    copied: list[int] = []
    monkeypatch.setattr(torch_runner, "_COPIED_SHARE", share)

    def remember(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copied.append(len(tensors))
        return tensors

    monkeypatch.setattr(huge_pages, "copied", remember)
    TorchRunner.load(tmp_path, num_blocks=20)
    assert bool(copied) is (share == 1.0)
