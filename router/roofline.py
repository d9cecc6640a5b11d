"""How long a step takes at best: what it computes over what the GPUs compute, what it reads over what they read, and
what they send one another. A stated share of the published peaks is reached, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.expert_parallel import all_to_all_s, num_expert_slots, touched_experts
from router.figure import Figure, figure
from router.gpu_layout import GpuLayout
from router.hardware import Hardware
from router.memory_plan import Holding
from router.model_shape import ModelShape
from router.precision import SIXTEEN_BITS

COVERAGE_BETA = 0.75  # how far tokens that follow one another choose experts of their own; fits published measurements


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks: of arithmetic in steps of prefill and of decode, and of memory bandwidth."""

    prefill: float
    decode: float
    memory: float


DENSE_EFFICIENCY = Efficiency(prefill=0.5, decode=0.5, memory=0.7)
EXPERT_EFFICIENCY = Efficiency(prefill=0.25, decode=0.5, memory=0.7)  # prefill: experts are not chosen evenly


def usual_efficiency(shape: ModelShape) -> Efficiency:
    return EXPERT_EFFICIENCY if shape.experts else DENSE_EFFICIENCY


@dataclass(frozen=True, slots=True)
class StepTime:
    """The last figure is the step's time; those before it are how it comes about."""

    figures: tuple[Figure, ...]

    @property
    def total(self) -> Figure:
        return self.figures[-1]

    @property
    def seconds(self) -> float:
        return self.total.value


