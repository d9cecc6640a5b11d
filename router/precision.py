"""How many bytes a weight, a cached value and a value on the wire take."""

from __future__ import annotations

from dataclasses import dataclass

from protos.errors import InvalidArgument
from router.hardware import Hardware


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Embeddings, output head, norms and gates stay in 16 bits in all of them."""

    name: str
    bytes_per_weight: float  # of attention and of feed-forward nets that every token passes
    bytes_per_expert_weight: float

    def flops(self, hardware: Hardware) -> float:
        """What the GPU computes with them, at its peak.

        Raises:
            InvalidArgument: it cannot.
        """
        if self.name not in ("fp8", "int8"):
            return hardware.bf16_flops
        flops = hardware.fp8_flops if self.name == "fp8" else hardware.int8_flops
        if not flops:
            others = [name for name in ("fp8", "int8") if name != self.name]
            raise InvalidArgument(
                f"weights in {self.name}: {hardware.name} computes none; {' or '.join(others)} or bf16", field="weights"
            )
        return flops


WEIGHT_FORMATS = {
    "bf16": WeightFormat("bf16", 2, 2),
    "fp8": WeightFormat("fp8", 1, 1),
    "int8": WeightFormat("int8", 1, 1),
    "mxfp4": WeightFormat("mxfp4", 2, 17 / 32),  # experts: 4 bits, and 8 of scale for every 32; computed in bf16
}
SIXTEEN_BITS = 2  # bytes: embeddings, head, norms, gates; activations between GPUs
KV_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}  # in the cache: scales of whole heads or tensors weigh nothing
_SCALE_BYTES = 4


def wire_bytes_per_value(coding: str, cached: float, block_size: int, head_dim: int) -> float:
    """Of one value of the cache. In 8 bits a scale goes along for each head's keys or values of a block, as
    `kvtransfer.eight_bit` packs them."""
    if coding == "bf16" or cached == 1:
        return cached
    return 1 + _SCALE_BYTES / (block_size * head_dim)
