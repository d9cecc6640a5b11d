"""A draft head on disk: safetensors, and a card that says which model it is for.

EAGLE heads have the tensor names of EAGLE-3 checkpoints. `d2t` says which tokens a reduced draft vocabulary has (its
i-th is token i + d2t[i]); without `lm_head.weight` the target's own output rows are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.backend import Backend
from model.config import ModelConfig
from model.linear import Linear
from model.torch_runner import TorchRunner

WEIGHTS, CARD = "head.safetensors", "card.json"
HEAD_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
SHIPPED = Path(__file__).parent / "heads"


class HeadUnusable(ValueError):
    """A draft head cannot be used with this target: the message names what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class HeadCard:
    """`targets` are the digests of the models it drafts for, by name: the one it was trained for, and those that
    `decode.measure_head` was given (see `model.checkpoint.model_digest`)."""

    kind: str  # "eagle" or "medusa"
    targets: Mapping[str, str]
    taps: tuple[int, ...] = ()
    about: Mapping[str, Any] | None = None  # data, steps, acceptance; for people

    @classmethod
    def read(cls, folder: Path) -> HeadCard:
        path = folder / CARD
        if not folder.is_dir():
            raise HeadUnusable(f"there is no folder {folder}")
        try:
            card = json.loads(path.read_text(encoding="utf-8"))
            return cls(card["kind"], dict(card["targets"]), tuple(card.get("taps", ())), card.get("about"))
        except FileNotFoundError:
            raise HeadUnusable(f"{folder} has no {CARD}, so it is not a draft head") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HeadUnusable(f"{path} is not the card of a draft head: {error!r}") from error

    def check_target(self, folder: Path, digest: str) -> None:
        if digest not in self.targets.values():
            names = ", ".join(f"{name} ({known})" for name, known in self.targets.items())
            raise HeadUnusable(
                f"the draft head in {folder} is for {names}; this model's digest is {digest}: "
                "python -m decode.train_head trains one for it"
            )

    def check_taps(self, folder: Path, num_layers: int) -> None:
        """A layer that is not there would fail every step of the target, not only drafts."""
        are_layers = all(type(tap) is int and tap in range(num_layers) for tap in self.taps)
        if self.kind == "eagle" and not (self.taps and are_layers):
            raise HeadUnusable(
                f"taps in {folder / CARD} are {list(self.taps)}; layers of this model are 0 to {num_layers - 1}"
            )


