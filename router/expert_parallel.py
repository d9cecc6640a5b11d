"""Experts over GPUs: which GPU has which, what tokens are sent to them and back, and how long that takes.

The volume is that of plain dispatch and combine: every choice of a token is a copy of its hidden state, there and back.
"""

from __future__ import annotations

from router.figure import Figure, figure
from router.gpu_layout import GpuLayout
from router.hardware import Hardware
from router.model_shape import ExpertShape, ModelShape
from router.precision import SIXTEEN_BITS

EFFICIENT_TOKENS_PER_EXPERT = 64  # below, an expert's matrices are read for too few tokens to keep a GPU busy


def num_expert_slots(experts: ExpertShape, layout: GpuLayout) -> int:
    """Experts of a layer that one GPU holds."""
    return -(-experts.num_experts // layout.num_gpus)


def placement(experts: ExpertShape, layout: GpuLayout, hardware: Hardware) -> tuple[tuple[int, range, range], ...]:
    """Per domain: its number, its GPUs and the experts they hold, in order."""
    slots, size = num_expert_slots(experts, layout), hardware.gpus_per_domain
    placed = []
    for number, first in enumerate(range(0, layout.num_gpus, size)):
        gpus = range(first, min(first + size, layout.num_gpus))
        placed.append((number, gpus, range(gpus.start * slots, min(gpus.stop * slots, experts.num_experts))))
    return tuple(placed)


def touched_experts(experts: ExpertShape, num_sequences: float, num_rows: int = 1, beta: float = 1.0) -> Figure:
    """Experts of a layer that a step reads. Rows of one sequence choose alike, and count as rows^beta."""
    return figure(
        "experts touched per layer",
        "",
        "experts * (1 - (1 - chosen / experts) ** (sequences * rows ** beta))",
        experts=experts.num_experts,
        chosen=experts.num_chosen,
        sequences=num_sequences,
        rows=num_rows,
        beta=beta,
    )


def tokens_per_expert(experts: ExpertShape, num_tokens: float) -> Figure:
    return figure(
        "tokens per expert",
        "",
        "tokens * chosen / experts",
        tokens=num_tokens,
        chosen=experts.num_chosen,
        experts=experts.num_experts,
    )


def tokens_for_efficiency(experts: ExpertShape) -> Figure:
    """How many tokens a step must have so that experts get enough."""
    return figure(
        "tokens that keep experts busy",
        "",
        "ceil(per_expert * experts / chosen)",
        per_expert=EFFICIENT_TOKENS_PER_EXPERT,
        experts=experts.num_experts,
        chosen=experts.num_chosen,
    )


def all_to_all_bytes(experts: ExpertShape, hidden_size: int, num_tokens: float) -> Figure:
    """Of one layer: dispatch and combine."""
    return figure(
        "all-to-all per layer",
        "B",
        "2 * tokens * chosen * hidden * bytes",
        tokens=num_tokens,
        chosen=experts.num_chosen,
        hidden=hidden_size,
        bytes=SIXTEEN_BITS,
    )


def share_within_domain(layout: GpuLayout, hardware: Hardware) -> Figure:
    """Of what all GPUs send, with experts chosen evenly: to others of the same domain."""
    return figure(
        "share sent inside the domain",
        "",
        "(min(gpus, domain) - 1) / gpus",
        gpus=layout.num_gpus,
        domain=hardware.gpus_per_domain,
    )


def share_across_domains(layout: GpuLayout, hardware: Hardware) -> Figure:
    return figure(
        "share sent to other domains",
        "",
        "max(0, gpus - domain) / gpus",
        gpus=layout.num_gpus,
        domain=hardware.gpus_per_domain,
    )


def all_to_all_s(shape: ModelShape, layout: GpuLayout, hardware: Hardware, num_tokens: float) -> tuple[Figure, ...]:
    """How it comes about, and last the time of all layers together. Both kinds of link work at once."""
    assert shape.experts is not None
    volume = all_to_all_bytes(shape.experts, shape.hidden_size, num_tokens)
    within, across = share_within_domain(layout, hardware), share_across_domains(layout, hardware)
    inside = figure(
        "all-to-all inside the domain",
        "s",
        "2 * start + volume / gpus * within / link",
        start=hardware.collective_s,
        volume=volume,
        gpus=layout.num_gpus,
        within=within,
        link=hardware.domain_bytes_per_s,
    )
    if across.value == 0:
        times: tuple[Figure, ...] = (inside,)
        total = figure("all-to-all", "s", "layers * inside", layers=shape.experts.num_layers, inside=inside)
    else:
        outside = figure(
            "all-to-all across domains",
            "s",
            "2 * start + volume / gpus * across / link",
            start=hardware.network_collective_s,
            volume=volume,
            gpus=layout.num_gpus,
            across=across,
            link=hardware.network_bytes_per_s,
        )
        times = (inside, outside)
        total = figure(
            "all-to-all",
            "s",
            "layers * max(inside, outside)",
            layers=shape.experts.num_layers,
            inside=inside,
            outside=outside,
        )
    return (volume, within, across, *times, total)
