from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from model.kv_cache import PagedKVCache
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


def test_latent_cache_is_one_vector_per_token() -> None:
    deepseek_v3 = KVLayout("x", "bfloat16", num_layers=61, num_kv_heads=1, head_dim=512 + 64, latent=True)
    assert deepseek_v3.token_bytes == 70_272
    assert deepseek_v3.layer_block_bytes == 16 * 576 * 2
    memory = PagedKVCache(replace(deepseek_v3, num_layers=2), 3, torch.device("cpu")).memory
    assert memory.shape == (2, 3, 1, 1, 16, 576)
    with pytest.raises(ValueError, match="num_kv_heads is 2; a latent cache knows no heads"):
        replace(deepseek_v3, num_kv_heads=2)


def test_fingerprint_of_keys_and_values_is_what_it_always_was() -> None:
    """Computed before there were latent caches: workers of both kinds of release agree."""
    assert LAYOUT.fingerprint == "018d81002d632ebe"


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_round_up(num_tokens: int, num_blocks: int) -> None:
    assert LAYOUT.num_blocks(num_tokens) == num_blocks


def changed(**values: Any) -> KVLayout:
    return replace(LAYOUT, **values)


ONE_HEAD = changed(num_kv_heads=1)


OTHERS: dict[str, Any] = {
    "model_digest": "other",
    "dtype": "float16",
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 65,
    "block_size": 32,
    "drafter": "eagle",
    "latent": True,
}


def test_every_field_counts_for_fingerprint_and_difference() -> None:
    assert set(OTHERS) == {field.name for field in fields(KVLayout)}
    same = replace(LAYOUT)
    assert same.fingerprint == LAYOUT.fingerprint
    assert LAYOUT.difference(same) is None
    prints = {LAYOUT.fingerprint}
    for name, value in OTHERS.items():
        mine = ONE_HEAD if name == "latent" else LAYOUT
        other = replace(mine, **{name: value})
        assert other.fingerprint != mine.fingerprint
        prints.add(other.fingerprint)
        assert mine.difference(other) == f"{name} is {value!r} there and {getattr(mine, name)!r} here"
    assert len(prints) == 1 + len(OTHERS)
    other = changed(drafter="eagle:1", num_layers=LAYOUT.num_layers + 1)  # what the layer is there for
    assert LAYOUT.difference(other) == f"drafter is 'eagle:1' there and {LAYOUT.drafter!r} here"


@pytest.mark.parametrize("block_size", [1, 4, 8, 32, 160])
def test_block_sizes_that_divide_each_other_are_no_obstacle(block_size: int) -> None:
    assert LAYOUT.obstacle(changed(block_size=block_size)) is None
    assert changed(block_size=block_size).obstacle(LAYOUT) is None


def test_whatever_else_differs_is_an_obstacle() -> None:
    assert LAYOUT.obstacle(LAYOUT) is None
    assert LAYOUT.obstacle(changed(block_size=24)) == "block_size is 24 there and 16 here: neither divides the other"
    for name in OTHERS.keys() - {"block_size"}:
        mine = ONE_HEAD if name == "latent" else LAYOUT
        other = replace(mine, **{name: OTHERS[name]})
        assert mine.obstacle(other) == mine.difference(other) is not None


def test_missing_draft_layers_are_named() -> None:
    without, drafting = changed(drafter=""), changed(drafter="eagle:1", num_layers=31)
    assert without.obstacle(drafting) == "the layers of drafter 'eagle:1' are there and not here"
    assert (
        drafting.obstacle(without, here="at P", there="at D") == "the layers of drafter 'eagle:1' are at P and not at D"
    )
    other = changed(drafter="model:2", num_layers=32)
    assert drafting.obstacle(other) == "drafter is 'model:2' there and 'eagle:1' here"


def test_limits() -> None:
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        replace(LAYOUT, dtype="int8")
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
            changed(**{name: 0})
