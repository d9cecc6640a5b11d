"""The sizes of a model that planning needs: weights by what reads them, and what a token leaves in the KV cache.

All weights are counted, biases and norms too. Letters of formulas are spelt out: see the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.figure import Figure, figure
from router.precision import SIXTEEN_BITS, WeightFormat


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The Mixture-of-Experts layers. `num_weights`: of one expert; `num_shared_weights`: of what all tokens pass."""

    num_layers: int
    num_experts: int
    num_chosen: int
    num_weights: int
    num_shared_weights: int
    num_gate_weights: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`num_cached_values`: per token and layer. `prefill_flops`, `decode_flops`: per query and key, of one layer.

    A latent cache (MLA) is one vector per token; decode multiplies queries into it, prefill unpacks it.
    """

    num_heads: int
    num_kv_heads: int  # 1 of a latent cache
    num_weights: int
    num_cached_values: int
    vector_size: int  # of a key, a value or a latent: what shares a scale in 8 bits
    prefill_flops: int
    decode_flops: int
    latent: bool
    window: int  # tokens
    num_windowed_layers: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_dense_layers: int  # with a feed-forward net that is no Mixture of Experts
    num_dense_weights: int  # of one of those
    attention: AttentionShape
    experts: ExpertShape | None
    num_norm_weights: int
    tied: bool  # the output head is the embedding
    stored: str  # name of the format the weights are published in
    max_tokens: int

    @property
    def num_embedding_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_full_layers(self) -> int:
        return self.num_layers - self.attention.num_windowed_layers

    @property
    def num_gate_weights(self) -> int:
        return self.experts.num_layers * self.experts.num_gate_weights if self.experts else 0

    @property
    def num_common_weights(self) -> int:
        """Of the matrices that every token passes in the layers: attention, dense and shared feed-forward nets."""
        shared = self.experts.num_layers * self.experts.num_shared_weights if self.experts else 0
        dense = self.num_dense_layers * self.num_dense_weights
        return self.num_layers * self.attention.num_weights + dense + shared

    @property
    def num_expert_weights(self) -> int:
        """Of all routed experts of all layers."""
        if self.experts is None:
            return 0
        return self.experts.num_layers * self.experts.num_experts * self.experts.num_weights

    @property
    def num_active_expert_weights(self) -> int:
        if self.experts is None:
            return 0
        return self.experts.num_layers * self.experts.num_chosen * self.experts.num_weights

    @property
    def num_layer_weights(self) -> int:
        """Those that one token is multiplied with, without the output head."""
        return self.num_common_weights + self.num_active_expert_weights + self.num_gate_weights

    @property
    def total_weights(self) -> Figure:
        return figure(
            "weights",
            "",
            "common + gates + experts + norms + embeddings * embedding",
            common=self.num_common_weights,
            gates=self.num_gate_weights,
            experts=self.num_expert_weights,
            norms=self.num_norm_weights,
            embeddings=1 if self.tied else 2,
            embedding=self.num_embedding_weights,
        )

    @property
    def active_weights(self) -> Figure:
        """With the output head; a row of the embedding is looked up, not multiplied."""
        return figure(
            "active weights per token",
            "",
            "common + gates + active_experts + head",
            common=self.num_common_weights,
            gates=self.num_gate_weights,
            active_experts=self.num_active_expert_weights,
            head=self.num_embedding_weights,
        )

    def weight_bytes(self, weights: WeightFormat) -> Figure:
        return figure(
            "weights in memory",
            "B",
            "common * bytes + experts * expert_bytes + (gates + norms + embeddings * embedding) * bytes_16",
            common=self.num_common_weights,
            bytes=weights.bytes_per_weight,
            experts=self.num_expert_weights,
            expert_bytes=weights.bytes_per_expert_weight,
            gates=self.num_gate_weights,
            norms=self.num_norm_weights,
            embeddings=1 if self.tied else 2,
            embedding=self.num_embedding_weights,
            bytes_16=SIXTEEN_BITS,
        )

    def kv_token_bytes(self, bytes_per_value: float) -> Figure:
        """What one more token takes while all layers still see it."""
        attention = self.attention
        if attention.latent:
            formula, given = "layers * latent_values * bytes", {"latent_values": attention.num_cached_values}
        else:
            formula = "2 * layers * kv_heads * head_dim * bytes"
            given = {"kv_heads": attention.num_kv_heads, "head_dim": attention.vector_size}
        return figure("KV per token", "B", formula, layers=self.num_layers, bytes=bytes_per_value, **given)

    def kv_bytes(self, name: str, num_tokens: float, bytes_per_value: float) -> Figure:
        """Of one sequence. Layers with a window keep no more than that."""
        token = self.kv_token_bytes(bytes_per_value)
        if not self.attention.num_windowed_layers:
            return figure(name, "B", "token_bytes * tokens", token_bytes=token, tokens=num_tokens)
        return figure(
            name,
            "B",
            "token_bytes / layers * (full_layers * tokens + window_layers * min(tokens, window))",
            token_bytes=token,
            layers=self.num_layers,
            full_layers=self.num_full_layers,
            window_layers=self.attention.num_windowed_layers,
            window=self.attention.window,
            tokens=num_tokens,
        )