def shipped_head(kind: str, digest: str) -> Path | None:
    """The folder of the head of this kind that comes with pdserve for the model of this digest."""
    for path in sorted(SHIPPED.glob(f"*/{CARD}")):
        card = HeadCard.read(path.parent)
        if card.kind == kind and digest in card.targets.values():
            return path.parent
    return None


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights by name, and the token ids [D] of the draft vocabulary, ascending; None for all."""

    name: str
    card: HeadCard
    weights: Mapping[str, Tensor]
    vocabulary: Tensor | None

    @classmethod
    def load(cls, folder: Path, kind: str, config: ModelConfig, model_digest: str | None) -> DraftHead:
        """`model_digest` of the target; None for whichever it fits by its shapes.

        Raises:
            HeadUnusable: not there, of another kind, for another model, or tensors missing or misshapen.
        """
        card = HeadCard.read(folder)
        if card.kind != kind:
            raise HeadUnusable(f"the draft head in {folder} is of kind {card.kind!r}, not {kind!r}")
        if model_digest is not None:
            card.check_target(folder, model_digest)
        card.check_taps(folder, config.num_layers)
        path = folder / WEIGHTS
        try:
            with safe_open(str(path), framework="pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise HeadUnusable(f"{path} cannot be read: {error}") from error
        vocabulary = _vocabulary(path, weights.pop("d2t", None), config.vocab_size)
        weights.pop("t2d", None)
        num_drafted = config.vocab_size if vocabulary is None else len(vocabulary)
        shapes = _eagle_shapes(card, weights, config) if kind == "eagle" else _medusa_shapes(weights, config)
        if "lm_head.weight" in weights:
            shapes["lm_head.weight"] = (num_drafted, config.hidden_size)
        _check_tensors(path, weights, shapes)
        return cls(f"{kind}:{_digest(weights, card.taps, vocabulary)}", card, weights, vocabulary)

    def output(self, target: TorchRunner, backend: Backend) -> Linear:
        """What makes logits of the draft vocabulary: by the head's own rows, or else the target's.

        Where those are all used they are read in place; other rows are `backend`'s, which may copy them.
        """
        own = self.weights.get("lm_head.weight")
        if own is not None:
            return backend.linear([backend.place(own)], [None])
        rows = target.model.head_weight
        if self.vocabulary is None:
            return target.backend.linear([rows], [None])
        return backend.linear([rows[self.vocabulary.to(rows.device)]], [None])

    def placed(self, config: ModelConfig) -> list[Tensor]:
        """What takes memory beside the target: the weights, and a copy of the target's output rows if it drafts a part
        of the vocabulary by them (without content here).
        """
        rows = []
        if self.vocabulary is not None and "lm_head.weight" not in self.weights:
            shape, dtype = (len(self.vocabulary), config.hidden_size), getattr(torch, config.dtype)
            rows = [torch.empty(shape, dtype=dtype, device="meta")]
        return [*self.weights.values(), *rows]


def _vocabulary(path: Path, offsets: Tensor | None, vocab_size: int) -> Tensor | None:
    if offsets is None:
        return None
    token_ids = offsets.long().flatten() + torch.arange(offsets.numel())
    in_range = (token_ids >= 0) & (token_ids < vocab_size)
    is_ascending = bool(in_range.all()) and bool((token_ids.diff() > 0).all())
    if len(token_ids) == 0 or offsets.is_floating_point() or not is_ascending:
        raise HeadUnusable(f"d2t of {path} does not name ascending token ids from 0 to {vocab_size - 1}")
    return token_ids


def _eagle_shapes(card: HeadCard, weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    size, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    gate = weights.get("midlayer.mlp.gate_proj.weight")
    inner = gate.shape[0] if gate is not None and gate.ndim == 2 else config.hidden_size
    return {
        "fc.weight": (size, len(card.taps) * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
    }


def num_medusa_heads(weights: Mapping[str, Tensor]) -> int:
    return sum(re.fullmatch(r"heads\.[0-9]+\.weight", name) is not None for name in weights)


def _medusa_shapes(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    size = config.hidden_size
    count = max(1, num_medusa_heads(weights))
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(count):
        shapes[f"heads.{number}.weight"] = (size, size)
        shapes[f"heads.{number}.bias"] = (size,)
    return shapes


def _check_tensors(path: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(shapes) - set(weights))
    if missing:
        raise HeadUnusable(f"{path} lacks {', '.join(missing)}")
    for name, shape in shapes.items():
        found = tuple(weights[name].shape)
        if found != shape:
            raise HeadUnusable(f"{name} of {path} has shape {list(found)}; this target needs {list(shape)}")
    # The kernels read all matrices of a product as one dtype.
    dtypes = {weights[name].dtype for name in shapes}
    if len(dtypes) > 1 or not dtypes <= HEAD_DTYPES:
        found_dtypes, known = (", ".join(sorted(map(str, some))) for some in (dtypes, HEAD_DTYPES))
        raise HeadUnusable(f"the tensors of {path} are of {found_dtypes}; all must be of the same, one of {known}")


def _digest(weights: Mapping[str, Tensor], taps: Sequence[int], vocabulary: Tensor | None) -> str:
    """So that two workers exchange draft KV only if they have the same head, and it reads and drafts the same."""
    content = hashlib.sha256(repr((list(taps), None if vocabulary is None else vocabulary.tolist())).encode())
    for name in sorted(weights):
        content.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:12]
