"""EAGLE-3: a decoder layer that reads embedding and hidden state side by side (arXiv 2503.01840).

How it drafts is `decode.draft_layer`'s affair; here is what it computes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import DraftShape
from decode.draft_head import DraftHead
from decode.draft_layer import LayerDrafter
from decode.verification import Method
from model.moe import Expert
from model.step_input import StepInput
from model.torch_runner import TorchRunner


class EagleDrafter(LayerDrafter):
    def __init__(self, target: TorchRunner, head: DraftHead, method: Method, shape: DraftShape) -> None:
        super().__init__(target, EagleLayer(target, head), method, shape)


class EagleLayer:
    """Implements `DraftLayer`."""

    def __init__(self, target: TorchRunner, head: DraftHead) -> None:
        config, backend = target.config, target.backend.for_drafts()
        place = backend.place
        self.name = head.name
        self.taps = head.card.taps
        self._embedding = target.model.embedding
        self._activations = backend.activations
        self._number = config.num_layers  # the one behind the target's
        weight = {name: place(tensor) for name, tensor in head.weights.items() if name != "lm_head.weight"}

        self._fuse = backend.linear([weight["fc.weight"]], [None])
        self._embedding_norm = backend.norm(weight["midlayer.input_layernorm.weight"], config.norm_eps)
        self._hidden_norm = backend.norm(weight["midlayer.hidden_norm.weight"], config.norm_eps)
        qkv = [weight[f"midlayer.self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
        self._qkv, self._kv = backend.linear(qkv, [None] * 3), backend.linear(qkv[1:], [None] * 2)
        self._output = backend.linear([weight["midlayer.self_attn.o_proj.weight"]], [None])
        self._mlp_norm = backend.norm(weight["midlayer.post_attention_layernorm.weight"], config.norm_eps)
        names = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        self._mlp = backend.feed_forward(Expert(*(weight[name] for name in names)))
        self._norm = backend.norm(weight["norm.weight"], config.norm_eps)
        self.vocabulary = None if head.vocabulary is None else head.vocabulary.to(self._embedding.device)
        self._head = head.output(target, backend)
        self._attention = backend.attention(config, target.cache, [None] * (self._number + 1))

    def fuse(self, features: Tensor) -> Tensor:
        return self._fuse(features)

    def store(self, step: StepInput, hidden: Tensor) -> None:
        self._attention.store(self._number, self._kv(self._joined(step, hidden)), step)

    def run(self, step: StepInput, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        queries = self._attention.store(self._number, self._qkv(self._joined(step, hidden)), step)
        attended = self._attention.attend(self._number, queries, step)
        hidden, attended = hidden[rows], attended[rows]
        self._output(attended, add_to=hidden)
        self._mlp(self._mlp_norm(hidden), add_to=hidden)
        return self._head(self._norm(hidden)), hidden

    def _joined(self, step: StepInput, hidden: Tensor) -> Tensor:
        embedded = F.embedding(step.token_ids, self._embedding).to(self._activations)
        return torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), dim=-1)
