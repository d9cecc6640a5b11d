"""One generic decoder over flat tokens: chunks of many sequences, prefill and decode mixed, in one forward.

It reads the weights by their Hugging Face names and puts together what a backend makes of them.
Letters: T tokens of all chunks, R rows whose logits are wanted, V vocabulary, K hidden size, L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention import HeadNorms
from model.backend import Backend
from model.config import ModelConfig, RopeConfig
from model.kv_cache import PagedKVCache
from model.linear import Linear, Norm
from model.moe import Expert, FeedForward
from model.runner import LayerDone
from model.step_input import StepInput

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """`hidden` is what the head reads: after the last norm. `features` are of all tokens, those of one tap after those
    of another. `expert_load` is None where there are no experts. `unread` is like `hidden`, of rows without logits."""

    logits: Tensor  # [R, V] float32
    hidden: Tensor  # [R, K]
    features: Tensor | None = None  # [T, taps * K]
    expert_load: Tensor | None = None  # [L, E]
    unread: Tensor | None = None  # [*, K]


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Linear
    output: Linear
    feed_forward_norm: Norm
    feed_forward: FeedForward


class Transformer:
    """`first_layer` is that of the cache where its own begin: behind another model's."""

    def __init__(
        self, config: ModelConfig, weights: Weights, backend: Backend, cache: PagedKVCache, *, first_layer: int = 0
    ) -> None:
        self._first_layer = first_layer
        self.inverse_frequencies = inverse_frequencies(config.rope, config.head_dim).to(cache.memory.device)
        self._activations = backend.activations
        self.embedding = weights["model.embed_tokens.weight"]  # [V, hidden]
        self._layers = [_layer(config, weights, backend, layer) for layer in range(config.num_layers)]
        self.norm = backend.norm(weights["model.norm.weight"], config.norm_eps)
        self.head_weight = self.embedding if config.tie_word_embeddings else weights["lm_head.weight"]
        self._head = backend.linear([self.head_weight], [None])
        norms = [None] * first_layer + [_head_norms(config, weights, layer) for layer in range(config.num_layers)]
        self._attention = backend.attention(config, cache, norms)

    def forward(
        self,
        step: StepInput,
        rows: Tensor,
        layer_done: LayerDone | None = None,
        taps: Sequence[int] = (),
        unread: Tensor | None = None,
    ) -> ForwardOutput:
        """Logits of the tokens at `rows` [R]; with `taps`, also what goes into those layers, or out of the last one.

        That has keys and values of all tokens, but what follows in it is computed for `rows` alone, and for the tokens
        at `unread`, which the head does not read here; unless its output is tapped.
        `layer_done` is called when the calls that store a layer have returned: on CUDA its work is then only queued.
        """
        hidden = F.embedding(step.token_ids, self.embedding).to(self._activations)  # [T, K]
        num_layers, num_read = len(self._layers), len(rows)
        if unread is not None:
            rows = torch.cat((rows, unread))
        first_layer = self._first_layer
        features: dict[int, Tensor] = {}
        loads = []
        for number, layer in enumerate(self._layers):
            if number in taps:
                features[number] = hidden.clone()  # the layer adds to it in place
            queries = self._attention.store(first_layer + number, layer.qkv(layer.attention_norm(hidden)), step)
            if layer_done is not None:
                layer_done(number)
            attended = self._attention.attend(first_layer + number, queries, step)
            if number == num_layers - 1 and num_layers not in taps:
                hidden, attended = hidden[rows], attended[rows]
            layer.output(attended, add_to=hidden)
            load = layer.feed_forward(layer.feed_forward_norm(hidden), add_to=hidden)
            if load is not None:
                loads.append(load)
        if num_layers in taps:
            features[num_layers], hidden = hidden, hidden[rows]
        normed = self.norm(hidden)
        return ForwardOutput(
            logits=self.logits(normed[:num_read]),
            hidden=normed[:num_read],
            features=torch.cat([features[tap] for tap in taps], dim=-1) if taps else None,
            expert_load=torch.stack(loads) if loads else None,
            unread=None if unread is None else normed[num_read:],
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[*, K] after the last norm -> float32 [*, V]"""
        return self._head(hidden).float()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each rotated pair, [head_dim / 2] float32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    # llama3: long wavelengths are slowed by the factor, short ones kept, and in between the two are blended.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _layer(config: ModelConfig, weights: Weights, backend: Backend, layer: int) -> Layer:
    prefix = f"model.layers.{layer}."
    attention = [f"{prefix}self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    matrices = [weights[f"{name}.weight"] for name in attention]
    biases = [weights.get(f"{name}.bias") for name in attention]
    return Layer(
        attention_norm=backend.norm(weights[prefix + "input_layernorm.weight"], config.norm_eps),
        qkv=backend.linear(matrices[:3], biases[:3]),
        output=backend.linear(matrices[3:], biases[3:]),
        feed_forward_norm=backend.norm(weights[prefix + "post_attention_layernorm.weight"], config.norm_eps),
        feed_forward=_feed_forward(config, weights, backend, prefix),
    )


def _feed_forward(config: ModelConfig, weights: Weights, backend: Backend, prefix: str) -> FeedForward:
    if not config.num_experts:
        names = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        return backend.feed_forward(Expert(*(weights[name] for name in names)))
    prefix += "block_sparse_moe."
    experts = [
        Expert(*(weights[f"{prefix}experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2")))
        for expert in range(config.num_experts)
    ]
    return backend.mixture(experts, weights[prefix + "gate.weight"], config.num_experts_per_token)


def _head_norms(config: ModelConfig, weights: Weights, layer: int) -> HeadNorms | None:
    prefix = f"model.layers.{layer}.self_attn."
    return HeadNorms(weights[prefix + "q_norm.weight"], weights[prefix + "k_norm.weight"]) if config.qk_norm else None
