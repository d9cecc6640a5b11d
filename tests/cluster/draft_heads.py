"""Random draft heads on disk: their guesses are bad, but real, and depend on all that a drafter has to keep."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from decode.draft_head import CARD, WEIGHTS
from decode.eagle_training import EagleModule
from decode.medusa_training import MedusaModule
from model.checkpoint import model_digest
from model.config import ModelConfig

TAPS = (0, 1)
INNER_SIZE = 40
NUM_MEDUSA_HEADS = 3


def write_head(
    folder: Path, kind: str, target: Path, *, digest: str | None = None, without: Collection[str] = ()
) -> Path:
    """For the model in `target`, or by its card for another one of this `digest`; `without` some of its tensors."""
    config = ModelConfig.from_folder(target)
    weights = random_weights(kind, config)
    vocabulary = torch.arange(0, config.vocab_size, 2)
    weights["d2t"] = vocabulary - torch.arange(len(vocabulary))
    folder.mkdir(exist_ok=True)
    save_file({name: tensor for name, tensor in weights.items() if name not in without}, folder / WEIGHTS)
    card = {"kind": kind, "targets": {"tiny": digest or model_digest(target)}, "taps": TAPS if kind == "eagle" else ()}
    (folder / CARD).write_text(json.dumps(card))
    return folder


def random_weights(kind: str, config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """With names and shapes as they are trained."""
    torch_random = torch.Generator().manual_seed(seed)
    eagle = kind == "eagle"
    module = EagleModule(config, len(TAPS), INNER_SIZE) if eagle else MedusaModule(config.hidden_size, NUM_MEDUSA_HEADS)
    return {name: torch.randn(like.shape, generator=torch_random) * 0.3 for name, like in module.state_dict().items()}
