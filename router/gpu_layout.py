"""How the GPUs of one worker share a model."""

from __future__ import annotations

from dataclasses import dataclass

from router.hardware import Hardware
from router.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """`shards_attention`: every GPU has a slice of each matrix (tensor parallel). Otherwise each holds attention and
    what else all tokens pass whole, and has sequences of its own (data parallel). Experts are spread in both."""

    num_gpus: int
    shards_attention: bool

    @property
    def num_slices(self) -> int:
        """Into which the weights that all tokens pass are cut."""
        return self.num_gpus if self.shards_attention else 1

    @property
    def num_lanes(self) -> int:
        """Prompts that are computed side by side, each by its share of the GPUs."""
        return 1 if self.shards_attention else self.num_gpus

    def num_kv_shares(self, shape: ModelShape) -> int:
        """GPUs whose memories add up to one KV cache. More slices than KV heads hold copies."""
        return min(self.num_gpus, shape.attention.num_kv_heads) if self.shards_attention else self.num_gpus

    def __str__(self) -> str:
        if self.num_gpus == 1:
            return "1 GPU"
        return f"{self.num_gpus} GPUs, {'tensor' if self.shards_attention else 'data'} parallel attention"


def possible_layouts(shape: ModelShape, hardware: Hardware) -> tuple[GpuLayout, ...]:
    """Powers of two, smallest first. One worker spans several domains only with experts to spread over them."""
    most = hardware.gpus_per_domain
    if shape.experts is not None:
        most = max(most, shape.experts.num_experts)
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return tuple(layout for size in sizes for layout in layouts_of(shape, hardware, size))


def layouts_of(shape: ModelShape, hardware: Hardware, num_gpus: int) -> tuple[GpuLayout, ...]:
    """None if the model cannot be shared by so many."""
    has_experts = shape.experts is not None
    if shape.experts is not None and num_gpus > shape.experts.num_experts:
        return ()
    layouts = []
    if num_gpus <= hardware.gpus_per_domain and shape.attention.num_heads % num_gpus == 0:
        layouts.append(GpuLayout(num_gpus, shards_attention=True))
    if has_experts and num_gpus > 1:
        layouts.append(GpuLayout(num_gpus, shards_attention=False))
    return tuple(layouts)
