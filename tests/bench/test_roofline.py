"""Bytes of a step, counted from the model that transformers made."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.roofline import WeightBytes
from tests.model.tiny_models import build


def test_dense_without_the_embedding(tmp_path: Path) -> None:
    sizes = {name: tensor.nbytes for name, tensor in build("llama", tmp_path).named_parameters()}
    weights = WeightBytes.of(tmp_path)
    assert weights.per_step(None) == sum(sizes.values()) - sizes["model.embed_tokens.weight"]


def test_embedding_that_is_the_head_counts(tmp_path: Path) -> None:
    sizes = {name: tensor.nbytes for name, tensor in build("qwen2", tmp_path).named_parameters()}
    assert WeightBytes.of(tmp_path).per_step(None) == sum(sizes.values())


def test_experts_count_by_how_many_are_touched(tmp_path: Path) -> None:
    model = build("mixtral", tmp_path)
    total = sum(tensor.nbytes for tensor in model.parameters()) - model.get_input_embeddings().weight.nbytes
    hidden, inner, layers = 36, 52, 2
    expert = 3 * hidden * inner * layers * 4  # w1, w2, w3 in float32
    weights = WeightBytes.of(tmp_path)
    assert weights.per_step(5.0) == pytest.approx(total)
    assert weights.per_step(2.0) == pytest.approx(total - 3 * expert)
