"""Tiny random models of every family, made by transformers, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 67
MAX_TOKENS = 256
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES = ("llama", "llama3-rope", "linear-rope", "llama-bias", "qwen2", "qwen3", "mixtral")


def build(family: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Writes a model, with a stand-in for its tokenizer; returns it in float32, on the weights as written."""
    torch.manual_seed(seed)
    model = _random(family)
    for parameter in model.parameters():  # biases and norms of a fresh model are 0 and 1: that would hide mistakes
        parameter.data.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
    model = model.to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model.float().eval()


def _random(family: str) -> PreTrainedModel:
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16))
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**_SIZES, head_dim=8, num_local_experts=5, num_experts_per_tok=2))
    special: dict[str, object] = {}
    if family == "llama-bias":
        special = {"attention_bias": True}
    elif family == "llama3-rope":
        special = {"rope_parameters": _LLAMA3}
    elif family == "linear-rope":
        special = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    return LlamaForCausalLM(LlamaConfig(**_SIZES, **special))


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] after every token, by transformers, in one piece."""
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
