from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from model.kv_layout import KVLayout

LAYOUT = KVLayout("digest", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, drafter="none")


def test_bytes_are_those_of_the_array() -> None:
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        layout = replace(LAYOUT, dtype=dtype)
        cache = np.lib.stride_tricks.as_strided(np.zeros(1), (30, 5, 3, 2, 16, 64), (0,) * 6)
        assert layout.block_bytes == cache[:, 0].size * itemsize
        assert layout.layer_block_bytes == cache[0, 0].size * itemsize
        assert layout.token_bytes == cache[:, 0, :, :, 0].size * itemsize
    assert LAYOUT.token_bytes == 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, size, bytes


def test_llama_3_70b_takes_320_kib_a_token() -> None:
    assert KVLayout("x", "bfloat16", num_layers=80, num_kv_heads=8, head_dim=128).token_bytes == 327_680


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_round_up(num_tokens: int, num_blocks: int) -> None:
    assert LAYOUT.num_blocks(num_tokens) == num_blocks


def changed(**values: Any) -> KVLayout:
    return replace(LAYOUT, **values)


OTHERS: dict[str, Any] = {
    "model_digest": "other",
    "dtype": "float16",
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 65,
    "block_size": 32,
    "drafter": "eagle",
}


def test_every_field_counts_for_fingerprint_and_difference() -> None:
    assert set(OTHERS) == {field.name for field in fields(KVLayout)}
    same = replace(LAYOUT)
    assert same.fingerprint == LAYOUT.fingerprint
    assert LAYOUT.difference(same) is None
    prints = {LAYOUT.fingerprint}
    for name, value in OTHERS.items():
        other = changed(**{name: value})
        prints.add(other.fingerprint)
        assert LAYOUT.difference(other) == f"{name} is {value!r} there and {getattr(LAYOUT, name)!r} here"
    assert len(prints) == 1 + len(OTHERS)
    other = changed(drafter="eagle:1", num_layers=LAYOUT.num_layers + 1)  # what the layer is there for
    assert LAYOUT.difference(other) == f"drafter is 'eagle:1' there and {LAYOUT.drafter!r} here"


def test_limits() -> None:
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        replace(LAYOUT, dtype="int8")
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            changed(**{name: 0})
