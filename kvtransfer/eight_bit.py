"""KV in eight bits for the wire: half the bytes of bfloat16, and a scale for each head's keys and values of a block.

Letters as in `model.kv_layout`, V vectors (keys, values) per token and head. A packed block is one layer's part of one
block: the scales [H, V] in float32, the codes [H, V, B, D], and zeros up to a multiple of 16 bytes. A value is code
times scale. Keys or values that hold a NaN or an infinity are NaN throughout once unpacked: who decodes from them
notices, as it would have noticed before. In host memory the C kernels do it where they can run, else torch does.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.block_codes import BlockCodes, kernels
from model.kv_layout import KVLayout

ALIGNMENT = 16
_SCALE_BYTES = 4
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # no value is divided by less; what is far below it becomes 0
_LARGEST = torch.finfo(torch.float32).max * (1 - 2**-22)  # code times scale would else be infinite by rounding
_FLOAT16_BITS = ~0x7FFF | 0x3F80  # the sign, four bits of five of the exponent, and three of ten of the fraction
_FLOAT16_SCALE = 256.0  # exponents count from 15 there and from 7 in e4m3


class Coding(enum.Enum):
    """INT8: an even step, of 1/127 of the largest value. FP8: e4m3, a step of at most 1/8 of each value itself."""

    INT8 = "int8"
    FP8 = "fp8"

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self is Coding.INT8 else torch.float8_e4m3fn

    @property
    def largest_code(self) -> float:
        return 127.0 if self is Coding.INT8 else 448.0


@dataclass(frozen=True, slots=True)
class EightBit:
    """Packs and unpacks blocks of caches of one layout, a layer at a time, on whatever device they are."""

    layout: KVLayout
    coding: Coding

    @property
    def packed_bytes(self) -> int:
        """Of one packed block."""
        num_bytes = self._num_scales * (_SCALE_BYTES + self.layout.block_size * self.layout.head_dim)
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT

    def pack(self, layer: Tensor, block_ids: Sequence[int], num_tokens: int, packed: Tensor) -> None:
        """The KV of `num_tokens` tokens from these blocks of a layer [N, H, V, B, D] into `packed`, uint8
        [blocks, packed bytes] and contiguous. Slots behind the last token become 0.

        Raises:
            ValueError: so many tokens do not end in the last block, or `packed` is of another shape or kind.
        """
        if len(block_ids) != self.layout.num_blocks(num_tokens):
            raise ValueError(f"{len(block_ids)} blocks for {num_tokens} tokens of {self.layout.block_size} a block")
        self._check(layer, packed, block_ids)
        if not block_ids:
            return
        num_last_tokens = num_tokens - (len(block_ids) - 1) * self.layout.block_size
        if (compiled := self._kernels(layer)) is not None:
            compiled.pack(layer, block_ids, num_last_tokens, packed)
            return
        blocks = layer.index_select(0, torch.tensor(block_ids, device=layer.device))
        blocks[-1, :, :, num_last_tokens:] = 0
        largest = blocks.flatten(-2).abs().amax(-1).float()  # [blocks, H, V]; NaN where there is one
        largest.masked_fill_(largest.isinf(), torch.nan)
        scales = (largest / self.coding.largest_code).clamp(_SMALLEST_SCALE, _LARGEST / self.coding.largest_code)
        codes = blocks / scales[..., None, None]  # float32
        if self.coding is Coding.INT8:
            codes.round_()
        packed_scales, packed_codes = self._views(packed)
        packed_scales.copy_(scales)
        packed_codes.copy_(codes)
        packed[:, self._end_of_codes :] = 0

    def unpack(self, packed: Tensor, layer: Tensor, block_ids: Sequence[int]) -> None:
        """Packed blocks into these whole blocks of a layer [N, H, V, B, D], in its dtype."""
        self._check(layer, packed, block_ids)
        if not block_ids:
            return
        if (compiled := self._kernels(layer)) is not None:
            compiled.unpack(packed, layer, block_ids)
            return
        scales, codes = self._views(packed)
        if self.coding is Coding.FP8:
            codes, scales = _as_float16(codes), scales * _FLOAT16_SCALE
        first, is_run = block_ids[0], list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))
        blocks = layer[first : first + len(block_ids)] if is_run else layer.new_empty(codes.shape)
        torch.mul(codes, scales[..., None, None], out=blocks)
        if not is_run:
            layer[torch.tensor(block_ids, device=layer.device)] = blocks

    def _kernels(self, layer: Tensor) -> BlockCodes | None:
        """None where torch has to do it."""
        if layer.device.type != "cpu" or not layer.is_contiguous() or (found := kernels()) is None:
            return None
        return BlockCodes(found, self.coding is Coding.FP8, _SMALLEST_SCALE, _LARGEST / self.coding.largest_code)

    @property
    def _num_scales(self) -> int:
        return self.layout.num_kv_heads * self.layout.num_vectors

    @property
    def _end_of_codes(self) -> int:
        return self._num_scales * (_SCALE_BYTES + self.layout.block_size * self.layout.head_dim)

    def _views(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [blocks, H, V] and codes [blocks, H, V, B, D], where they lie."""
        layout, start = self.layout, self._num_scales * _SCALE_BYTES
        heads = (layout.num_kv_heads, layout.num_vectors)
        scales = packed[:, :start].view(torch.float32).unflatten(1, heads)
        codes = packed[:, start : self._end_of_codes].view(self.coding.dtype)
        return scales, codes.unflatten(1, (*heads, layout.block_size, layout.head_dim))

    def _check(self, layer: Tensor, packed: Tensor, block_ids: Sequence[int]) -> None:
        layout, num_blocks = self.layout, len(block_ids)
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < len(layer):
            raise ValueError(f"blocks {min(block_ids)} to {max(block_ids)} of {len(layer)}")
        of_a_block = (layout.num_kv_heads, layout.num_vectors, layout.block_size, layout.head_dim)
        if layer.shape[1:] != of_a_block or layer.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"the layer is {list(layer.shape)} {layer.dtype}; its blocks must be {list(of_a_block)}")
        if packed.dtype != torch.uint8 or packed.shape != (num_blocks, self.packed_bytes) or not packed.is_contiguous():
            raise ValueError(
                f"packed is {list(packed.shape)} {packed.dtype}; it must be {[num_blocks, self.packed_bytes]} uint8, "
                "contiguous"
            )


def _as_float16(codes: Tensor) -> Tensor:
    """e4m3 by its bits, over _FLOAT16_SCALE: both have a sign, then the exponent, then the fraction. On a CPU five
    times as fast as torch's own conversion, which goes number by number. NaN is lost."""
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(_FLOAT16_BITS).view(torch.float16)
