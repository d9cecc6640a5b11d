"""Geometry of the paged KV cache, without torch: what two workers must agree on before a byte moves.

Letters: L layers, N blocks, H KV heads, B tokens per block, D head size. The cache is one array [L, N, H, 2, B, D]: one
layer's part of one block is contiguous, and inside it so is every head (its keys, then its values), hence every
tensor-parallel slice. Blocks with consecutive ids are adjacent within a layer. A latent cache is [L, N, 1, 1, B, D].
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and identity of a KV cache. `model_digest` stands for weights and tokenizer (see `model.checkpoint`).

    `latent`: one vector per token instead of a key and a value per head, as multi-head latent attention (MLA) keeps.
    """

    model_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    drafter: str = ""
    latent: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; a KV cache holds one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.latent and self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; a latent cache knows no heads and counts as 1")

    @property
    def num_vectors(self) -> int:
        """Per token and head: a key and a value, or one latent."""
        return 1 if self.latent else 2

    @property
    def vector_bytes(self) -> int:
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer's part of one block: the unit of a transfer."""
        return self.num_kv_heads * self.num_vectors * self.block_size * self.vector_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two caches can exchange blocks. That of a cache of keys and values says nothing of
        `latent`, so that workers agree on it with those that know of no other."""
        names = [field.name for field in fields(self) if field.name != "latent" or self.latent]
        text = "|".join(f"{name}={getattr(self, name)}" for name in names)
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

    def obstacle(self, other: KVLayout, *, here: str = "here", there: str = "there") -> str | None:
        """Why KV in this layout cannot be moved into `other`, in words; None if it can.

        Block sizes may differ where one divides the other. Blocks as they are need the same `fingerprint`.
        """
        if self.model_digest == other.model_digest and bool(self.drafter) != bool(other.drafter):
            has, lacks = (here, there) if self.drafter else (there, here)
            return f"the layers of drafter {self.drafter or other.drafter!r} are {has} and not {lacks}"
        alike = replace(self, block_size=other.block_size)
        if (difference := alike.difference(other, here=here, there=there)) is not None:
            return difference
        mine, theirs = self.block_size, other.block_size
        if max(mine, theirs) % min(mine, theirs):
            return f"block_size is {theirs} {there} and {mine} {here}: neither divides the other"
        return None
