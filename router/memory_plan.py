"""What one GPU of a worker holds: weights, a draft model's weights, and the KV cache that is left room for."""

from __future__ import annotations

from dataclasses import dataclass

from router.expert_parallel import num_expert_slots
from router.figure import Figure, figure
from router.gpu_layout import GpuLayout
from router.hardware import Hardware
from router.model_shape import ModelShape
from router.precision import SIXTEEN_BITS, WeightFormat

MEMORY_SHARE = 0.9  # the rest is for activations, communication buffers and captured graphs


@dataclass(frozen=True, slots=True)
class Holding:
    """A model as a worker has it. A draft model is cut as the model is that it drafts for."""

    shape: ModelShape
    weights: WeightFormat
    bytes_per_kv_value: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`kv`: per GPU; negative if the weights alone are too many. `pool`: of the worker, copies counted once."""

    weights: Figure
    draft: Figure | None
    kv: Figure
    pool: Figure
    token: Figure  # KV of one token, the draft model's included

    @property
    def fits(self) -> bool:
        return self.kv.value > 0

    @property
    def tokens(self) -> Figure:
        return figure("KV tokens of the worker", "", "floor(pool / token)", pool=self.pool, token=self.token)

    @property
    def figures(self) -> tuple[Figure, ...]:
        held = (self.weights,) if self.draft is None else (self.weights, self.draft)
        return (*held, self.kv, self.pool, self.token, self.tokens)

    def sequence(self, name: str, holdings: tuple[Holding, ...], num_tokens: float) -> Figure:
        """KV of one sequence, in all of these models."""
        first, *others = (h.shape.kv_bytes(name, num_tokens, h.bytes_per_kv_value) for h in holdings)
        return figure(name, "B", "target + draft", target=first, draft=others[0]) if others else first


def plan_memory(
    target: Holding, draft: Holding | None, layout: GpuLayout, hardware: Hardware, share: float = MEMORY_SHARE
) -> MemoryPlan:
    weights = weights_per_gpu("weights per GPU", target, layout)
    drafts = None if draft is None else weights_per_gpu("draft weights per GPU", draft, layout)
    given: dict[str, float | Figure] = {"memory": hardware.memory_bytes, "share": share, "weights": weights}
    if drafts is None:
        kv = figure("KV room per GPU", "B", "memory * share - weights", **given)
        token = target.shape.kv_token_bytes(target.bytes_per_kv_value)
    else:
        kv = figure("KV room per GPU", "B", "memory * share - weights - draft", draft=drafts, **given)
        assert draft is not None
        token = figure(
            "KV per token, with the draft model's",
            "B",
            "target + draft",
            target=target.shape.kv_token_bytes(target.bytes_per_kv_value),
            draft=draft.shape.kv_token_bytes(draft.bytes_per_kv_value),
        )
    shares = layout.num_kv_shares(target.shape)
    pool = figure("KV room of the worker", "B", "max(0, room) * shares", room=kv, shares=shares)
    return MemoryPlan(weights, drafts, kv, pool, token)


def weights_per_gpu(name: str, holding: Holding, layout: GpuLayout) -> Figure:
    shape, weights = holding.shape, holding.weights
    formula = "(common * bytes + embeddings * embedding * bytes_16) / slices + rest * bytes_16"
    given = {
        "common": shape.num_common_weights,
        "bytes": weights.bytes_per_weight,
        "embeddings": 1 if shape.tied else 2,
        "embedding": shape.num_embedding_weights,
        "bytes_16": SIXTEEN_BITS,
        "slices": layout.num_slices,
        "rest": shape.num_gate_weights + shape.num_norm_weights,
    }
    if shape.experts is None:
        return figure(name, "B", formula, **given)
    return figure(
        name,
        "B",
        f"{formula} + slots * expert_layers * expert * expert_bytes",
        slots=num_expert_slots(shape.experts, layout),
        expert_layers=shape.experts.num_layers,
        expert=shape.experts.num_weights,
        expert_bytes=weights.bytes_per_expert_weight,
        **given,
    )