@dataclass(frozen=True, slots=True)
class Roofline:
    """Of one worker."""

    holding: Holding
    layout: GpuLayout
    hardware: Hardware
    efficiency: Efficiency
    _decode_s: dict[tuple[float, float, int], float] = field(default_factory=dict, compare=False, repr=False)

    def prefill(self, num_tokens: float, num_cached_tokens: float = 0.0) -> StepTime:
        """Of prompts side by side, one in each lane. The output head is for the last token only, and not counted."""
        num_prompts = self.layout.num_lanes
        weights, attention = self._prefill_flops(num_prompts, num_tokens, num_cached_tokens)
        compute = self._compute_s("prefill", weights, attention, self.efficiency.prefill)
        touched, read = self._weights_read(num_prompts * num_tokens, 1)
        reading = figure(
            "prefill, weights read",
            "s",
            "read / (bandwidth * efficiency)",
            read=read,
            bandwidth=self.hardware.memory_bytes_per_s,
            efficiency=self.efficiency.memory,
        )
        joined = self._joined("prefill", compute, reading, num_prompts * num_tokens, overlaps=True)
        return StepTime((weights, attention, compute, *touched, read, reading, *joined))

    def decode(self, num_sequences: float, num_context_tokens: float, num_rows: int = 1) -> StepTime:
        """Of a batch with so much context each. `num_rows`: tokens of a sequence, the drafts that are verified too."""
        shape = self.holding.shape
        weights = figure(
            "decode, work of weights",
            "FLOP",
            "2 * active * sequences * rows",
            active=shape.active_weights,
            sequences=num_sequences,
            rows=num_rows,
        )
        attention = figure(
            "decode, work of attention",
            "FLOP",
            "pair * sequences * rows * (full_layers * context + window_layers * min(context, window))",
            pair=shape.attention.decode_flops,
            sequences=num_sequences,
            rows=num_rows,
            full_layers=shape.num_full_layers,
            context=num_context_tokens,
            window_layers=shape.attention.num_windowed_layers,
            window=shape.attention.window,
        )
        compute = self._compute_s("decode", weights, attention, self.efficiency.decode)
        touched, read = self._weights_read(num_sequences, num_rows)
        kv = shape.kv_bytes("KV of a sequence", num_context_tokens, self.holding.bytes_per_kv_value)
        reading = figure(
            "decode, weights and KV read",
            "s",
            "(weights + sequences * kv / shares) / (bandwidth * efficiency)",
            weights=read,
            sequences=num_sequences,
            kv=kv,
            shares=self.layout.num_kv_shares(shape),
            bandwidth=self.hardware.memory_bytes_per_s,
            efficiency=self.efficiency.memory,
        )
        joined = self._joined("decode", compute, reading, num_sequences * num_rows, overlaps=False)
        return StepTime((weights, attention, compute, *touched, read, kv, reading, *joined))

    def decode_s(self, num_sequences: float, num_context_tokens: float, num_rows: int = 1) -> float:
        """The same, remembered: sizes are searched for."""
        key = (num_sequences, num_context_tokens, num_rows)
        if key not in self._decode_s:
            self._decode_s[key] = self.decode(*key).seconds
        return self._decode_s[key]

    def _prefill_flops(self, num_prompts: int, num_tokens: float, num_cached_tokens: float) -> tuple[Figure, Figure]:
        shape = self.holding.shape
        weights = figure(
            "prefill, work of weights",
            "FLOP",
            "2 * active_in_layers * prompts * tokens",
            active_in_layers=shape.num_layer_weights,
            prompts=num_prompts,
            tokens=num_tokens,
        )
        attention = figure(
            "prefill, work of attention",
            "FLOP",
            "pair * prompts * tokens * (full_layers * (cached + tokens / 2)"
            " + window_layers * min(cached + tokens / 2, window))",
            pair=shape.attention.prefill_flops,
            prompts=num_prompts,
            tokens=num_tokens,
            full_layers=shape.num_full_layers,
            cached=num_cached_tokens,
            window_layers=shape.attention.num_windowed_layers,
            window=shape.attention.window,
        )
        return weights, attention

    def _compute_s(self, what: str, weights: Figure, attention: Figure, efficiency: float) -> Figure:
        """Attention is computed in 16 bits, whatever the weights are in."""
        return figure(
            f"{what}, arithmetic",
            "s",
            "(weights / peak + attention / peak_16) / (gpus * efficiency)",
            weights=weights,
            peak=self.holding.weights.flops(self.hardware),
            attention=attention,
            peak_16=self.hardware.bf16_flops,
            gpus=self.layout.num_gpus,
            efficiency=efficiency,
        )

    def _weights_read(self, num_sequences: float, num_rows: int) -> tuple[tuple[Figure, ...], Figure]:
        """By one GPU in one step: of the experts only those that are touched."""
        shape, weights = self.holding.shape, self.holding.weights
        formula = "(common * bytes + head * bytes_16) / slices"
        given: dict[str, float | Figure] = {
            "common": shape.num_common_weights,
            "bytes": weights.bytes_per_weight,
            "head": shape.num_embedding_weights,
            "bytes_16": SIXTEEN_BITS,
            "slices": self.layout.num_slices,
        }
        if shape.experts is None:
            return (), figure("weights read per GPU", "B", formula, **given)
        touched = touched_experts(shape.experts, num_sequences, num_rows, COVERAGE_BETA)
        formula += " + min(slots, touched / gpus) * expert_layers * expert * expert_bytes"
        read = figure(
            "weights read per GPU",
            "B",
            formula,
            slots=num_expert_slots(shape.experts, self.layout),
            touched=touched,
            gpus=self.layout.num_gpus,
            expert_layers=shape.experts.num_layers,
            expert=shape.experts.num_weights,
            expert_bytes=weights.bytes_per_expert_weight,
            **given,
        )
        return (touched,), read

    def _joined(
        self, what: str, compute: Figure, reading: Figure, num_tokens: float, *, overlaps: bool
    ) -> tuple[Figure, ...]:
        """`overlaps`: the all-to-all goes on behind the arithmetic, as steps in two halves have it."""
        parts: list[Figure] = []
        formula = "max(arithmetic, reading)"
        given: dict[str, float | Figure] = {"arithmetic": compute, "reading": reading}
        if self.layout.num_gpus > 1 and self.holding.shape.experts is not None:
            parts += all_to_all_s(self.holding.shape, self.layout, self.hardware, num_tokens)
            given["all_to_all"] = parts[-1]
            joined = "max(arithmetic, reading, all_to_all)"
            formula = joined if overlaps else f"{formula} + all_to_all"
        if self.layout.num_gpus > 1 and self.layout.shards_attention:
            parts.append(self._all_reduce_s(num_tokens))
            given["all_reduce"] = parts[-1]
            formula += " + all_reduce"
        return (*parts, figure(f"{what} step", "s", formula, **given))

    def _all_reduce_s(self, num_tokens: float) -> Figure:
        """After attention and after each feed-forward net that is cut into slices."""
        shape = self.holding.shape
        return figure(
            "all-reduce",
            "s",
            "(layers + dense_layers) * (start + 2 * (gpus - 1) / gpus * tokens * hidden * bytes / link)",
            layers=shape.num_layers,
            dense_layers=shape.num_dense_layers,
            start=self.hardware.collective_s,
            gpus=self.layout.num_gpus,
            tokens=num_tokens,
            hidden=shape.hidden_size,
            bytes=SIXTEEN_BITS,
            link=self.hardware.domain_bytes_per_s,
        )
