"""Random draft heads on disk: their guesses are bad, but real, and depend on all that a drafter has to keep."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from decode.draft_head import CARD, WEIGHTS
from model.checkpoint import model_digest
from model.config import ModelConfig

TAPS = (0, 1)
INNER_SIZE = 40
NUM_MEDUSA_HEADS = 3


def write_head(
    folder: Path, kind: str, target: Path, *, digest: str | None = None, without: Collection[str] = ()
) -> Path:
    """For the model in `target`, or by its card for another one of this `digest`; `without` some of its tensors."""
    torch_random = torch.Generator().manual_seed(0)
    shapes = (_eagle_shapes if kind == "eagle" else _medusa_shapes)(ModelConfig.from_folder(target))
    weights = {name: torch.randn(shape, generator=torch_random) * 0.3 for name, shape in shapes.items()}
    vocabulary = torch.arange(0, ModelConfig.from_folder(target).vocab_size, 2)
    weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
    folder.mkdir(exist_ok=True)
    save_file({name: tensor for name, tensor in weights.items() if name not in without}, folder / WEIGHTS)
    card = {"kind": kind, "targets": {"tiny": digest or model_digest(target)}, "taps": TAPS if kind == "eagle" else ()}
    (folder / CARD).write_text(json.dumps(card))
    return folder


def _eagle_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    size, heads, kv = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    return {
        "fc.weight": (size, len(TAPS) * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.mlp.gate_proj.weight": (INNER_SIZE, size),
        "midlayer.mlp.up_proj.weight": (INNER_SIZE, size),
        "midlayer.mlp.down_proj.weight": (size, INNER_SIZE),
        "norm.weight": (size,),
    }


def _medusa_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(NUM_MEDUSA_HEADS):
        shapes |= {f"heads.{number}.weight": (size, size), f"heads.{number}.bias": (size,)}
    return shapes
