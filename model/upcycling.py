"""Makes a Mixtral-format mixture of experts out of a dense Llama-format model, on disk and layer by layer.

Every expert is the dense feed-forward net times (1 + noise); the gate is random. The result computes, routes and
balances like a real MoE and writes like its dense parent. It knows files and tensors, not how they are served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

LAYERS_PER_FILE = 6  # what is held in memory while writing
_EXPERT_PARTS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))  # Mixtral's names, Llama's names
_COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE")


@dataclass(frozen=True, slots=True)
class Upcycling:
    """`gate_seeds` has one seed per layer: with a single one, some layers send nearly all tokens to two experts."""

    num_experts: int
    num_experts_per_token: int
    expert_noise: float  # standard deviation, relative to each weight
    gate_scale: float  # standard deviation of the gate's weights
    gate_seeds: tuple[int, ...]
    noise_seed: int = 0


def upcycle(dense: Path, target: Path, recipe: Upcycling, layer_done: Callable[[], None] = lambda: None) -> None:
    """Writes the MoE into the existing folder `target`. Bit-identical on every machine."""
    config = json.loads((dense / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    if len(recipe.gate_seeds) != num_layers:
        raise ValueError(f"{len(recipe.gate_seeds)} gate seeds for {num_layers} layers")
    starts = range(0, num_layers, LAYERS_PER_FILE)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    with ExitStack() as stack:
        source = _Source(dense, stack)
        for number, start in enumerate(starts, 1):
            tensors = source.outside_layers() if start == 0 else {}
            for layer in range(start, min(start + LAYERS_PER_FILE, num_layers)):
                tensors.update(_moe_layer(source, layer, recipe))
                layer_done()
            name = f"model-{number:05}-of-{len(starts):05}.safetensors"
            save_file(tensors, target / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, name))
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (target / "config.json").write_text(json.dumps(_moe_config(config, recipe), indent=2))
    for name in _COPIED_FILES:
        if (dense / name).exists():
            shutil.copyfile(dense / name, target / name)


class _Source:
    """The tensors of a folder of safetensors files, read one at a time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def outside_layers(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self._file_of if not name.startswith("model.layers.")}

    def layer_names(self, layer: int) -> Iterator[str]:
        return (name for name in self._file_of if name.startswith(f"model.layers.{layer}."))


def _moe_layer(source: _Source, layer: int, recipe: Upcycling) -> dict[str, torch.Tensor]:
    tensors = {name: source.tensor(name) for name in source.layer_names(layer) if ".mlp." not in name}
    moe = f"model.layers.{layer}.block_sparse_moe"
    for part, (moe_name, dense_name) in enumerate(_EXPERT_PARTS):
        weight = source.tensor(f"model.layers.{layer}.mlp.{dense_name}.weight")
        for expert in range(recipe.num_experts):
            noise = _uniform(weight.shape, recipe.expert_noise, recipe.noise_seed, layer, part, expert)
            tensors[f"{moe}.experts.{expert}.{moe_name}.weight"] = (weight.float() * (1.0 + noise)).to(weight.dtype)
    hidden_size = weight.shape[1]  # up_proj came last: [intermediate, hidden]
    gate = _uniform((recipe.num_experts, hidden_size), recipe.gate_scale, recipe.gate_seeds[layer], layer)
    tensors[f"{moe}.gate.weight"] = gate.to(weight.dtype)
    return tensors


def _uniform(shape: tuple[int, ...], deviation: float, *seed: int) -> torch.Tensor:
    """Uniform, not normal: without a logarithm every machine gets the same bits, and two workers the same digest."""
    unit = np.random.Generator(np.random.PCG64(list(seed))).random(tuple(shape), dtype=np.float32)
    return torch.from_numpy((unit * 2.0 - 1.0) * np.float32(deviation * 3.0**0.5))


def _moe_config(dense: dict[str, object], recipe: Upcycling) -> dict[str, object]:
    dropped = {"attention_bias", "mlp_bias", "pretraining_tp"}
    kept = {key: value for key, value in dense.items() if key not in dropped}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.num_experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }
