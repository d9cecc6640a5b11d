"""Geometry of the paged KV cache, without torch: what two workers must agree on before a byte moves.

Letters: L layers, N blocks, H KV heads, B tokens per block, D head size. The cache is one array [L, N, H, 2, B, D]: one
layer's part of one block is contiguous, and inside it so is every head (its keys, then its values), hence every
tensor-parallel slice. Blocks with consecutive ids are adjacent within a layer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and identity of a KV cache. `model_digest` stands for weights and tokenizer (see `model.checkpoint`)."""

    model_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    drafter: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; a KV cache holds one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer's part of one block: the unit of a transfer."""
        return self.num_kv_heads * 2 * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two caches can exchange blocks."""
        text = "|".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def difference(self, other: KVLayout, *, here: str = "here", there: str = "there") -> str | None:
        """A field in which `other` differs, in words; None if none does. Those that others follow from come first."""
        for name in ("model_digest", "drafter", *(field.name for field in fields(self))):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs!r} {there} and {mine!r} {here}"
        return None
